"""`python -m benchmarks.run cpu`: measures, writes benchmarks/results/*.csv, prints a table, draws.

`gpu` is in gpu.py, `plan` in plan.py; `devices` prints the times of all GPUs side by side. On the CPU, exact counts at
full size come first, from fake tensors; then the heads, all of one case by turns; then a step of the layers,
log-probabilities from logits, losses and the memory of the policy worker, the last two in modules that also run alone.
Every case's rows are written once it is measured.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import cases, gpu, layer_step, log_probs, loss_cases, losses, plan, plot, policy_memory, record
from benchmarks.cases import Case
from benchmarks.implementations import FUSED, MODELS, UNFUSED, available, ours
from benchmarks.measure import Baselines, Inputs, baselines, counts, measure_case, measured_once, truth, whole_inputs
from benchmarks.meter import one_rank_of
from benchmarks.progress import say, shown
from benchmarks.worlds import run_world
from megatron_ext.head.call.gpu_properties import DEVICES
from megatron_on_cpu import megatron_on_cpu


def count_full_size(case: Case) -> list[tuple[str, str, str, list[float]]]:
    """FLOPs, bytes and collectives of one rank, exactly, without computing anything."""
    rows = []
    for impl in [UNFUSED, FUSED, ours(1), ours(0), ours(None), *MODELS]:  # in between they are linear in `cache`
        with one_rank_of(case.ranks) as group, megatron_on_cpu():
            x_TD = torch.empty(case.tokens, case.width, dtype=case.dtype, requires_grad=True)
            w_VD = torch.empty(case.columns, case.width, dtype=case.dtype, requires_grad=True)
            labels_T = torch.empty(case.tokens, dtype=torch.int64)
            head = impl.build(case, group)
            _, costs = measured_once(head, Inputs(x_TD, w_VD, labels_T))
        rows += [(impl.name, metric, unit, [value]) for metric, unit, value in counts(case, costs)]
    return rows


def measure_world(case: Case, true_path: Path, known: Baselines, budget_s: float):
    """On every rank of a world: all heads of one case."""
    true = torch.load(true_path, mmap=True, weights_only=False, map_location=case.device)
    impls, absent = available(case)
    with megatron_on_cpu():
        group = dist.group.WORLD if case.ranks > 1 else None
        rows, refused = measure_case(case, group, impls, true, known, budget_s)
    return rows, absent + refused


def quiet() -> None:
    """Megatron warns of every optional package that is absent, the profiler of its own doings: not here."""
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"  # for the ranks
    os.environ["KINETO_LOG_LEVEL"] = "99"


Found = tuple[
    str, list[tuple[str, str, str, list[float]]], list[str]
]  # case, rows (impl, metric, unit, values), remarks


def seconds(options: argparse.Namespace, usual: float = 10) -> float:
    """For the times of one case."""
    return usual if options.seconds is None else options.seconds


def counted(options: argparse.Namespace) -> Iterator[Found]:
    yield cases.COUNTED_CASE.name, count_full_size(cases.COUNTED_CASE), []


def heads(options: argparse.Namespace) -> Iterator[Found]:
    known = cases.cpu_cases(*(options.shape or ()))
    with tempfile.TemporaryDirectory() as folder:
        for case in known:
            true_path = Path(folder) / f"{case.tokens}-{case.width}-{case.vocab}.pt"
            if not true_path.exists():
                torch.save(truth(whole_inputs(case)), true_path)
            throughs = {impl.through for impl in available(case)[0]}
            errors = baselines(case, torch.load(true_path, mmap=True, weights_only=False), throughs)
            rows, remarks = run_world(case.ranks, "cpu", measure_world, case, true_path, errors, seconds(options))
            yield case.name, rows, remarks


def layers(options: argparse.Namespace) -> Iterator[Found]:
    for width in layer_step.BATCHES:
        yield layer_step.case_name(width), layer_step.measure_layers(seconds(options, 5), width), []


def log_probs_of_logits(options: argparse.Namespace) -> Iterator[Found]:
    found, remarks = log_probs.measure_log_probs(seconds(options, log_probs.SECONDS))
    for name in dict.fromkeys(name for name, _ in found):
        yield name, [row for other, row in found if other == name], remarks
        remarks = []


def losses_from_hidden_states(options: argparse.Namespace) -> Iterator[Found]:
    for case in loss_cases.CASES:  # the times of one: `benchmarks.losses` has those of the others
        budget_s = seconds(options, losses.SECONDS) if case is loss_cases.GRPO else None
        yield losses.case_name(case), *losses.measure_losses(case, budget_s)


def policy(options: argparse.Namespace) -> Iterator[Found]:
    yield policy_memory.CASE, policy_memory.measure_policy(**policy_memory.SIZES), []


PARTS = {
    "counted": counted,
    "heads": heads,
    "layers": layers,
    "log-probs": log_probs_of_logits,
    "losses": losses_from_hidden_states,
    "policy": policy,
}


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=["cpu", "gpu", "plan", "devices"])
    parser.add_argument("--only", choices=list(PARTS), nargs="+", help="cpu: these parts (default: all)")
    parser.add_argument("--seconds", type=float, help="for the times of one case (default: 10 or fewer)")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("T", "D", "V"), help="cpu: cases of other sizes")
    parser.add_argument("--rehearse", action="store_true", help="gpu: the same program on a CPU, at toy sizes")
    parser.add_argument("--device", choices=list(DEVICES), default="H200", help="plan: for this GPU")
    parser.add_argument("--out", type=Path, help="the CSV (default: benchmarks/results/, named for the machine)")
    options = parser.parse_args()
    if options.machine == "plan":
        return plan.main(options.out, DEVICES[options.device])
    if options.machine == "devices":
        files = [options.out] if options.out else sorted(record.RESULTS.glob("nvidia-*.csv"))
        rows = [row for file in files for row in record.read(file)]
        return print("\n".join(record.by_device(rows, metric) for metric in ("time", "energy of a step")))
    if options.machine == "gpu":
        if options.rehearse:
            if os.environ.get("TRITON_INTERPRET") != "1":  # Triton asks when it is imported
                environment = {**os.environ, "TRITON_INTERPRET": "1"}
                again = [sys.executable, "-m", "benchmarks.run", *sys.argv[1:]]
                sys.exit(subprocess.run(again, env=environment).returncode)
        elif not torch.cuda.is_available():
            parser.error("gpu: torch finds no CUDA device here; `--rehearse` runs the same program on the CPU")
        gpu.main(options.out, 0.0 if options.rehearse else seconds(options), options.rehearse)
        return None
    origin, began = record.Origin.here("cpu"), time.perf_counter()
    out = options.out or record.RESULTS / "cpu.csv"
    rows = [origin.row("machine", "-", "load average", "1", [os.getloadavg()[0]])]
    record.write(out, rows)
    remarks: list[str] = []
    parts = options.only or list(PARTS)
    for part in shown(parts, "parts"):
        for case, found, said in PARTS[part](options):
            new = [origin.row(case, *row) for row in found]
            record.write(out, new)  # at once: what comes after it may fail
            rows += new
            remarks += [line if line.startswith(case) else f"{case}: {line}" for line in said]
            say(f"{time.perf_counter() - began:4.0f} s  {case}")

    print("\n" + record.table(rows))
    print("\n".join(remarks))
    print(f"{len(rows)} rows in {out}, {time.perf_counter() - began:.0f} s")
    if options.out is None and "heads" in parts and any(row.metric == plot.TIME for row in rows):
        print(f"drawn: {plot.cache_figure(record.read(out))}")
    return None


if __name__ == "__main__":
    main()

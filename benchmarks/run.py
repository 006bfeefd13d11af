"""`python -m benchmarks.run cpu`: measures, writes benchmarks/results/*.csv, prints a table, draws.

`gpu` is in gpu.py, `plan` in plan.py; `devices` prints the times of all GPUs side by side. On the CPU, exact counts at
full size come first, from fake tensors; then the heads, all of one case by turns; then each of the other modules that
`PARTS` names. The rows of a case are written once it is measured.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import (
    by_turns,
    cases,
    few_tokens,
    gpu,
    layer_step,
    log_probs,
    losses,
    plan,
    plot,
    policy_memory,
    record,
)
from benchmarks.cases import Case
from benchmarks.implementations import FUSED, MODELS, UNFUSED, available, ours
from benchmarks.measure import Baselines, baselines, counts, empty, measure_case, measured_once, truth, whole_inputs
from benchmarks.meter import one_rank_of
from benchmarks.record import Found, Rows
from benchmarks.worlds import run_world
from megatron_ext.head.call.gpu_properties import DEVICES
from megatron_on_cpu import megatron_on_cpu


def count_full_size(case: Case) -> Rows:
    """Return rows of the exact FLOPs, bytes and collectives of one rank, counted without computing anything."""
    rows: Rows = []
    for impl in [UNFUSED, FUSED, ours(1), ours(0), ours(None), *MODELS]:  # costs are linear in `cache`
        with one_rank_of(case.ranks) as group, megatron_on_cpu():
            _, costs = measured_once(impl.build(case, group), empty(case))
        rows += [(impl.name, metric, unit, [value]) for metric, unit, value in counts(case, costs)]
    return rows


def measure_world(case: Case, true_path: Path, known: Baselines, budget_s: float):
    """Measure all heads of one case, on every rank of a world."""
    true = torch.load(true_path, mmap=True, weights_only=False, map_location=case.device)
    impls, absent = available(case)
    with megatron_on_cpu():
        group = dist.group.WORLD if case.ranks > 1 else None
        rows, refused = measure_case(case, group, impls, true, known, budget_s)
    return rows, absent + refused


def quiet() -> None:
    """Silence Megatron's warnings of optional packages that are absent, and the profiler's messages."""
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"  # for the ranks
    os.environ["KINETO_LOG_LEVEL"] = "99"


def counted(seconds: float = 0.0) -> Iterator[Found]:
    yield cases.COUNTED_CASE.name, count_full_size(cases.COUNTED_CASE), []


def heads(seconds: float = 10.0) -> Iterator[Found]:
    known = cases.cpu_cases()
    with tempfile.TemporaryDirectory() as folder:
        for case in known:
            true_path = Path(folder) / f"{case.tokens}-{case.width}-{case.vocab}.pt"
            if not true_path.exists():
                torch.save(truth(whole_inputs(case)), true_path)
            throughs = {impl.through for impl in available(case)[0]}
            errors = baselines(case, torch.load(true_path, mmap=True, weights_only=False), throughs)
            yield case.name, *run_world(case.ranks, measure_world, case, true_path, errors, seconds)


# The measurements on a CPU; each takes the seconds for the times of one case, and has its own default.
PARTS: dict[str, Callable[..., Iterator[Found]]] = {
    "counted": counted,
    "heads": heads,
    "layers": layer_step.measure,
    "log-probs": log_probs.measure,
    "losses": losses.measure,
    "policy": policy_memory.measure,
    "by-turns": by_turns.measure,
    "few-tokens": few_tokens.measure,
}


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=["cpu", "gpu", "plan", "devices"])
    parser.add_argument(
        "--only", choices=[*PARTS, *gpu.PARTS], nargs="+", metavar="PART",
        help=f"cpu: of {', '.join(PARTS)} (default: all); gpu: of {', '.join(gpu.PARTS)} (default: heads)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, help="for the times of one case (default: 10 or fewer)")
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
    known = gpu.PARTS if options.machine == "gpu" else PARTS
    if unknown := set(options.only or ()) - {*known}:
        parser.error(f"--only {' '.join(sorted(unknown))}: the parts of {options.machine} are {', '.join(known)}")
    if options.machine == "gpu":
        if options.rehearse:
            if os.environ.get("TRITON_INTERPRET") != "1":  # Triton reads it at import
                environment = {**os.environ, "TRITON_INTERPRET": "1"}
                again = [sys.executable, "-m", "benchmarks.run", *sys.argv[1:]]
                sys.exit(subprocess.run(again, env=environment).returncode)
        elif not torch.cuda.is_available():
            parser.error("gpu: torch finds no CUDA device here; `--rehearse` runs the same program on the CPU")
        seconds = 0.0 if options.rehearse else 10.0 if options.seconds is None else options.seconds
        gpu.main(options.out, seconds, options.rehearse, [gpu.PARTS[part] for part in options.only or ("heads",)])
        return None
    measure(options.only or list(PARTS), options.out, options.seconds)
    return None


def measure(parts: list[str], out: Path | None, seconds: float | None) -> None:
    from tqdm import tqdm  # a machine with a GPU may have torch alone

    origin, began, path = record.Origin.here("cpu"), time.perf_counter(), out or record.RESULTS / "cpu.csv"
    rows = [origin.row("machine", "-", "load average", "1", [os.getloadavg()[0]])]
    record.write(path, rows)
    remarks: list[str] = []
    for part in tqdm(parts, "parts", leave=False, dynamic_ncols=True, disable=None):
        for case, found, said in PARTS[part](*() if seconds is None else (seconds,)):
            new = [origin.row(case, *row) for row in found]
            record.write(path, new)  # at once, since later cases may fail
            rows += new
            remarks += [line if line.startswith(case) else f"{case}: {line}" for line in said]
            tqdm.write(f"{time.perf_counter() - began:4.0f} s  {case}")

    print("\n" + record.table(rows))
    print("\n".join(remarks))
    print(f"{len(rows)} rows in {path}, {time.perf_counter() - began:.0f} s")
    if out is None and "heads" in parts and any(row.metric == plot.TIME for row in rows):
        print(f"drawn: {plot.cache_figure(record.read(path))}")


if __name__ == "__main__":
    main()

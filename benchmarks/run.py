"""`python -m benchmarks.run cpu` (or `gpu`): measures, writes benchmarks/results/*.csv, prints a table, draws.

Exact counts at full size come first, from fake tensors; then the cases, all heads of one by turns; then, on the CPU, a
step of the layers, log-probabilities from logits and the memory of the policy worker: modules that also run alone.
"""

import argparse
import os
import re
import tempfile
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks import cases, layer_step, log_probs, plot, policy_memory, record
from benchmarks.cases import Case
from benchmarks.implementations import MODELS, OURS, STOCK, available
from benchmarks.measure import (
    Inputs,
    counts,
    errors,
    measure_case,
    measured_once,
    plain,
    run_once,
    shard_of,
    truth,
    whole_inputs,
)
from benchmarks.meter import one_rank_of
from benchmarks.worlds import run_world
from megatron_ext.emulation import megatron_on_cpu


def count_full_size(case: Case) -> list[tuple[str, str, str, list[float]]]:
    """FLOPs, bytes and collectives of one rank, exactly, without computing anything."""
    rows = []
    for impl in STOCK + OURS + MODELS:
        with one_rank_of(case.ranks) as group, megatron_on_cpu():
            x_TD = torch.empty(case.tokens, case.width, dtype=case.dtype, requires_grad=True)
            w_VD = torch.empty(case.columns, case.width, dtype=case.dtype, requires_grad=True)
            labels_T = torch.empty(case.tokens, dtype=torch.int64)
            head = impl.build(case, group)
            _, costs = measured_once(head, Inputs(x_TD, w_VD, labels_T))
        rows += [(impl.name, metric, unit, [value]) for metric, unit, value in counts(case, costs)]
    return rows


def true_and_baseline(case: Case, path: Path) -> None:
    """Saves the fp64 results of the unsharded head, and plain PyTorch's errors against them."""
    whole = whole_inputs(case)
    true = truth(whole)
    baseline = errors(run_once(plain, shard_of(whole, case.unsharded, 0)), true)
    torch.save((true, baseline), path)


def measure_world(case: Case, truth_path: Path, budget_s: float):
    """On every rank of a world: all heads of one case."""
    true, baseline = torch.load(truth_path, mmap=True, weights_only=False, map_location=case.device)
    impls, absent = available(case)
    with megatron_on_cpu() if case.device == "cpu" else nullcontext():
        group = dist.group.WORLD if case.ranks > 1 else None
        rows, refused = measure_case(case, group, impls, true, baseline, budget_s)
    return rows, absent + refused


def quiet() -> None:
    """Megatron warns of every optional package that is absent, the profiler of its own doings: not here."""
    warnings.simplefilter("ignore")
    os.environ["PYTHONWARNINGS"] = "ignore"  # for the ranks
    os.environ["KINETO_LOG_LEVEL"] = "99"


def main() -> None:
    quiet()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("machine", choices=["cpu", "gpu"])
    parser.add_argument("--seconds", type=float, default=20, help="for the times of one case (default: %(default)s)")
    parser.add_argument("--shape", type=int, nargs=3, metavar=("T", "D", "V"), help="CPU cases of other sizes")
    parser.add_argument("--out", type=Path, help="the CSV (default: benchmarks/results/, named for the machine)")
    options = parser.parse_args()
    if options.machine == "gpu" and not torch.cuda.is_available():
        parser.error("gpu: torch finds no CUDA device here; `make bench` measures on the CPU")
    device = "cuda" if options.machine == "gpu" else "cpu"
    origin, began = record.Origin.here(device), time.perf_counter()
    rows = [origin.row("machine", "-", "load average", "1", [os.getloadavg()[0]])]
    remarks: list[str] = []

    def take(case: str, found) -> None:
        rows.extend(origin.row(case, *row) for row in found)

    if device == "cpu":
        take(cases.COUNTED_CASE.name, count_full_size(cases.COUNTED_CASE))
    with tempfile.TemporaryDirectory() as folder:
        for case in cases.cpu_cases(*(options.shape or ())) if device == "cpu" else cases.GPU_CASES:
            print(f"{case.name} ...", flush=True)
            path = Path(folder) / f"{case.tokens}-{case.width}-{case.vocab}-{case.dtype}.pt"
            if not path.exists():
                true_and_baseline(case, path)
            found, said = run_world(case.ranks, device, measure_world, case, path, options.seconds)
            take(case.name, found)
            remarks += [f"{case.name}: {line}" for line in said]
    if device == "cpu":
        seconds = min(15, options.seconds)
        for width in layer_step.BATCHES:
            print(f"{layer_step.case_name(width)} ...", flush=True)
            take(layer_step.case_name(width), layer_step.measure_layers(seconds, width))
        print("log-probs ...", flush=True)
        log_prob_rows, refused = log_probs.measure_log_probs(min(log_probs.SECONDS, seconds))
        for case_name, row in log_prob_rows:
            take(case_name, [row])
        remarks += refused
        print("policy ...", flush=True)
        take(policy_memory.CASE, policy_memory.measure_policy(**policy_memory.SIZES))

    kind = "cpu" if device == "cpu" else re.sub(r"\W+", "-", origin.device.lower())
    out = options.out or record.RESULTS / f"{kind}.csv"
    record.write(out, rows)
    print("\n" + record.table(rows))
    print("\n".join(remarks))
    print(f"{len(rows)} rows in {out}, {time.perf_counter() - began:.0f} s")
    if options.out is None:
        print(f"drawn: {plot.cache_figure(record.read(out))}")


if __name__ == "__main__":
    main()

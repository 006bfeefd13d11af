"""`python -m benchmarks.run gpu`: the head at full size on one GPU, beside its matrix products alone and its peers;
`--only` measures other parts, of `gpu_in_a_row.py` and `gpu_probes.py`.

Each row is written when it is measured, and a run that was interrupted goes on where it ended. A head that is not
installed, fails or is wrong leaves a row that says so. With `--rehearse` the same code runs on a CPU at toy sizes:
kernels under Triton's interpreter, matrix products rounded as by cuBLAS, clocks and memory counters as stand-ins.
"""

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from benchmarks import gpu_in_a_row, gpu_numerics, gpu_probes, gpu_reads, record
from benchmarks.cases import GPU_CASES, Case
from benchmarks.gpu_run import NOT_MEASURED, Run, one_rank
from benchmarks.implementations import Implementation, available

REHEARSAL = [Case("rehearsal", 8, 32, 301, 1, torch.bfloat16)]


def stage_of(impl: Implementation) -> int:
    """Return a head's stage in a run: 0 for ours, 1 for heads that may be faster or are in wide use, 2 for others."""
    if impl.name == "ours, cache 1":
        return 0
    return 1 if impl.name.startswith(("ours, fused", "liger", "quack", "pytorch")) else 2


def heads(run: Run, cases: list[Case], more: Iterable[Implementation] = ()) -> None:
    """Measure the heads of `available` and `more`, in stages; after the second also the read-outs and errors."""
    with one_rank() as group:
        for stage in (0, 1, 2):
            for case in cases:
                impls, absent = available(case, on_gpu=True)
                impls = [impl for impl in [*impls, *more] if stage_of(impl) == stage]
                run.case(case, group, impls, absent if stage == 2 else [])
            if stage == 1:
                for case in cases:
                    gpu_reads.measure(run, case)
                gpu_numerics.measure(run, cases[0].device)


PARTS: dict[str, Callable[[Run, list[Case]], None]] = {
    "in-a-row": gpu_in_a_row.measure,
    "probes": gpu_probes.measure,
    "heads": heads,
    "profile": gpu_probes.profile,
}


def main(
    out: Path | None, seconds: float, rehearse: bool, parts: Iterable[Callable[[Run, list[Case]], None]] = (heads,)
) -> None:
    """Measure what `out` lacks (default: a file in benchmarks/results, named for the device) and print all its rows."""
    with ExitStack() as stack:
        if rehearse:
            from benchmarks.stand_in import stood_in_for_cuda

            stack.enter_context(stood_in_for_cuda())
            cases, out = REHEARSAL, out or record.RESULTS / "rehearsal.csv"
            origin = replace(record.Origin.here("cpu"), device="rehearsal")
        else:
            cases, origin = GPU_CASES, record.Origin.here("cuda")
            out = out or record.RESULTS / f"{record.file_name(origin.device)}.csv"
        run = Run(origin, out, seconds)
        for part in parts:
            part(run, cases)
    rows = record.read(out)
    print("\n" + record.table(row for row in rows if row.metric != NOT_MEASURED))
    print("\n".join(f"{row.case}: {row.impl}: {row.unit}" for row in rows if row.metric == NOT_MEASURED))
    print(f"{len(rows)} rows in {out}, {time.perf_counter() - run.began:.0f} s")

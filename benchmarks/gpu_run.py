"""One run of measurements on a GPU: its process group, steps timed by turns, and rows that are written at once."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import record
from benchmarks.cases import Case
from benchmarks.implementations import Implementation, ours
from benchmarks.measure import (
    Inputs,
    Results,
    baselines,
    counts,
    drawn,
    measured_once,
    parity,
    refusal,
    run_once,
    truth,
)
from benchmarks.meter import MIB
from megatron_ext.head.call.gpu_properties import device_of, product_seconds

NOT_MEASURED, NOT_INSTALLED = "not measured", "not installed"
ENDED, ENDED_TWICE = "the program ended while this was measured", "the program ended twice while this was measured"
_WARM_UPS, _ROUNDS, _STEPS = 2, 20, 3


@contextmanager
def one_rank() -> Iterator[dist.ProcessGroup]:
    """Make an NCCL process group of this process alone, as Megatron's head needs one."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def by_turns(steps: dict[str, Callable[[], object]], seconds: float) -> dict[str, list[float]]:
    """Time steps by turns; return a step's milliseconds in each round, averaged over its calls between two events."""
    for step in steps.values():
        for _ in range(_WARM_UPS):
            step()
    torch.cuda.synchronize()
    found: dict[str, list[float]] = {name: [] for name in steps}
    began = time.perf_counter()
    for round_ in range(_ROUNDS):
        if round_ and time.perf_counter() - began >= seconds:
            break
        marks = {}
        for name, step in steps.items():
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(_STEPS):
                step()
            stop.record()
            marks[name] = start, stop
        torch.cuda.synchronize()
        for name, (start, stop) in marks.items():
            found[name].append(start.elapsed_time(stop) / _STEPS)
    return found


def products(inputs: Inputs) -> dict[str, tuple[Callable[[], object], tuple[int, int, int, int]]]:
    """Return the head's matrix products, by name: (step, (M, N, K, bytes of an element of the result))."""
    x_TD, w_VD = inputs.x_TD.detach(), inputs.w_VD.detach()
    (tokens, width), columns = x_TD.shape, w_VD.shape[0]
    g_TV = torch.rand(tokens, columns, device=x_TD.device).to(x_TD.dtype)
    part, block = min(tokens, 1024), min(columns, 4096)
    sum_TD = torch.zeros(tokens, width, dtype=torch.float32, device=x_TD.device)
    narrow_PD, block_CD = x_TD[:part], w_VD[:block]
    of_block = g_TV[:, :block], block_CD
    wide: dict[str, Any] = {"out_dtype": torch.float32}
    return {
        "logits of a chunk": (lambda: torch.mm(narrow_PD, w_VD.t(), **wide), (part, columns, width, 4)),
        "logits of a block": (lambda: torch.mm(narrow_PD, block_CD.t(), **wide), (part, block, width, 4)),
        "dx": (lambda: torch.mm(g_TV, w_VD, **wide), (tokens, width, columns, 4)),
        "dx of a block": (lambda: torch.addmm(sum_TD, *of_block, out=sum_TD, **wide), (tokens, width, block, 8)),
        "dW": (lambda: torch.mm(g_TV.t(), x_TD), (columns, width, tokens, 2)),
    }


Row = tuple[str, str, list[float]]  # metric, unit, values


class Run:
    """A run of measurements, whose rows are written to `out` at once; `seconds` bounds the turns of one head."""

    def __init__(self, origin: record.Origin, out: Path, seconds: float):
        self.origin, self.out, self.seconds = origin, out, seconds
        self.began = time.perf_counter()

    def measured(self, case: Case, name: str) -> bool:
        """Tell whether `out` has rows of this commit and device, or a row that says why the head was not measured.

        A head in which the program ended once is measured again, since the program may have been stopped at a deadline.
        So is a head that was not installed.
        """
        return any(row.unit != ENDED and not row.unit.startswith(NOT_INSTALLED) for row in self._rows(case, name))

    def _rows(self, case: Case, name: str) -> list[record.Row]:
        here = (case.name, name, self.origin.device, self.origin.versions, self.origin.commit)
        found = record.read(self.out) if self.out.exists() else []
        return [row for row in found if (row.case, row.impl, row.device, row.versions, row.commit) == here]

    def write(self, case: Case, name: str, rows: list[Row]) -> None:
        record.write(self.out, [self.origin.row(case.name, name, *row) for row in rows], by=record.ONE_HEAD)
        print(f"{time.perf_counter() - self.began:4.0f} s  {case.name}: {name}", flush=True)

    def attempt(self, case: Case, name: str, measure: Callable[[], list[Row]]) -> None:
        """Write the rows of `measure`, or a row with the reason of its failure, even if the process ends in `measure`.

        After an error that leaves the CUDA device unusable in this process the program ends, as all else would fail.
        """
        self.write(case, name, [(NOT_MEASURED, ENDED_TWICE if self._rows(case, name) else ENDED, [1.0])])
        try:
            rows = measure()
        except Exception as failure:
            rows = [(NOT_MEASURED, f"{type(failure).__name__}: {failure}"[:300].replace("\n", " "), [1.0])]
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        except RuntimeError as lost:
            self.write(case, name, rows)
            raise SystemExit(f"the device is lost to this process ({lost}): run this again, it goes on") from None
        self.write(case, name, rows)

    def case(self, case: Case, group: dist.ProcessGroup, impls: list[Implementation], absent: list[str]) -> None:
        """Measure the products of a case, then the heads, in order."""
        inputs = drawn(case)
        for name, (step, sizes) in products(inputs).items():
            if not self.measured(case, f"product: {name}"):
                self.attempt(case, f"product: {name}", lambda step=step, sizes=sizes: self.product(inputs, step, sizes))
        for line in absent:
            name, _, reason = line.partition(": ")
            self.write(case, name, [(NOT_MEASURED, reason, [1.0])])
        impls = [impl for impl in impls if not self.measured(case, impl.name)]
        if not impls:
            return
        true = truth(Inputs(*(x.detach() for x in inputs)))
        known = baselines(case, true, {impl.through for impl in impls}, inputs)
        for impl in impls:
            self.attempt(case, impl.name, lambda impl=impl: self.head(case, group, impl, inputs, true, known))

    def allocated(self, step: Callable[[], Any]) -> tuple[Any, int]:
        """Return the result of `step`, and the allocator's peak bytes beyond those allocated before."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        answer = step()
        torch.cuda.synchronize()
        return answer, torch.cuda.max_memory_allocated() - before

    def product(self, inputs: Inputs, step: Callable[[], object], sizes: tuple[int, int, int, int]) -> list[Row]:
        m, n, k, element = sizes
        found = by_turns({"it": step}, self.seconds / 10)["it"]
        rows: list[Row] = [("time", "ms", found), ("rate", "TFLOP/s", [2 * m * n * k / ms / 1e9 for ms in found])]
        device = device_of(inputs.x_TD)
        if device.rated:
            rows.insert(1, ("planned time", "ms", [product_seconds(device, m, n, k, element * m * n) * 1e3]))
        return rows

    def head(
        self, case: Case, group: dist.ProcessGroup, impl: Implementation, inputs: Inputs, true: Results, known: Any
    ) -> list[Row]:
        """Return rows of a head's costs and errors and, if the errors are small enough, of its times beside ours."""
        head = impl.build(case, group)
        results, costs = measured_once(head, inputs)
        found = parity(results, true, known[impl.through])
        del results
        inputs.x_TD.grad = inputs.w_VD.grad = None
        # The meter does not see memory that kernels allocate, the allocator does.
        _, costs.peak_bytes = self.allocated(lambda: run_once(head, inputs))
        rows: list[Row] = [(metric, unit, [value]) for metric, unit, value in counts(case, costs)]
        rows.append(("peak of the allocator", "MiB", [costs.peak_bytes / MIB]))
        rows.append(("error / plain", "1", [found.worst]))
        reason = refusal(impl, found)
        if reason is not None:
            return [*rows, (NOT_MEASURED, reason[:300], [1.0])]
        first = ours(1).build(case, group)
        steps = {"ours": lambda: run_once(first, inputs), "it": lambda: run_once(head, inputs)}
        times = by_turns(steps, self.seconds)
        ratios = [it / our for it, our in zip(times["it"], times["ours"], strict=True)]
        return [*rows, ("time", "ms", times["it"]), ("time / ours, cache 1, by turns", "1", ratios)]

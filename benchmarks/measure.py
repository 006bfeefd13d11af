"""Parity, exact costs and times of the heads of one case. All heads run in one process and by turns, so that what
disturbs the machine disturbs all of them: a ratio holds where a time alone would not.

Legend: T tokens, D hidden size, V vocabulary (or, at several ranks, this rank's columns).
"""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from benchmarks.cases import MEGATRON, Case
from benchmarks.implementations import Head, Implementation
from benchmarks.meter import MIB, Costs, measure
from benchmarks.record import Rows
from megatron_ext import reference
from megatron_ext.distributed.groups import Group

TRUTH_CHUNK = 512  # tokens whose fp64 logits are alive at a time
Answer = TypeVar("Answer")
# Errors of loss, dx and dW, by the dtype that the logits' gradient passes through; None: its own.
Baselines = dict[torch.dtype | None, tuple[float, float, float]]


class Inputs(NamedTuple):
    """Leaves that want gradients, of one rank: all hidden states, its shard of the weight, all labels."""

    x_TD: Tensor
    w_VD: Tensor
    labels_T: Tensor


class Results(NamedTuple):
    loss: Tensor  # [T] per token, or their mean
    dx_TD: Tensor
    dw_VD: Tensor


@dataclass(frozen=True)
class Parity:
    """Errors against fp64, as multiples of plain PyTorch's in the same dtype."""

    loss: float
    dx: float
    dw: float

    @property
    def worst(self) -> float:
        return torch.tensor([self.loss, self.dx, self.dw], dtype=torch.float64).max().item()  # NaN if any is


def whole_inputs(case: Case) -> Inputs:
    """Unsharded, the same in every process: hidden states of size 1, logits of about 1.

    Numbers that bf16 holds, so one fp64 truth serves all dtypes.
    """
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(case.tokens, case.width, generator=generator).bfloat16()
    w_VD = (torch.randn(case.vocab, case.width, generator=generator) / case.width**0.5).bfloat16()
    labels_T = torch.randint(case.vocab, (case.tokens,), generator=generator)
    return Inputs(x_TD.to(case.device, case.dtype), w_VD.to(case.device, case.dtype), labels_T.to(case.device))


def drawn(case: Case, size: float = 1.0) -> Inputs:
    """Hidden states of size 1 and logits of about `size`, drawn on the device."""
    generator = torch.Generator(case.device).manual_seed(0)
    there: dict[str, Any] = {"generator": generator, "device": case.device}
    x_TD = torch.randn(case.tokens, case.width, **there).to(case.dtype)
    w_VD = (torch.randn(case.columns, case.width, **there) * (size / case.width**0.5)).to(case.dtype)
    labels_T = torch.randint(case.columns, (case.tokens,), **there)
    return Inputs(x_TD.requires_grad_(), w_VD.requires_grad_(), labels_T)


def empty(case: Case) -> Inputs:
    """Make the inputs of one rank, under a mode of fake tensors."""
    x_TD = torch.empty(case.tokens, case.width, dtype=case.dtype, requires_grad=True)
    w_VD = torch.empty(case.columns, case.width, dtype=case.dtype, requires_grad=True)
    return Inputs(x_TD, w_VD, torch.empty(case.tokens, dtype=torch.int64))


def shard_of(whole: Inputs, case: Case, rank: int) -> Inputs:
    own = slice(rank * case.columns, (rank + 1) * case.columns)
    return Inputs(whole.x_TD.clone().requires_grad_(), whole.w_VD[own].clone().requires_grad_(), whole.labels_T)


def truth(whole: Inputs) -> Results:
    """`reference.py` in fp64: per-token losses, and the gradients of their mean."""
    w_VD = whole.w_VD.double().requires_grad_()
    losses, dx = [], []
    for x, labels_N in zip(whole.x_TD.split(TRUTH_CHUNK), whole.labels_T.split(TRUTH_CHUNK), strict=True):
        x_ND = x.double().requires_grad_()
        loss_N = reference.cross_entropy(reference.logits(x_ND, w_VD), labels_N)
        (loss_N.sum() / whole.labels_T.numel()).backward()
        losses.append(loss_N.detach())
        dx.append(x_ND.grad)
    return Results(torch.cat(losses), torch.cat(dx), w_VD.grad)


def plain(x_TD: Tensor, w_VD: Tensor, labels_T: Tensor, shards: int = 1, through: torch.dtype | None = None) -> Tensor:
    """The baseline: PyTorch unfused, matmuls in the inputs' dtype, the loss in fp32.

    `shards`: dx is the sum of as many parts, each rounded. `through`: the logits' gradient is rounded to that dtype.
    """
    z_TV = torch.cat([reference.logits(x_TD, w_CD) for w_CD in w_VD.chunk(shards)], 1)
    if through is not None:
        z_TV.register_hook(lambda dz_TV: dz_TV.to(through).to(dz_TV.dtype))
    return reference.cross_entropy(z_TV.float(), labels_T)


def run_once(head: Head, inputs: Inputs) -> Results:
    """One forward and backward; the gradients are new tensors."""
    inputs.x_TD.grad = inputs.w_VD.grad = None
    loss = head(*inputs)
    loss.mean().backward()
    return Results(loss.detach(), inputs.x_TD.grad, inputs.w_VD.grad)


def errors(results: Results, true: Results) -> tuple[float, float, float]:
    """Root mean square errors of loss, dx and dW. A head that gives a mean loss only is held to the mean's error."""
    wanted = true.loss if results.loss.dim() else true.loss.mean()
    pairs = ((results.loss, wanted), (results.dx_TD, true.dx_TD), (results.dw_VD, true.dw_VD))
    loss, dx, dw = (float((found.double() - want).square().mean().sqrt()) for found, want in pairs)
    return loss, dx, dw


def baselines(
    case: Case, true: Results, throughs: Iterable[torch.dtype | None], inputs: Inputs | None = None
) -> Baselines:
    """Plain PyTorch's errors on `inputs` (those of `whole_inputs`), over as many shards as the case has ranks."""
    inputs = inputs or shard_of(whole_inputs(case), case.unsharded, 0)
    return {
        through: errors(run_once(partial(plain, shards=case.ranks, through=through), inputs), true)
        for through in throughs
    }


def parity(results: Results, true: Results, baseline: tuple[float, float, float]) -> Parity:
    """Errors as multiples of `baseline`'s. A mean loss may err by the rounding to its dtype, too."""
    loss, *gradients = baseline
    if not results.loss.dim():
        loss = max(loss, float(true.loss.mean().abs()) * torch.finfo(results.loss.dtype).eps / 2)
    bases = (loss, *gradients)
    return Parity(*(error / max(base, 1e-30) for error, base in zip(errors(results, true), bases, strict=True)))


def refusal(impl: Implementation, found: Parity) -> str | None:
    """Say why no time of `impl` counts; None where its results are right. NaN is wrong."""
    if found.worst <= impl.error_limit:
        return None
    return (
        f"{impl.name}: its error is {found.loss:.3g} x (loss), {found.dx:.3g} x (dx), {found.dw:.3g} x (dW) that of "
        f"plain PyTorch in the same dtype; at most {impl.error_limit:g} x is right, so its time does not count"
    )


def measured_once(head: Head, inputs: Inputs) -> tuple[Results, Costs]:
    """One run under the meter: FLOPs, peak bytes beyond the inputs (both gradients counted), collectives."""
    inputs.x_TD.grad = inputs.w_VD.grad = None
    # One thread for the backward too: the meter sees the thread it was entered in.
    with torch.autograd.set_multithreading_enabled(False), measure() as costs:
        results = run_once(head, inputs)
    return results, costs


def watched(step: Callable[[], Answer]) -> tuple[Answer, int]:
    """Return what `step` gives, and the peak bytes of PyTorch's CPU allocator: also what operators hold inside."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        answer = step()
    events = [event for event in found.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return answer, max(accumulate(event.nbytes() for event in events), default=0)


def interleaved(
    steps: dict[str, Callable[[], object]],
    budget_s: float,
    slow: frozenset[str] = frozenset(),
    *,
    clock: Callable[[], float] = time.perf_counter,
    least: int = 3,
) -> dict[str, list[float]]:
    """Milliseconds of each round of each step: rounds over all steps until the budget is spent, at least `least`, so
    that a median rejects one that was disturbed, at most 20.

    `slow` steps run in the first round alone; NaN stands for the rounds they miss. All ranks do the same rounds.
    `clock`: seconds; `time.process_time` for those that this process's CPU works.
    """
    found: dict[str, list[float]] = {name: [] for name in steps}
    began = time.perf_counter()
    for round_ in range(20):
        if round_ >= least and any_rank(time.perf_counter() - began > budget_s):
            break
        for name, step in steps.items():
            if name in slow and round_:
                found[name].append(float("nan"))
                continue
            if several_ranks():
                dist.barrier()
            start = clock()
            step()
            found[name].append((clock() - start) * 1e3)
    return found


def ratios(times: dict[str, list[float]], to: str = MEGATRON) -> dict[str, list[float]]:
    """Each step's time over that of `to` in the same round; missed rounds are left out."""
    return {
        name: [ms / base for ms, base in zip(found, times[to], strict=True) if ms == ms]
        for name, found in times.items()
    }


def cpu_times(steps: dict[str, Callable[[], object]], budget_s: float, base: str, called: str, least: int = 3) -> Rows:
    """CPU time of each step, by turns, and over that of `base`, if that is one of them, as the metric calls it."""
    times = interleaved(steps, budget_s, clock=time.process_time, least=least)
    rows = [(name, "CPU time", "ms", found) for name, found in times.items()]
    if base in times:
        rows += [(name, f"CPU time / {called}", "1", found) for name, found in ratios(times, to=base).items()]
    return rows


def matmuls(inputs: Inputs) -> Callable[[], object]:
    """The floor: the three matmuls of an unfused head and nothing else, 6 NVH."""
    x_TD, w_VD = inputs.x_TD.detach(), inputs.w_VD.detach()

    def step() -> None:
        z_TV = x_TD @ w_VD.t()
        z_TV @ w_VD
        z_TV.t() @ x_TD

    return step


def counts(case: Case, costs: Costs) -> list[tuple[str, str, float]]:
    """(metric, unit, value) of what is exact."""
    # Both gradients take 6 NVH: fewer are seen where products are in kernels.
    flops = [("FLOPs / NVH", "1", costs.flops / case.nvh)] if costs.flops >= 6 * case.nvh else []
    return [
        ("peak", "MiB", costs.peak_bytes / MIB),
        ("peak / (T V / R)", "bytes", costs.peak_bytes / (case.tokens * case.columns)),
        *flops,
        ("collectives", "1", sum(costs.collectives.values())),
    ]


def measure_case(
    case: Case, group: Group, impls: list[Implementation], true: Results, known: Baselines, s: float
) -> tuple[Rows, list[str]]:
    """Rows (impl, metric, unit, values) of one case, this rank's, and the refusals. `s`: seconds for the times."""
    rank = 0 if group is None else dist.get_rank(group)
    inputs = shard_of(whole_inputs(case), case, rank)
    own = slice(rank * case.columns, (rank + 1) * case.columns)
    true = true._replace(dw_VD=true.dw_VD[own])
    rows: Rows = []
    refused, steps = [], {}
    for impl in impls:
        try:
            head = impl.build(case, group)
            (results, costs), peak = watched(lambda head=head: measured_once(head, inputs))
        except Exception as failure:
            if not impl.foreign:
                raise
            refused.append(f"{impl.name}: {type(failure).__name__}: {failure}"[:300])
            continue
        inputs.x_TD.grad = inputs.w_VD.grad = None
        found = parity(results, true, known[impl.through])
        rows += [(impl.name, metric, unit, [value]) for metric, unit, value in counts(case, costs)]
        rows.append((impl.name, "peak of the allocator", "MiB", [peak / MIB]))
        rows.append((impl.name, "error / plain", "1", [found.worst]))
        reason = refusal(impl, found)
        if any_rank(reason is not None):
            refused.append(reason or f"{impl.name}: wrong on another rank, so its time does not count")
        else:
            steps[impl.name] = lambda head=head: run_once(head, inputs)
        del results
    steps["three matmuls"] = matmuls(inputs)
    times = interleaved(steps, s, frozenset(impl.name for impl in impls if impl.slow))
    for name, found_ms in times.items():
        rows.append((name, "time", "ms", [ms for ms in found_ms if ms == ms]))
    if MEGATRON in times:
        rows += [(name, "time / unfused", "1", found) for name, found in ratios(times).items()]
    return rows, refused


def several_ranks() -> bool:
    return dist.is_initialized() and dist.get_world_size() > 1


def any_rank(flag: bool) -> bool:
    """Tell whether `flag` holds on any rank: ranks must decide alike, or they hang."""
    if not several_ranks():
        return flag
    flags = torch.tensor([float(flag)])
    dist.all_reduce(flags)
    return bool(flags.item())

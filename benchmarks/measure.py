"""Parity, exact costs and times of the heads of one case. All heads run in one process and by turns, so that a
disturbance of the machine affects all of them: ratios of times repeat where times alone do not.

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

TRUTH_CHUNK = 512  # tokens whose fp64 logits exist at a time
Answer = TypeVar("Answer")
# Errors of loss, dx and dW, by the dtype to which the logits' gradient is rounded; None: it is not rounded.
Baselines = dict[torch.dtype | None, tuple[float, float, float]]


class Inputs(NamedTuple):
    """The inputs of one rank: all hidden states, its shard of the weight (both with gradients), all labels."""

    x_TD: Tensor
    w_VD: Tensor
    labels_T: Tensor


class Results(NamedTuple):
    loss: Tensor  # [T] per token, or their mean
    dx_TD: Tensor
    dw_VD: Tensor


@dataclass(frozen=True)
class Parity:
    """Errors against fp64, as multiples of plain PyTorch's errors in the same dtype."""

    loss: float
    dx: float
    dw: float

    @property
    def worst(self) -> float:
        return torch.tensor([self.loss, self.dx, self.dw], dtype=torch.float64).max().item()  # NaN if any is


def whole_inputs(case: Case) -> Inputs:
    """Return unsharded inputs, the same in every process: hidden states of size 1, logits of about 1.

    All numbers are exact in bf16, so one result in fp64 serves all dtypes.
    """
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(case.tokens, case.width, generator=generator).bfloat16()
    w_VD = (torch.randn(case.vocab, case.width, generator=generator) / case.width**0.5).bfloat16()
    labels_T = torch.randint(case.vocab, (case.tokens,), generator=generator)
    return Inputs(x_TD.to(case.device, case.dtype), w_VD.to(case.device, case.dtype), labels_T.to(case.device))


def drawn(case: Case, size: float = 1.0) -> Inputs:
    """Return inputs drawn on the device, with hidden states of size 1 and logits of about `size`."""
    generator = torch.Generator(case.device).manual_seed(0)
    there: dict[str, Any] = {"generator": generator, "device": case.device}
    x_TD = torch.randn(case.tokens, case.width, **there).to(case.dtype)
    w_VD = (torch.randn(case.columns, case.width, **there) * (size / case.width**0.5)).to(case.dtype)
    labels_T = torch.randint(case.columns, (case.tokens,), **there)
    return Inputs(x_TD.requires_grad_(), w_VD.requires_grad_(), labels_T)


def empty(case: Case) -> Inputs:
    """Return inputs of one rank's shapes with empty values, for use with fake tensors."""
    x_TD = torch.empty(case.tokens, case.width, dtype=case.dtype, requires_grad=True)
    w_VD = torch.empty(case.columns, case.width, dtype=case.dtype, requires_grad=True)
    return Inputs(x_TD, w_VD, torch.empty(case.tokens, dtype=torch.int64))


def shard_of(whole: Inputs, case: Case, rank: int) -> Inputs:
    own = slice(rank * case.columns, (rank + 1) * case.columns)
    return Inputs(whole.x_TD.clone().requires_grad_(), whole.w_VD[own].clone().requires_grad_(), whole.labels_T)


def truth(whole: Inputs) -> Results:
    """Return the results of `reference.py` in fp64: per-token losses, and the gradients of their mean."""
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
    """Return the baseline's losses: unfused PyTorch, matmuls in the inputs' dtype, the loss in fp32.

    `shards`: dx is the sum of this many parts, each rounded. `through`: the logits' gradient is rounded to this dtype.
    """
    z_TV = torch.cat([reference.logits(x_TD, w_CD) for w_CD in w_VD.chunk(shards)], 1)
    if through is not None:
        z_TV.register_hook(lambda dz_TV: dz_TV.to(through).to(dz_TV.dtype))
    return reference.cross_entropy(z_TV.float(), labels_T)


def run_once(head: Head, inputs: Inputs) -> Results:
    """Run forward and backward once; the gradients in the results are new tensors."""
    inputs.x_TD.grad = inputs.w_VD.grad = None
    loss = head(*inputs)
    loss.mean().backward()
    return Results(loss.detach(), inputs.x_TD.grad, inputs.w_VD.grad)


def errors(results: Results, true: Results) -> tuple[float, float, float]:
    """Return the root mean square errors of loss, dx and dW; a mean loss is compared with the true mean."""
    wanted = true.loss if results.loss.dim() else true.loss.mean()
    pairs = ((results.loss, wanted), (results.dx_TD, true.dx_TD), (results.dw_VD, true.dw_VD))
    loss, dx, dw = (float((found.double() - want).square().mean().sqrt()) for found, want in pairs)
    return loss, dx, dw


def baselines(
    case: Case, true: Results, throughs: Iterable[torch.dtype | None], inputs: Inputs | None = None
) -> Baselines:
    """Return plain PyTorch's errors on `inputs` (None: `whole_inputs`), over as many shards as the case has ranks."""
    inputs = inputs or shard_of(whole_inputs(case), case.unsharded, 0)
    return {
        through: errors(run_once(partial(plain, shards=case.ranks, through=through), inputs), true)
        for through in throughs
    }


def parity(results: Results, true: Results, baseline: tuple[float, float, float]) -> Parity:
    """Return errors as multiples of the baseline's, which for a mean loss is at least the rounding to its dtype."""
    loss, *gradients = baseline
    if not results.loss.dim():
        loss = max(loss, float(true.loss.mean().abs()) * torch.finfo(results.loss.dtype).eps / 2)
    bases = (loss, *gradients)
    return Parity(*(error / max(base, 1e-30) for error, base in zip(errors(results, true), bases, strict=True)))


def refusal(impl: Implementation, found: Parity) -> str | None:
    """Return why no time of `impl` counts, or None if its results are right; NaN is wrong."""
    if found.worst <= impl.error_limit:
        return None
    return (
        f"{impl.name}: its error is {found.loss:.3g} x (loss), {found.dx:.3g} x (dx), {found.dw:.3g} x (dW) that of "
        f"plain PyTorch in the same dtype; at most {impl.error_limit:g} x is right, so its time does not count"
    )


def measured_once(head: Head, inputs: Inputs) -> tuple[Results, Costs]:
    """Run once under the meter; return results and costs: FLOPs, peak bytes beyond the inputs (with both gradients),
    collectives."""
    inputs.x_TD.grad = inputs.w_VD.grad = None
    # Backward must run in this thread, the only one that the meter sees.
    with torch.autograd.set_multithreading_enabled(False), measure() as costs:
        results = run_once(head, inputs)
    return results, costs


def watched(step: Callable[[], Answer]) -> tuple[Answer, int]:
    """Return the result of `step`, and the peak bytes of PyTorch's CPU allocator, also for memory inside operators."""
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
    """Return the milliseconds of each step in each round. A round runs all steps; rounds go on until the budget is
    spent, at least `least`, so that a median rejects a disturbed round, and at most 20.

    `slow` steps run in the first round only, and have NaN for the others. All ranks do the same number of rounds.
    `clock` returns seconds; `time.process_time` counts this process's CPU time.
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
    """Return each step's time divided by that of `to` in the same round, without rounds that the step has missed."""
    return {
        name: [ms / base for ms, base in zip(found, times[to], strict=True) if ms == ms]
        for name, found in times.items()
    }


def cpu_times(steps: dict[str, Callable[[], object]], budget_s: float, base: str, called: str, least: int = 3) -> Rows:
    """Return rows of the CPU time of each step, by turns, and, if `base` is a step, its ratio to that of `base`, whose
    name in the metric is `called`."""
    times = interleaved(steps, budget_s, clock=time.process_time, least=least)
    rows = [(name, "CPU time", "ms", found) for name, found in times.items()]
    if base in times:
        rows += [(name, f"CPU time / {called}", "1", found) for name, found in ratios(times, to=base).items()]
    return rows


def matmuls(inputs: Inputs) -> Callable[[], object]:
    """Return a step of only the three matmuls of an unfused head, 6 NVH, the floor of its time."""
    x_TD, w_VD = inputs.x_TD.detach(), inputs.w_VD.detach()

    def step() -> None:
        z_TV = x_TD @ w_VD.t()
        z_TV @ w_VD
        z_TV.t() @ x_TD

    return step


def counts(case: Case, costs: Costs) -> list[tuple[str, str, float]]:
    """Return (metric, unit, value) for each exact count."""
    # A step with both gradients takes 6 NVH at least: where fewer are counted, kernels hide products.
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
    """Return this rank's rows (impl, metric, unit, values) of one case, and the refusals; `s`: seconds for times."""
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

"""A case: whole inputs, the true results of them, and the comparison of one rank's results with these."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.counting import count_collectives

Cut = Callable[[Tensor, int], Tensor]
START = 2.0  # of a main_grad, to which gradients are added


def whole(x: Tensor, rank: int) -> Tensor:
    return x


@dataclass
class Case:
    """One call, and the results that it should have.

    Attributes:
        inputs: (whole tensor whose gradient is compared, function that cuts a rank's piece out of it).
        truth: function of the whole tensors in fp64, with gradient, to the whole results.
        ours: function of (this rank's pieces in their own dtypes, rank) to this rank's results.
        upstream: fp64 gradients of the first results, None for a result without; further results have none.
        outputs: functions that cut a rank's piece out of each result; None: all ranks have the whole.
        logit_size: about the largest logit, to which roundings are relative.
        value_dtype: the dtype that gives the rounding of results; gradients have that of the inputs.
        grad_size: the size of terms of which a gradient may be the difference.
        share: this rank's fraction of `upstream`, where ranks share the inputs and gradients of all losses add up.
        gradient_of: function of a leaf to its gradient.
        refused: words of the ValueError that a refused combination raises on every rank.
        finish: function called after backward to complete gradients; its collectives are the same on every rank.
        grad_rounding: one relative rounding of gradients; None: that of each input's dtype times the largest logit.
        roundings: the number of roundings of the largest number by which results and gradients may be wrong.
        sent: the most collectives in forward and in backward; None: they are not counted.
    """

    name: str
    inputs: list[tuple[Tensor, Cut]]
    truth: Callable[..., Sequence[Tensor]]
    ours: Callable[[list[Tensor], int], Sequence[Tensor]]
    upstream: Sequence[Tensor | None]
    outputs: list[Cut] | None = None
    logit_size: float = 1.0
    value_dtype: torch.dtype = torch.float64
    wanted: list[bool] = field(default_factory=list)
    grad_size: float = 1.0
    share: float = 1.0
    gradient_of: Callable[[Tensor], Tensor | None] = lambda leaf: (
        leaf.main_grad - START if hasattr(leaf, "main_grad") else leaf.grad
    )
    refused: str | None = None
    finish: Callable[[], None] | None = None
    grad_rounding: float | None = None
    roundings: int = 32
    sent: tuple[int, int] | None = None


def check(case: Case, rank: int) -> None:
    """Raise AssertionError if a result or a gradient of this rank differs from the truth by more than roundings."""
    wanted = case.wanted or [True] * len(case.inputs)
    mine = [
        cut(x, rank).detach().clone(memory_format=torch.preserve_format).requires_grad_(want)
        for (x, cut), want in zip(case.inputs, wanted, strict=True)
    ]
    if case.refused is not None:
        _check_refused(case, mine, rank)
        return
    leaves = [x.double().requires_grad_() for x, _ in case.inputs]
    truths = list(case.truth(*leaves))
    flows = [(i, g) for i, g in enumerate(case.upstream) if g is not None]
    grads: Any = [None] * len(leaves)
    if leaves and flows:
        grads = torch.autograd.grad([truths[i] for i, _ in flows], leaves, [g for _, g in flows], allow_unused=True)
    with count_collectives() if case.sent else nullcontext() as forward:
        results = list(case.ours(mine, rank))
    cuts = case.outputs or [whole] * len(truths)
    assert len(results) == len(truths), f"{len(results)} results, {len(truths)} wanted"
    size = case.logit_size + 1
    for i, (found, truth, cut) in enumerate(zip(results, truths, cuts, strict=True)):
        _close(f"result {i}", found, cut(truth, rank), case.roundings * eps(case.value_dtype) * size, 1.0)
    with count_collectives() if case.sent else nullcontext() as backward:
        if any(wanted) and flows:
            upstream = [case.share * cuts[i](g, rank).to(results[i].dtype) for i, g in flows]
            torch.autograd.backward([results[i] for i, _ in flows], upstream)
    if case.sent:
        sent = forward.total(), backward.total()
        assert all(n <= most for n, most in zip(sent, case.sent, strict=True)), f"sent {sent}, {case.sent} allowed"
    for i, found in enumerate(results):
        flowing = any(wanted) and i in (at for at, _ in flows)
        assert flowing or not found.requires_grad, f"result {i} has a gradient"
    if case.finish is not None:
        case.finish()
    for i, ((x, cut), leaf, grad, want) in enumerate(zip(case.inputs, mine, grads, wanted, strict=True)):
        if not want:
            assert leaf.grad is None, f"input {i} wanted no gradient"
            continue
        truth = torch.zeros_like(x, dtype=torch.float64) if grad is None else grad
        found = case.gradient_of(leaf)
        found = torch.zeros_like(leaf) if found is None else found
        rounding = eps(x.dtype) * size if case.grad_rounding is None else case.grad_rounding
        _close(f"gradient {i}", found, cut(truth, rank), case.roundings * rounding, case.grad_size)
        assert torch.equal(leaf.detach(), cut(x, rank)), f"input {i} was written"


def _check_refused(case: Case, mine: list[Tensor], rank: int) -> None:
    """Check that all ranks raise the same ValueError, and none hangs."""
    said = "nothing"
    try:
        case.ours(mine, rank)
    except ValueError as error:
        said = str(error)
    everyone: list[Any] = [said] * dist.get_world_size()
    dist.all_gather_object(everyone, said)
    assert case.refused in said, f"{said!r}, wanted a ValueError with {case.refused!r}"
    assert everyone == [said] * len(everyone), f"ranks raised {everyone}"


def eps(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps


def _close(name: str, found: Tensor, truth: Tensor, rounding: float, size: float) -> None:
    assert found.shape == truth.shape, f"{name}: shape {tuple(found.shape)}, wanted {tuple(truth.shape)}"
    if not truth.is_floating_point():
        assert torch.equal(found.to(truth.dtype), truth), f"{name}: {found.tolist()}, wanted {truth.tolist()}"
        return
    found, truth = found.detach().double(), truth.detach().double()
    finite = truth.isfinite()
    assert torch.equal(found.where(~finite, 0.0), truth.where(~finite, 0.0)), f"{name}: not infinite where the truth is"
    off = (found - truth).where(finite, 0.0).abs()
    largest = truth.where(finite, 0.0).abs().max().item() if truth.numel() else 0.0
    allowed = rounding * max(largest, size)
    worst = off.max().item() if off.numel() else 0.0
    assert worst <= allowed, f"{name}: off by {worst:.3g}, {allowed:.3g} allowed, of {largest:.3g}"

"""A case: inputs as a whole, what is computed of them, and how one rank's results are compared with that."""

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
    """One call.

    Attributes:
        inputs: whole tensors whose gradients are compared, with how a rank's piece is cut out of each.
        truth: of those in fp64, with gradient: whole results.
        ours: of this rank's pieces and rank, in their own dtype: its results.
        upstream: gradients of the first results, in fp64, None of one that has none; nor have the others.
        outputs: how a rank's piece of each result is cut out; None: all ranks have the whole.
        logit_size: about the largest logit, which roundings are relative to.
        value_dtype: whose roundings results have; gradients have those of the inputs.
        grad_size: what a gradient may be the difference of.
        share: how much of `upstream` is this rank's, where ranks share the inputs and gradients of all losses add up.
        gradient_of: a leaf's gradient.
        refused: what is said of a combination that is refused by name, on every rank alike.
        finish: what follows the backward pass before gradients are complete; the same collectives on every rank.
        grad_rounding: one rounding of gradients, relative; None: each input's dtype's, of the largest logit.
        roundings: how many roundings of the largest number in play results and gradients may be off.
        sent: how many collectives there may be forward and backward; None: that is not counted.
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
    """Raises AssertionError where a result or a gradient of this rank is not the truth's."""
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
    """Check that all ranks raise the same ValueError, and none waits."""
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

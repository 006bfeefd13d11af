"""What the head's autograd functions share: backward functions that can run twice on one graph and refuse a second
derivative, and what they keep of forward, as lists of tensors that hooks may offload."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.engine.statistics import Statistics


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For `backward` of an autograd function: a second derivative is an error, never a silently missing term.

    torch's own `once_differentiable` objects only where the upstream gradient requires grad: a gradient penalty on a
    summed loss would lose its term without a word.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> Any:
        with torch.no_grad():
            found = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # nobody builds a graph of this backward
            return found
        return tuple(_Once.apply(x.detach().requires_grad_()) if isinstance(x, Tensor) else x for x in found)

    return checked


def keep_for_backward(
    ctx: Any, plan: Plan, inputs: Sequence[Tensor | None], stats: Statistics | None, saved: list[list[Tensor]]
) -> None:
    """Saves the tensors of `inputs`, the statistics, and what each read-out wants of forward."""
    ctx.set_materialize_grads(False)
    ctx.plan, ctx.counts = plan, (len(inputs), 0 if stats is None else len(stats), [len(each) for each in saved])
    ctx.save_for_backward(*inputs, *(stats or ()), *(x for each in saved for x in each))


def kept_from_forward(ctx: Any) -> tuple[list[Any], Statistics | None, list[list[Tensor]]]:
    """What `keep_for_backward` saved. Asked for once: recomputation hands out each tensor once."""
    tensors = list(ctx.saved_tensors)
    inputs, stats, counts = ctx.counts
    rest = iter(tensors[inputs + stats :])
    saved = [[next(rest) for _ in range(count)] for count in counts]
    return tensors[:inputs], Statistics(*tensors[inputs : inputs + stats]) if stats else None, saved


def give(ctx: Any, plan: Plan, results: list[list[Tensor]]) -> tuple[Tensor, ...]:
    """The results one after the other, marked: the first of each read-out may have a gradient."""
    flat = [x for each in results for x in each]
    plain = [
        x
        for readout, each in zip(plan.readouts, results, strict=True)
        for x in each[1 if readout.differentiable else 0 :]
    ]
    ctx.lengths = [len(each) for each in results]
    ctx.mark_non_differentiable(*plain)
    return tuple(flat)


def first_of_each(ctx: Any, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The gradients of the read-outs' first results, of those of all results."""
    starts, at = [], 0
    for readout, length in zip(ctx.plan.readouts, ctx.lengths, strict=True):
        starts.append(grads[at] if readout.differentiable else None)
        at += length
    return starts


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "the head cannot be differentiated twice: its gradient was given to backward() again, by create_graph=True"
        )

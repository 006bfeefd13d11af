"""Helpers of our autograd functions: saved tensors in groups, a backward that raises if differentiated, no autocast."""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointError

NOTHING = nullcontext()


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `backward` of an autograd function: a second derivative raises RuntimeError, and never lacks a term.

    torch's own `once_differentiable` raises only if the upstream gradient requires grad: a gradient penalty on a summed
    loss would lose its term silently. An error in the graph of the upstream gradients alone is not enough either:
    `torch.autograd.grad` runs only nodes that lead to the tensors asked for. So the error's node leads to saved tensors
    and leaves too.
    """

    @functools.wraps(backward)
    def checked(ctx: Any, *grads: Tensor | None) -> Any:
        if not torch.is_grad_enabled():  # no graph is built of this backward
            return backward(ctx, *grads)
        with torch.no_grad():
            found = backward(ctx, *grads)
        ends = [*filter(_requires_grad, grads), *_saved_ends(ctx), *leaves_of(ctx)]
        return tuple(_Once.apply(x.detach().requires_grad_(), *ends) if isinstance(x, Tensor) else x for x in found)

    return checked


def _saved_ends(ctx: Any) -> list[Tensor]:
    """Return the saved tensors that require grad; none if a checkpoint has handed them out already."""
    try:
        return [*filter(_requires_grad, ctx.saved_tensors)]
    except CheckpointError:
        return []


def leaves_of(node: Any) -> Iterator[Tensor]:
    """Yield the leaves that gradients from a node of autograd's graph would reach."""
    nodes = [node]
    seen = {None, node}
    for one in nodes:  # the list grows in the loop
        if (leaf := getattr(one, "variable", None)) is not None:
            yield leaf
        for source, _ in getattr(one, "next_functions", ()):
            if source not in seen:
                seen.add(source)
                nodes.append(source)


def _requires_grad(x: Tensor | None) -> bool:
    return x is not None and x.requires_grad


def without_autocast(x: Any) -> AbstractContextManager[Any]:
    """Return a context without autocast for the device of `x`: forward and backward must compute in the same dtypes."""
    kind = x.device.type
    known = kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)
    return torch.autocast(kind, enabled=False) if known and torch.is_autocast_enabled(kind) else NOTHING


def save_groups(ctx: Any, *groups: Sequence[Tensor | None]) -> None:
    """Save tensors for backward, in which `saved_groups` returns the groups."""
    ctx.group_sizes = tuple(map(len, groups))
    ctx.save_for_backward(*chain.from_iterable(groups))


def saved_groups(ctx: Any) -> list[list[Any]]:
    """Return the groups of `save_groups`. Call it once in a backward: recomputation hands out each tensor once."""
    tensors, found, at = ctx.saved_tensors, [], 0
    for size in ctx.group_sizes:
        found.append([*tensors[at : at + size]])
        at += size
    return found


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *ends: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "heads and linear layers cannot be differentiated twice: backward() was called on one of their "
            "gradients, which create_graph=True makes possible"
        )

"""Backward functions that can run twice on one graph, and that refuse a second derivative."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


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


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise RuntimeError(
            "the head cannot be differentiated twice: its gradient was given to backward() again, by create_graph=True"
        )

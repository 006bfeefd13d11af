"""Logits that are not made: what a patched output layer returns in their place.

A promise passes for the logits `[S, B, V/R]` and holds what they would be made of. Who has the labels redeems it
for per-token losses. Who multiplies or divides it by a number gets a promise of scaled logits. Whoever asks anything
else of it (an argmax, a dump to disk, an operation of a later Megatron) is given real logits: then they exist, and the
loss is taken from them, by Megatron's own loss.

Shapes: S positions of the sequence, B batch, H hidden size, V vocabulary, R tensor-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_ext.distributed.groups import group_size, tensor_parallel_group
from megatron_ext.head import linear_cross_entropy
from megatron_ext.head.options import Cache

_FACTS = [Tensor.size, Tensor.dim, *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim"))]
_PRODUCTS = (Tensor.mul, torch.mul)
_QUOTIENTS = (Tensor.div, torch.div, Tensor.true_divide, torch.true_divide)


@dataclass(frozen=True)
class _Terms:
    """The logits are `scale * softcapped(hidden @ weight.T + bias)`.

    `hidden` is `[S, B, H]`, under sequence parallelism this rank's `[S/R, B, H]`; `layer` is the output layer, and
    `compute()` lets it make them, unscaled.
    """

    layer: Any
    hidden: Tensor
    weight: Tensor
    compute: Callable[[], Tensor]
    scale: float = 1.0


class PromisedLogits(Tensor):
    """See the top of this file. Made by `promise_logits`."""

    terms: _Terms
    made: Tensor | None

    @classmethod
    def _of(cls, terms: _Terms) -> "PromisedLogits":
        hidden, layer = terms.hidden, terms.layer
        positions = hidden.shape[0] * (group_size(_group(layer)) if layer.sequence_parallel else 1)
        shape = (positions, *hidden.shape[1:-1], terms.weight.shape[0])
        promise = hidden.new_zeros(()).expand(shape).as_subclass(cls)  # one element of memory, whatever the shape
        promise.terms, promise.made = terms, None
        return promise

    def logits(self) -> Tensor:
        """The real ones, computed by the output layer the first time that someone wants them."""
        if self.made is None:
            logits = self.terms.compute()
            self.made = logits if self.terms.scale == 1.0 else logits * self.terms.scale
        return self.made

    def loss(self, labels: Tensor, chunk_tokens: int | None, cache: Cache, ignore_index: int) -> Tensor:
        """Per-token losses, fp32, in the shape of the labels `[B, S]`.

        Raises:
            ValueError: labels of another shape.
        """
        layer, wanted = self.terms.layer, tuple(self.shape[1::-1])
        if tuple(labels.shape) != wanted:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}: the hidden states that GPTModel made are of shape "
                f"{tuple(self.terms.hidden.shape)} on this rank, which takes labels [batch, sequence] of {wanted}; "
                f"under context parallelism pass this rank's part of them, as of the tokens"
            )
        loss_SB = linear_cross_entropy(
            self.terms.hidden,
            self.terms.weight,
            labels.transpose(0, 1),
            tp_group=_group(layer),
            hidden_layout="sequence" if layer.sequence_parallel else "replicated",
            bias=None if layer.skip_bias_add else layer.bias,
            softcap=getattr(layer, "softcap", None),
            temperature=1.0 / self.terms.scale,
            ignore_index=ignore_index,
            chunk_tokens=chunk_tokens,
            cache=cache,
            gradient_accumulation_fusion=layer.gradient_accumulation_fusion,
        )
        return loss_SB.transpose(0, 1).contiguous()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        factor = _factor(func, args, kwargs)
        if factor is not None:
            promise = next(x for x in args if isinstance(x, PromisedLogits))
            return cls._of(replace(promise.terms, scale=promise.terms.scale * factor))
        args, kwargs = tree_map(lambda x: x.logits() if isinstance(x, PromisedLogits) else x, (args, kwargs))
        return func(*args, **kwargs)


def promise_logits(
    layer: Any, hidden: Tensor, weight: Tensor | None, gathered: bool | None, compute: Callable[[], Tensor]
) -> PromisedLogits:
    """What `layer(hidden, weight, runtime_gather_output=gathered)` would return, put off.

    Raises:
        ValueError: the logits would be gathered from several ranks; Megatron's loss of them is too high by the
            logarithm of their number.
    """
    if (layer.gather_output if gathered is None else gathered) and group_size(_group(layer)) > 1:
        raise ValueError(
            f"{'parallel_output is False' if gathered is None else f'runtime_gather_output is {gathered}'} and there "
            f"are labels: a loss is taken from logits that stay sharded over the {group_size(_group(layer))} "
            f"tensor-parallel ranks; pass runtime_gather_output=False with labels, or leave the labels out to get "
            f"gathered logits"
        )
    return PromisedLogits._of(_Terms(layer, hidden, layer.weight if weight is None else weight, compute))


def _group(layer: Any):
    return tensor_parallel_group(getattr(layer, "tp_group", None))


def _factor(func: Any, args: tuple, kwargs: dict) -> float | None:
    """The positive number that the call multiplies a promise of logits nobody has made yet with, if it does that."""
    if kwargs or len(args) != 2 or func not in _PRODUCTS + _QUOTIENTS:
        return None
    promise, number = args if isinstance(args[0], PromisedLogits) else args[::-1]
    if promise.made is not None or type(number) not in (int, float) or not 0 < number < float("inf"):
        return None
    if func in _PRODUCTS:
        return float(number)
    return 1.0 / number if promise is args[0] else None

"""LoRA on an lm head: `logits = x W^T + s dropout(x) A^T B^T`, without a merged weight.

The hidden states get r more columns, `s dropout(x) A^T`, and the operand of the head's product is `[W, B]`. So every
read-out supports LoRA, and the gradient of the r columns is reduced with dx: the gradient of A is complete on every
rank without an exchange of its own. With the sequence layout each rank has the gradient of its own tokens, and one
small all-reduce adds these.

Legend: T tokens, D hidden size, V columns of this rank's vocabulary shard, r rank of an adapter, N all ranks together.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.autograd import differentiable_once
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group
from megatron_ext.head.call import matmul
from megatron_ext.head.checks import check_floating, check_number
from megatron_ext.numerics import cpu_products, fixed_order


class LoRA(NamedTuple):
    """A low-rank part of an lm head's logits, `scaling * dropout(hidden) @ A.T @ B.T`.

    Attributes:
        A: `[r, D]`, the same on every rank that shares the vocabulary, as is its gradient.
        B: `[V/R, r]`, the rows of this rank's vocabulary shard, as those of the head's weight.
        scaling: PEFT's `lora_alpha / r`, or `lora_alpha / sqrt(r)` with `use_rslora`.
        dropout: the probability with which an entry of the hidden states becomes 0 in this part, the rest scaled up, as
            in PEFT while a module trains; 0 outside of training. Dropped hidden states and masks are kept for backward.
    """

    A: Tensor
    B: Tensor
    scaling: float = 1.0
    dropout: float = 0.0


def adapters_of(lora: Any) -> tuple[LoRA, ...]:
    """Return a head's `lora`, None, one adapter or several, as a tuple."""
    if lora is None:
        return ()
    return tuple(lora) if isinstance(lora, list | tuple) and not isinstance(lora, LoRA) else (lora,)


def check_adapters(adapters: Sequence[Any]) -> None:
    """Raise ValueError for faults of adapters that every rank sees, and that do not depend on a group."""
    for each in adapters:
        if not isinstance(each, LoRA):
            raise ValueError(
                f"lora is or holds {type(each).__name__}: it must be LoRA(A, B, scaling), or several in a sequence"
            )
        check_floating("lora A", each.A, 2)
        check_number("lora scaling", each.scaling, "that is finite", math.isfinite, "pass lora_alpha / r")
        check_number("lora dropout", each.dropout, "in [0, 1)", lambda x: 0 <= x < 1, "pass 0 outside of training")


def check_dropout(adapters: Sequence[LoRA], ranks: int, in_slices: bool) -> None:
    """Raise ValueError if ranks that hold the same hidden states could drop different entries of them."""
    for each in adapters:
        if each.dropout and ranks > 1 and not in_slices:
            raise ValueError(
                f"lora dropout is {each.dropout} over {ranks} ranks that hold the same hidden states: they must leave "
                f'out the same entries, which nothing here promises; use dropout=0, or hidden_layout="sequence"'
            )


def rows_fault(adapters: Sequence[LoRA], weight: Tensor) -> ValueError | None:
    """Return a fault of adapters that maybe this rank alone sees, in its shards of B and the weight."""
    for each in adapters:
        try:
            check_floating("lora B", each.B, 2)
        except ValueError as fault:
            return fault
        if each.A.shape[0] != each.B.shape[1] or each.A.shape[1] != weight.shape[1]:
            return ValueError(
                f"lora A has shape {tuple(each.A.shape)}, lora B {tuple(each.B.shape)}, weight {tuple(weight.shape)}: "
                f"they must be [r, D], [V/R, r] and [V/R, D]; pass A and B as PEFT's lora_A.weight and lora_B.weight "
                f"are, B's rows sharded as the weight's"
            )
        if each.B.shape[0] != weight.shape[0]:
            return ValueError(
                f"lora B has shape {tuple(each.B.shape)}, weight {tuple(weight.shape)}: B must have a row for each of "
                f"the weight's; pass this rank's vocabulary shard of it"
            )
        for name, x in (("lora A", each.A), ("lora B", each.B)):
            if x.device != weight.device:
                return ValueError(f"{name} is on {x.device}, weight on {weight.device}: move them to one device")
    return None


def options_of(adapters: Sequence[LoRA]) -> dict[str, Any]:
    """Return the options that all ranks must pass alike: r, scaling and dropout of each adapter."""
    return {"lora": [(len(each.A), float(each.scaling), float(each.dropout)) for each in adapters]}


def low_rank(adapters: Sequence[LoRA]) -> Tensor | None:
    """Return all B side by side, `[V, N]`; None without an adapter."""
    return torch.cat([each.B for each in adapters], 1) if len(adapters) > 1 else adapters[0].B if adapters else None


def widened(x_TD: Tensor, adapters: Sequence[LoRA], group: Group, in_slices: bool, fixed: bool) -> Tensor:
    """Return `[x, s dropout(x) A^T, ...]` for all adapters: `[T, D + N]`, of `x`'s dtype.

    `fixed`: a token's bits do not depend on other tokens, up to dropout's random numbers.

    Communicates: with slices, in backward, one all-reduce of all A's gradients, or one for each A if an adapter has
    dropout or only some A are summed here. An A with `sequence_parallel` set is not summed: Megatron does that itself.
    """
    scaled = [each.A if each.scaling == 1.0 else each.A * each.scaling for each in adapters]
    by_itself = [not in_slices or getattr(each.A, "sequence_parallel", False) for each in adapters]
    groups = [None if alone else group for alone in by_itself]
    if not any(each.dropout for each in adapters) and len({*by_itself}) == 1:
        return _LowRank.apply(x_TD, torch.cat(scaled) if len(scaled) > 1 else scaled[0], fixed, True, groups[0])
    left = [x_TD if not each.dropout else F.dropout(x_TD, each.dropout) for each in adapters]
    more = [_LowRank.apply(x, a_RD, fixed, False, own) for x, a_RD, own in zip(left, scaled, groups, strict=True)]
    return torch.cat([x_TD, *more], 1)


class _LowRank(torch.autograd.Function):
    """The product `x A^T`, or with `beside` `[x, x A^T]`, which is then saved instead of `x`. The gradient of A is
    summed over `group`, whose ranks all hold A, and use it for different tokens."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, a_ND: Tensor, fixed: bool, beside: bool, group: Group) -> Tensor:
        with torch.autocast(x_TD.device.type, enabled=False):
            low_TN = _product(x_TD, a_ND.to(x_TD.dtype).t(), fixed)
            out_TC = torch.cat([x_TD, low_TN], 1) if beside else low_TN
        ctx.save_for_backward(out_TC if beside else x_TD, a_ND)
        ctx.fixed, ctx.beside, ctx.group = fixed, beside, group
        return out_TC

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_TC: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, a_ND = ctx.saved_tensors
        width, dx_TD, da_ND = a_ND.shape[1], None, None
        low_TN = grad_TC[:, width:] if ctx.beside else grad_TC
        with torch.autocast(grad_TC.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                dx_TD = _product(low_TN, a_ND.to(low_TN.dtype), ctx.fixed)
                dx_TD = dx_TD.add_(grad_TC[:, :width]) if ctx.beside else dx_TD
            if ctx.needs_input_grad[1]:
                da_ND = _gradient_of_a(low_TN, x_TC[:, :width], ctx.fixed).to(a_ND.dtype)
                da_ND = collectives.all_reduce(da_ND, ctx.group)
        return dx_TD, da_ND, None, None, None


def _product(x_TK: Tensor, w_KN: Tensor, fixed: bool) -> Tensor:
    return fixed_order.mm(x_TK, w_KN) if fixed else cpu_products.mm(x_TK, w_KN)


def _gradient_of_a(low_TN: Tensor, x_TD: Tensor, fixed: bool) -> Tensor:
    """Return `low^T x`, in fp32 at least. Hidden states of tokens without a gradient may be NaN, and add nothing."""
    x_TD = x_TD.masked_fill((low_TN == 0).all(1, keepdim=True), 0)
    if not fixed:
        return matmul.add_product(None, low_TN.t(), x_TD)
    return fixed_order.transposed(fixed_order.aligned(low_TN), x_TD)

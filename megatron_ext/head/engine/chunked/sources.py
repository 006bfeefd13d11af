"""Sources of a chunk's logits: they exist, or a product makes them; and their transform into the ones read.

Legend: T tokens, t of a chunk, D hidden size, V columns of this rank's vocabulary shard.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group
from megatron_ext.head.call.arithmetic import FAST, FIXED, Arithmetic
from megatron_ext.head.call.leaves import leaves_of
from megatron_ext.head.call.matmul import in_one, operand
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.engine.flatten import rows_of
from megatron_ext.head.row_passes.logit_passes import bend, transformed
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.matrices import accumulation_dtype, new_matrix


class LogitTransform(NamedTuple):
    """Transform of a product's logits into those that are read: a bias `[V]` of this rank's columns, scale, softcap."""

    bias_V: Tensor | None = None
    softcap: float | None = None
    scale: float = 1.0
    rounds: bool = False  # whether the product is rounded to the operands' 16 bits

    @property
    def changes(self) -> bool:
        """Return whether it does anything."""
        return self.bias_V is not None or self.softcap is not None or self.scale != 1.0

    def applied(self, z_tV: Tensor) -> Tensor:
        """`softcap * tanh(scale * (z + bias) / softcap)`, in the dtype of the passes; `z` itself if nothing changes.

        Rows are as far apart for one token as for many: kernels add in an order that goes by it.
        """
        if not self.changes:
            return z_tV
        dtype = accumulation_dtype(z_tV.dtype)
        out_tV = new_matrix(z_tV, z_tV.shape[0], z_tV.shape[1], dtype)
        return transformed(z_tV, self.bias_V, self._own_cap, 1.0 / self.scale, dtype, out_tV)

    def pull(self, z_tV: Tensor, out_tV: Tensor) -> None:
        """Turns the gradient of what `applied` gives of `z`, in `out`, into that of `z`."""
        if self._own_cap is not None:
            out_tV.mul_(bend(z_tV, self.bias_V, self._own_cap, accumulation_dtype(out_tV.dtype)))
        if self.scale != 1.0:
            out_tV.mul_(self.scale)

    @property
    def _own_cap(self) -> float | None:
        """Return the softcap of the logits before they are multiplied."""
        return None if self.softcap is None else self.softcap / self.scale


class StoredLogits:
    """Logits that exist."""

    def __init__(self, z: Tensor, transform: LogitTransform):
        self.z, self.transform = z, transform

    def __call__(self, rows: slice) -> Tensor:
        return rows_of(self.z, rows)


class ComputedLogits:
    """Logits that the product of hidden states and weight makes, in forward and in backward by the same matmul.

    `repeats`: how many tokens in a row each row of hidden states is of. `memory_TV`: of the first tokens' logits.
    """

    memory_TV: Tensor | None = None

    def __init__(self, x_TD: Tensor, w_VD: Any, transform: LogitTransform, arithmetic: Arithmetic, repeats: int = 1):
        self.x_TD, self.w_VD, self.transform, self.repeats = x_TD, w_VD, transform, repeats
        self._arithmetic = arithmetic

    def __call__(self, rows: slice) -> Tensor:
        if self.repeats == 1:
            return self._made(rows)
        first = rows.start // self.repeats
        z_tV = self._made(slice(first, -(-rows.stop // self.repeats))).repeat_interleave(self.repeats, 0)
        return z_tV[rows.start - first * self.repeats :][: rows.stop - rows.start]

    def _made(self, rows: slice) -> Tensor:
        kept_TV = self.memory_TV
        out_tV = kept_TV[rows] if kept_TV is not None and rows.stop <= kept_TV.shape[0] else None
        return self._arithmetic.logits(self.x_TD[rows], self.w_VD, out_tV, self.transform.rounds)


def of_logits(logits: Sequence[Tensor], transforms: Sequence[LogitTransform]) -> list[StoredLogits]:
    """Sources of the student's and the teachers' logits, which exist already."""
    return [StoredLogits(z, transform) for z, transform in zip(logits, transforms, strict=True)]


def of_hidden(
    inputs: Sequence[Any], transforms: Sequence[LogitTransform], call: ResolvedHead, sizes: list[int] | None
) -> list[list[ComputedLogits]]:
    """Sources, for each leaf, of logits from all tokens' hidden states. `inputs`: hidden states, weight, bias and low
    rank of each head. Communicates: with `sizes` 1 all-gather."""
    hidden, biases = [*inputs[::4]], [*inputs[2::4]]
    weights = [operand(*each) for each in zip(inputs[1::4], inputs[3::4], strict=True)]
    if call.chosen is not None:
        weights[0] = weights[0].index_select(0, call.chosen)
        biases[0] = None if biases[0] is None else biases[0].index_select(0, call.chosen)
    if sizes and any(sizes):
        hidden = gather_tokens(hidden, call.group, sizes)
    leaves = leaves_of(call) if call.bits != "fast" else []
    found: list[list[ComputedLogits]] = [[] for _ in range(max(len(leaves), 1))]
    for x_TD, weight_VD, bias_V, transform in zip(hidden, weights, biases, transforms, strict=True):
        w_VD, repeats = weight_VD.to(x_TD.dtype), max(len(hidden[0]) // max(len(x_TD), 1), 1)
        wide_V = None if bias_V is None else bias_V.to(accumulation_dtype(x_TD.dtype))
        if not leaves:
            found[0].append(ComputedLogits(x_TD, w_VD, transform._replace(bias_V=wide_V), FAST, repeats))
            continue
        x_TD, whole_VD = fixed_order.aligned(x_TD), in_one(w_VD)
        for leaf, made in zip(leaves, found, strict=True):
            own_V = None if wide_V is None else leaf.cut(wide_V)
            made.append(ComputedLogits(x_TD, leaf.cut(whole_VD), transform._replace(bias_V=own_V), FIXED, repeats))
    return found


def of_each(x_TD: Tensor, tokens: int) -> Tensor:
    """A row for each of `tokens`, of rows that are of several in a row."""
    return x_TD if len(x_TD) == tokens else x_TD.repeat_interleave(tokens // len(x_TD), 0)


def gather_tokens(hidden: list[Tensor], group: Group, sizes: list[int]) -> list[Tensor]:
    """All ranks' tokens of each `[t, D]`, whose D and dtypes may differ, and some of which may have a row for several
    tokens. Communicates: 1 all-gather."""
    if len(hidden) == 1:
        return [collectives.all_gather(hidden[0], group, sizes=sizes)]
    dtypes = [x.dtype for x in hidden]
    alike = all(dtype == dtypes[0] for dtype in dtypes)
    fewest = min(len(x) for x in hidden)
    together = len(hidden[0]) // max(fewest, 1)  # tokens of which one row is sent
    sides = hidden if alike else [x.contiguous().view(torch.uint8) for x in hidden]
    if together > 1:
        sides, sizes = [x.reshape(fewest, -1) for x in sides], [size // together for size in sizes]
    whole = collectives.all_gather(torch.cat(sides, 1), group, sizes=sizes)
    found = [
        x if alike else x.contiguous().view(dtype)
        for x, dtype in zip(whole.split([x.shape[1] for x in sides], 1), dtypes, strict=True)
    ]
    return [x.reshape(-1, own.shape[1]) for x, own in zip(found, hidden, strict=True)]

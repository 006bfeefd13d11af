"""Sources of a chunk's logits: they exist, or a product makes them; and their transform into the ones read.

Leading dims of hidden states, logits and labels are flattened to one dim of tokens, and restored. Logits are not
copied: `[..., V]` become as flat as their strides allow. Those of `logits[:, :-1]` stay `[B, S - 1, V]`, B runs of rows
that follow each other in memory, and are read run by run.

Legend: T tokens, t of a chunk, B sequences, S positions, D hidden size, V columns of this rank's vocabulary shard.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group
from megatron_ext.head.call.matmul import bend, in_one, operand, transformed
from megatron_ext.head.call.resolved_head import FAST, FIXED, Arithmetic, ResolvedHead, leaves_of
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.tensors import accumulation_dtype, new_matrix, part_of

# Elements of rows that are copied after all, because their runs are too short to be worked on one by one.
_FEW = 1 << 20


class Flat:
    """The leading dims of logits `[..., V]` as one, in the order of their strides: transposed ones are not copied.

    `as_given`: in the order that the dims have.
    """

    def __init__(self, logits: Tensor, as_given: bool = False):
        self.shape, strides = logits.shape[:-1], logits.stride()
        self.order = sorted(range(len(self.shape)), key=lambda dim: 0 if as_given else -strides[dim])
        self.back = sorted(range(len(self.order)), key=self.order.__getitem__)
        self._in_order = self.order == sorted(self.order)

    def places(self, device: torch.device, ranks: int) -> Tensor | None:
        """`[T]`: where each row is among the tokens as the caller has them; None if in that order, or alone."""
        if ranks == 1 or self._in_order:
            return None
        return self(torch.arange(self.shape.numel(), device=device).view(self.shape))

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, ...]` of a tensor with the same leading dims."""
        x = x if self._in_order else x.permute([*self.order, *range(len(self.order), x.dim())])
        return x if len(self.order) == 1 else x.reshape(self.shape.numel(), *x.shape[len(self.order) :])

    def rows(self, logits: Tensor) -> Tensor:
        """The logits themselves, as `rows_of` wants them: `[T, V]`, or with further leading dims."""
        z = logits if self._in_order else logits.permute(*self.order, -1)
        z = z if self.order else z.unsqueeze(0)
        dim = 0
        while dim < z.dim() - 2:
            above, below = z.stride(dim), z.stride(dim + 1) * z.shape[dim + 1]
            if above == below or 1 in z.shape[dim : dim + 2] or z.numel() == 0:
                z = z.flatten(dim, dim + 1)
            else:
                dim += 1
        return z

    def up(self, x_T: Tensor) -> Tensor:
        """The tensor whose leading dims were made one."""
        if len(self.order) == 1:
            return x_T
        x = x_T.reshape([*(self.shape[dim] for dim in self.order), *x_T.shape[1:]])
        return x if self._in_order else x.permute([*self.back, *range(len(self.order), x.dim())])


def tokens_of(z: Tensor) -> int:
    """T of logits `[..., V]`."""
    return z.shape[:-1].numel()


def rows_of(z: Tensor, rows: slice) -> Tensor:
    """`[t, V]`: `rows` of the T rows of logits `[..., V]`; a copy only where they lie in several runs."""
    run = z.shape[-2]
    if z.dim() == 2:
        return part_of(z, rows)
    parts = [
        _run(z, i)[max(rows.start - i * run, 0) : rows.stop - i * run]
        for i in range(rows.start // run, -(-rows.stop // run))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_runs(z: Tensor, chunks: Iterable[slice], copy: bool = True) -> Iterator[slice]:
    """`chunks` of rows, cut where a run ends, so that none is copied; with `copy` a few short runs stay together."""
    step = z.shape[-2] * (max(1, _FEW // max(z.shape[-2] * z.shape[-1], 1)) if copy else 1)
    for rows in chunks:
        ends = range((rows.start // step + 1) * step, rows.stop, step) if z.dim() > 2 else ()
        for start, stop in zip((rows.start, *ends), (*ends, rows.stop), strict=True):
            yield slice(start, stop)


def new_gradient(z: Tensor) -> Tensor:
    """Room for the gradient of logits `[..., V]`, in its rows as flat as it gets."""
    return torch.empty_like(z) if z.dim() == 2 else z.new_empty(tokens_of(z), z.shape[-1])


def _run(z: Tensor, i: int) -> Tensor:
    """The i-th run of rows, `[S, V]`."""
    while z.dim() > 2:
        inner = z.shape[1:-2].numel()
        z, i = z[i // inner], i % inner
    return z


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
        kept_TV, first = self.memory_TV, rows.start // self.repeats
        made = rows if self.repeats == 1 else slice(first, -(-rows.stop // self.repeats))
        out_tV = kept_TV[made] if kept_TV is not None and made.stop <= kept_TV.shape[0] else None
        z_tV = self._arithmetic.logits(self.x_TD[made], self.w_VD, out_tV, self.transform.rounds)
        if self.repeats == 1:
            return z_tV
        return z_tV.repeat_interleave(self.repeats, 0)[rows.start - first * self.repeats :][: rows.stop - rows.start]


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

"""Logits that exist: their rows as one dim of tokens, the autograd function of any read-outs of them, and that of the
softmax or log-softmax over the whole vocabulary, which returns a tensor of the logits' size.

Leading dims are flattened and restored. Logits are not copied: `[..., V]` are flattened as far as their strides allow.
For example `logits[:, :-1]` stays `[B, S - 1, V]`, B runs of rows that are neighbours in memory, and is read by runs.

Legend: T tokens, t of a chunk, B sequences, S positions, V columns of this rank's vocabulary shard.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.autograd import differentiable_once, save_groups, saved_groups, without_autocast
from megatron_ext.distributed import collectives
from megatron_ext.head import checks
from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.call.statistics import Statistics
from megatron_ext.head.engine.chunk_logits import ChunkGradient, LogitTransform
from megatron_ext.head.engine.chunked import read_chunks, row_chunks
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.readouts.row_sums import LogSumExp
from megatron_ext.numerics.tensors import accumulation_dtype, part_of

# Elements of a chunk that is copied after all, because its runs are too short to be worked on one by one.
_FEW = 1 << 20


class Flat:
    """A flattening of the leading dims of logits `[..., V]`, in the order of their strides, so that transposed logits
    are not copied. `as_given`: in the order of the dims instead.
    """

    def __init__(self, logits: Tensor, as_given: bool = False):
        self.shape, strides = logits.shape[:-1], logits.stride()
        self.order = sorted(range(len(self.shape)), key=lambda dim: 0 if as_given else -strides[dim])
        self.back = sorted(range(len(self.order)), key=self.order.__getitem__)
        self._in_order = self.order == sorted(self.order)

    def places(self, device: torch.device, ranks: int) -> Tensor | None:
        """Return the index of each row among the caller's tokens: `[T]`; None if in that order, or at one rank."""
        if ranks == 1 or self._in_order:
            return None
        return self(torch.arange(self.shape.numel(), device=device).view(self.shape))

    def __call__(self, x: Tensor) -> Tensor:
        """Flatten a tensor with the same leading dims to `[T, ...]`."""
        x = x if self._in_order else x.permute([*self.order, *range(len(self.order), x.dim())])
        return x if len(self.order) == 1 else x.reshape(self.shape.numel(), *x.shape[len(self.order) :])

    def rows(self, logits: Tensor) -> Tensor:
        """Return a view of the logits for `rows_of`: `[T, V]`, or with further leading dims."""
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
        """Restore the leading dims of a tensor `[T, ...]`."""
        if len(self.order) == 1:
            return x_T
        x = x_T.reshape([*(self.shape[dim] for dim in self.order), *x_T.shape[1:]])
        return x if self._in_order else x.permute([*self.back, *range(len(self.order), x.dim())])


def rows_of(z: Tensor, rows: slice) -> Tensor:
    """Return `rows` of the T rows of logits `[..., V]`: `[t, V]`, a copy only if they lie in several runs."""
    run = z.shape[-2]
    if z.dim() == 2:
        return part_of(z, rows)
    parts = [
        _run(z, i)[max(rows.start - i * run, 0) : rows.stop - i * run]
        for i in range(rows.start // run, -(-rows.stop // run))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def in_runs(z: Tensor, chunks: Iterable[slice], copy: bool = True) -> Iterator[slice]:
    """Cut `chunks` of rows where a run ends, so that none is copied; with `copy` a few short runs stay together."""
    step = z.shape[-2] * (max(1, _FEW // max(z.shape[-2] * z.shape[-1], 1)) if copy else 1)
    for rows in chunks:
        ends = range((rows.start // step + 1) * step, rows.stop, step) if z.dim() > 2 else ()
        for start, stop in zip((rows.start, *ends), (*ends, rows.stop), strict=True):
            yield slice(start, stop)


def new_gradient(z: Tensor) -> Tensor:
    """Return new memory `[T, V]` for the gradient of logits `[..., V]`, with adjacent columns."""
    return torch.empty_like(z) if z.dim() == 2 and z.stride(1) == 1 else z.new_empty(z.shape[:-1].numel(), z.shape[-1])


def _run(z: Tensor, i: int) -> Tensor:
    """Return the i-th run of rows, `[S, V]`."""
    while z.dim() > 2:
        inner = z.shape[1:-2].numel()
        z, i = z[i // inner], i % inner
    return z


class StoredLogits(NamedTuple):
    """A source of logits that exist, as `ComputedLogits` is of logits that a product makes."""

    z: Tensor
    transform: LogitTransform

    def __call__(self, rows: slice) -> Tensor:
        return rows_of(self.z, rows)


class StoredLogitsHead(torch.autograd.Function):
    """The results of `plan`'s read-outs, of logits `[T, V]`, or as `Flat.rows` returns them, and of the teachers'
    logits, which get no gradient.

    `transforms`: of the logits and of each teacher's. The logits themselves are saved. `into_logits`: backward writes
    the gradient into their memory, once. The ranks' logits may have different orders of tokens in memory, above all
    those of an empty shard: `plan.places_T` has the order.

    Communicates: forward one all-gather of statistics, and what read-outs send beside; backward nothing.
    """

    @staticmethod
    def forward(
        ctx: Any, plan: Plan, transforms: Sequence[LogitTransform], into_logits: bool, *logits: Tensor
    ) -> tuple[Tensor, ...]:
        with without_autocast(logits[0]):
            chunks = plan.chunks() or _chunks(logits, plan)
            stats, results, saved, _ = read_chunks(plan, [[*map(StoredLogits, logits, transforms)]], chunks, logits[0])
        ctx.plan, ctx.transforms, ctx.into_logits = plan, transforms, into_logits
        save_groups(ctx, logits, stats or (), *saved)
        return plan.give(ctx, results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, (logits, fields, *saved) = ctx.plan, saved_groups(ctx)
        stats = Statistics(*fields) if fields else None
        with without_autocast(logits[0]):
            made = [*map(StoredLogits, logits, ctx.transforms)]
            gradient = ChunkGradient(plan, made, stats, saved, [*map((*grads, None).__getitem__, ctx.firsts)])
            dz = logits[0].detach() if ctx.into_logits else new_gradient(logits[0])
            for rows in _chunks(logits, plan, copy=not ctx.into_logits):
                gradient.write(rows, rows_of(dz, rows))
        return None, None, None, dz.view(logits[0].shape), *[None] * (len(logits) - 1)


def _chunks(logits: Sequence[Tensor], plan: Plan, copy: bool = True) -> list[slice]:
    """Return chunks of all tokens that are views of the logits, or with `copy` copies of a few short runs."""
    chunks: Iterable[slice] = row_chunks(plan, logits[0].shape[-1])
    for z in logits:
        chunks = in_runs(z, chunks, copy=copy)
    return [*chunks]


def dense_softmax(z: Any, logarithm: bool) -> Tensor:
    """Return probabilities of `z`'s logits, or their logarithms: `[..., V/R]`, fp32 (fp64 for fp64)."""
    flat, head, shown = Flat(z.logits), z.resolved(), {"logarithm": logarithm}
    z_TV, dtype = flat(z.logits), accumulation_dtype(z.logits.dtype)
    places = flat.places(z_TV.device, head.ranks), len(z_TV)
    plan = Plan([LogSumExp()], head, flat, len(z_TV), z_TV, shown, places)
    fault = checks.shard_fault(head.vocab, z_TV.shape[1], "logits", head.ranks)
    if fault is not None:
        plan.raise_on_all_ranks(fault, dtype, z_TV.device)
    return flat.up(DenseSoftmax.apply(z_TV, logarithm, plan))


class DenseSoftmax(torch.autograd.Function):
    """Probabilities `[T, V]` of logits `[T, V]`, or their logarithms, which are saved for backward. `plan`: that of the
    read-out `LogSumExp`.

    Communicates: forward 1 all-gather of statistics, backward 1 all-reduce of a number per token.
    """

    @staticmethod
    def forward(ctx: Any, z_TV: Tensor, logarithm: bool, plan: Plan) -> Tensor:
        made, counted = [StoredLogits(z_TV, LogitTransform())], plan.call.counted
        stats: Any = read_chunks(plan, [made], row_chunks(plan, z_TV.shape[1]), z_TV)[0]
        out_TV = torch.full_like(z_TV, -torch.inf if logarithm else 0, dtype=accumulation_dtype(z_TV.dtype))
        log_sum_T1 = stats.log_sum.to(out_TV.dtype).unsqueeze(1)
        largest_T1 = stats.largest.where(stats.largest > -torch.inf, 0.0).to(out_TV.dtype).unsqueeze(1)
        for at in blocks(z_TV):
            out = out_TV[at, :counted]
            out.copy_(z_TV[at, :counted]).sub_(largest_T1[at]).sub_(log_sum_T1[at])
            if not logarithm:
                out.exp_()
        ctx.plan, ctx.logarithm, ctx.dtype = plan, logarithm, z_TV.dtype
        ctx.save_for_backward(out_TV)
        return out_TV

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_TV: Tensor):
        (out_TV,), places_T = ctx.saved_tensors, ctx.plan.places_T
        dz_TV = torch.empty_like(out_TV, dtype=ctx.dtype)
        sums_T = out_TV.new_empty(out_TV.shape[0])
        for at in blocks(out_TV):
            counts = out_TV[at] > -torch.inf
            weighed = grad_TV[at].where(counts, 0.0) if ctx.logarithm else grad_TV[at] * out_TV[at]
            sums_T[at] = weighed.sum(1)
        if places_T is not None:
            sums_T = torch.empty_like(sums_T).index_copy_(0, places_T, sums_T)
        sums_T = collectives.all_reduce(sums_T, ctx.plan.call.group if len(out_TV) else None, in_place=True)
        if places_T is not None:
            sums_T = sums_T[places_T]
        for at in blocks(out_TV):
            out, g, sums = out_TV[at], grad_TV[at], sums_T[at].unsqueeze(1)
            dz_TV[at] = g.where(out > -torch.inf, 0.0) - out.exp() * sums if ctx.logarithm else out * (g - sums)
        return dz_TV, None, None

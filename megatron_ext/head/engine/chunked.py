"""The autograd function of read-outs of logits chunk by chunk, which a product makes; and the pass over chunks of
logits that `stored_logits.py` takes, too.

`ChunkedHead` serves read-outs of hidden states whose gradient wants logits or that have statistics of their own. The
others have `linear.py`, which makes no logits again for what it keeps.

Legend: T tokens, t of a chunk, D hidden size, V columns of this rank's vocabulary shard, K columns, R ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.autograd import differentiable_once, save_groups, saved_groups, without_autocast
from megatron_ext.head.call import chunk_sizes, statistics
from megatron_ext.head.call.matmul import add_to_parts, column_spans
from megatron_ext.head.call.resolved_head import of_shard
from megatron_ext.head.call.statistics import MAX, SUM_EXP, Statistics
from megatron_ext.head.engine.chunk_logits import (
    ChunkGradient,
    ComputedLogits,
    KeptGradient,
    LogitTransform,
    kept_gradient,
    logits_of_chunk,
    of_hidden,
)
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.row_passes.passes import engine_combined, in_engine_order, write_engine_sums
from megatron_ext.numerics import fixed_order, tensors
from megatron_ext.numerics.tensors import accumulation_dtype, part_of, parts_of
from megatron_ext.numerics.tree_sums import TreeSum, start_sum_of_ranks


class ChunkedHead(torch.autograd.Function):
    """The results of `plan`'s read-outs, of hidden states `[T, D]`, weight `[V, D]`, bias `[V]` and a low rank beside
    the weight, whose columns of the hidden states are the last ones; and the same of each read-out's teacher, without a
    gradient.

    `transforms`: softcap and scale of these logits and of each teacher's, and whether they are rounded. Never holds
    more than a chunk of logits of each: backward makes them again, 8 T V D FLOPs in all (6 where the gradient needs
    none), beside those of teachers; of what `KeptGradient` keeps none. Weight gradients add up in fp32. `sizes`:
    with the sequence layout, where hidden states are this rank's slice, the number of each rank's tokens; else None.
    `keep`: a backward may follow.

    With fixed bits logits, statistics and gradients are made leaf by leaf, in the order of the tree.

    Communicates, at several ranks: forward what the exchange does, backward `start_sum_of_ranks`. With the sequence
    layout each also gathers the hidden states, with the teachers' in the same collective.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        transforms: Sequence[LogitTransform],
        sizes: list[int] | None,
        keep: bool,
        *inputs: Tensor | None,
    ) -> tuple[Tensor, ...]:
        hidden_TD: Any = inputs[0]
        with without_autocast(hidden_TD):
            made = of_hidden(inputs, transforms, plan.call, sizes)
            kept = kept_gradient(plan, made[0][0]) if keep and _by_factor_alone(plan) else None
            stats, results, saved, shifts = read_chunks(plan, made, _product_chunks(plan, made, kept), hidden_TD, kept)
        of_kept = () if kept is None else (kept.unit_TV, kept.bad_T)
        ctx.plan, ctx.transforms, ctx.sizes = plan, transforms, sizes
        ctx.parameter = inputs[1] if plan.call.fuse_main_grad else None
        given_TD = hidden_TD if plan.held is None else hidden_TD.to(plan.held)  # widened from it
        save_groups(ctx, (given_TD, *inputs[1:]), stats or (), shifts, of_kept, *saved)
        return plan.give(ctx, results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        plan, (inputs, fields, shifts, of_kept, *saved) = ctx.plan, saved_groups(ctx)
        if plan.held is not None:
            inputs[0] = inputs[0].to(torch.float32)
        stats, firsts = Statistics(*fields) if fields else None, [*map((*grads, None).__getitem__, ctx.firsts)]
        with without_autocast(inputs[0]):
            made = of_hidden(inputs, ctx.transforms, plan.call, ctx.sizes)
            if _by_factor_alone(plan) and firsts[0] is not None:
                # Hidden states of tokens that do not count may be NaN: as where the gradient is kept, they add nothing.
                x_TD = made[0][0].x_TD.masked_fill((firsts[0] == 0).unsqueeze(1), 0)
                for each in made:
                    each[0].x_TD = x_TD
            gradients = _chunk_gradients(plan, made, stats, shifts, saved, firsts)
            kept = KeptGradient(plan, made[0][0], *of_kept) if of_kept else None
            found = _gradients(ctx, inputs, made, gradients, kept, firsts[0])
        return None, None, None, None, *found, *[None] * (len(inputs) - len(found))


def _gradients(
    ctx: Any,
    inputs: Sequence[Any],
    made: Sequence[Sequence[ComputedLogits]],
    gradients: Sequence[ChunkGradient],
    kept: KeptGradient | None,
    first_T: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, weight, bias and low rank, of the logits' `gradients`, and of what is
    `kept` of the first read-out's, whose upstream gradient is `first`."""
    plan, chosen = ctx.plan, ctx.plan.call.chosen
    _, weight_VD, bias_V, low_VR, *_ = inputs
    need_dx, need_dw, need_db, need_dlow = ctx.needs_input_grad[4:8]
    source, fused_VD = made[0][0], None
    if ctx.parameter is not None and need_dw:
        fused_VD = main_grad.buffer_of(ctx.parameter)
    x_TD, wide = source.x_TD, accumulation_dtype(source.x_TD.dtype)
    arithmetic, fixed, width = plan.arithmetic, plan.fixed, source.w_VD.shape[0]
    spans = [slice(at * width, (at + 1) * width) for at in range(len(made))]

    def room(wanted: bool, like: Any, begun: Tensor | None = None) -> Tensor | None:
        if wanted and begun is not None and not fixed:
            return begun
        return like.new_zeros(spans[-1].stop, *like.shape[1:], dtype=wide) if wanted else None

    low = [] if low_VR is None else [low_VR]
    totals_VD = [room(need_dw, weight_VD, fused_VD if chosen is None else None), *(room(need_dlow, x) for x in low)]
    columns, total_V, dx_TD = column_spans([weight_VD, *low]), room(need_db, bias_V), None
    if need_dx:
        dx_TD = x_TD.new_empty(x_TD.shape, dtype=wide if fixed else x_TD.dtype)
    if kept is not None:
        kept.add_products(first_T, dx_TD, totals_VD, columns, total_V)
    for rows in _product_chunks(plan, made, kept):
        if kept is not None and rows.stop <= kept.tokens:
            continue
        tree = TreeSum()
        for (leaf, *_), gradient, span in zip(made, gradients, spans, strict=True):
            dz_tV, w_VD = tensors.new_matrix(x_TD, rows.stop - rows.start, width), leaf.w_VD
            gradient.write(rows, dz_tV)
            if dx_TD is not None:
                tree.add(arithmetic.add_product(None, dz_tV, w_VD))
            add_to_parts(parts_of(span, *totals_VD), dz_tV, x_TD[rows], columns, arithmetic.add_transposed)
            if total_V is not None:
                arithmetic.add_column_sums(total_V[span], dz_tV)
            del dz_tV  # before the next one is made
        if dx_TD is not None:
            dx_TD[rows] = tree.total()
    sum_TD = None if dx_TD is None else start_sum_of_ranks(dx_TD, inputs[0], plan.call.group, ctx.sizes, fixed)
    of_low = totals_VD[1] if low else None
    totals = (totals_VD[0], weight_VD, fused_VD), (total_V, bias_V, None), (of_low, low_VR, None)
    if chosen is not None:
        found = [_of_all(total, chosen, like, begun) for total, like, begun in totals]
    elif fixed:
        found = [None if total is None else of_shard(total, like, begun) for total, like, begun in totals]
    else:
        found = [total for total, _, _ in totals]
    if fused_VD is not None:
        found[0] = main_grad.finish(ctx.parameter, weight_VD.dtype)
    found = [x if x is None else x.to(like.dtype) for x, like in zip(found, (weight_VD, bias_V, low_VR), strict=True)]
    return None if sum_TD is None else sum_TD.wait(), *found


def _by_factor_alone(plan: Plan) -> bool:
    return len(plan.readouts) == 1 and plan.readouts[0].by_factor


def _chunk_gradients(
    plan: Plan,
    made: Sequence[Sequence[ComputedLogits]],
    stats: Statistics | None,
    shifts: Sequence[Tensor],
    saved: list[list[Tensor]],
    grads: Sequence[Tensor | None],
) -> list[ChunkGradient]:
    """Make the gradient of each leaf, whose exponentials have a shift of their own where there are several."""
    if len(made) == 1:
        return [ChunkGradient(plan, made[0], stats, saved, grads)]
    found = []
    for at, (part, each) in enumerate(zip(plan.leaves, made, strict=True)):
        own = None if stats is None else stats._replace(shift=shifts[at])
        found.append(ChunkGradient(part, each, own, plan.saved_of(at, saved), grads))
    return found


def _of_all(part: Tensor | None, chosen: Tensor, like: Any, total: Tensor | None = None) -> Tensor | None:
    """The gradient of all columns, of that of the chosen ones: added to `total`, or new."""
    if part is None:
        return None
    if total is not None:
        return total.index_add_(0, chosen, part.to(total.dtype))
    return torch.zeros_like(like).index_copy_(0, chosen, part.to(like.dtype))


def _product_chunks(plan: Plan, made: Sequence[Sequence[ComputedLogits]], kept: KeptGradient | None) -> list[slice]:
    if kept is not None:
        return kept.chunks()
    source = made[0][0]
    tokens = chunk_sizes.summed_tokens(source.w_VD) if source.x_TD.is_cuda else None
    return row_chunks(plan, len(made) * source.w_VD.shape[0], tokens)


def row_chunks(plan: Plan, columns: int, tokens: int | None = None) -> list[slice]:
    """`tokens`: how many a chunk has where nothing else says it; None: by the number of columns."""
    call, on_gpu, whole = plan.call, plan.target_T.is_cuda, slice(0, plan.tokens)
    alike = plan.chunks()
    if plan.fixed:
        like = alike or chunk_sizes.chunks(whole, call.chunk_tokens, columns, on_gpu)
        return chunk_sizes.chunks(whole, fixed_order.whole_blocks(like[0]), columns, on_gpu) if like else []
    if alike:
        return alike
    if on_gpu and not plan.needs_logits and not call.chunk_tokens:
        return [whole]  # each pass is one launch, and nothing is made of a chunk
    return chunk_sizes.chunks(whole, call.chunk_tokens or tokens, columns, on_gpu)


def read_chunks(
    plan: Plan,
    made: Sequence[Sequence[Any]],
    chunks: list[slice],
    like: Tensor,
    kept: KeptGradient | None = None,
) -> tuple[Statistics | None, list[list[Tensor]], list[list[Tensor]], Sequence[Tensor]]:
    """The statistics of all shards together, None if no read-out wanted the softmax; of each read-out the results, and
    what its gradient wants of forward; and what the exponentials of each leaf are relative to, where there are several.
    `made`: of each leaf."""
    call, dtype = plan.call, accumulation_dtype(like.dtype)
    plan.begin(chunks if plan.tokens else [], like.device)
    whole = not plan.leaves
    stats_KT = statistics.new_statistics(plan.tokens, plan.shared_rows, plan.ranks, dtype, like.device, plan.rows)
    own_KT = stats_KT.new_empty(plan.own_rows, plan.tokens) if plan.own_rows else None
    shifts = [stats_KT.new_empty(plan.tokens)] if whole else stats_KT.new_empty(len(made), plan.tokens).unbind()
    for rows in chunks:
        logits, stats_Kt, raw_tV = [], stats_KT[:, rows], None
        for sides in made:
            raw_tV, found = logits_of_chunk(sides, rows, keep_raw=kept is not None)  # kept of one leaf alone
            logits.append(found)
        if plan.softmax and whole:
            _write_statistics(plan, logits[0][0], rows, stats_Kt, part_of(shifts[0], rows))
        elif plan.softmax:
            _write_joined(plan, [sides[0] for sides in logits], rows, stats_Kt, shifts)
        else:
            counted = call.counted if whole else plan.leaves[0].call.counted
            stats_Kt[MAX : SUM_EXP + 1] = statistics.fingerprint(logits[0][0], counted)
        plan.scan(rows, logits, stats_Kt, own_KT)
        if kept is not None:
            kept.write(rows, raw_tV, logits[0], stats_Kt[plan.shared_rows :])
        del logits, found, raw_tV  # before the next ones are made
    stats_RKT = plan.exchange(stats_KT)
    stats = None
    if plan.softmax and plan.fixed:
        stats = engine_combined(stats_RKT, stats_KT, shifts[0], call, like)
    elif plan.softmax:
        stats = plan.passes.combined(stats_RKT, stats_KT, shifts[0], call)
    results, saved = plan.results(stats, stats_RKT, stats_KT, own_KT)
    return stats, results, saved, shifts if plan.softmax and not whole else ()


def _write_statistics(plan: Plan, z_tV: Tensor, rows: slice, stats_Kt: Tensor, shift_t: Tensor) -> None:
    """The shared statistics of a chunk of logits."""
    call, target_t = plan.call, part_of(plan.target_T, rows)
    options = plan.sums | {"counted": call.counted}
    plan.passes.row_statistics(z_tV, target_t, stats_Kt, shift_T=shift_t, labelled=plan.labelled, **options)
    if plan.fixed and in_engine_order(call, z_tV):
        write_engine_sums(z_tV, stats_Kt, None, call.counted, call)


def _write_joined(plan: Plan, logits: list[Tensor], rows: slice, stats_Kt: Tensor, shifts: Sequence[Tensor]) -> None:
    """Write the statistics of several leaves, joined."""
    each_LKt = stats_Kt.new_empty(len(logits), statistics.own_rows(plan.call), stats_Kt.shape[1])
    for part, z_tV, own_Kt, shift_T in zip(plan.leaves, logits, each_LKt, shifts, strict=True):
        _write_statistics(part, z_tV, rows, own_Kt, shift_T[rows])
    whole_Kt = statistics.joined(each_LKt, plan.call)
    stats_Kt[: len(whole_Kt)] = whole_Kt

"""The fused linear head: hidden states and a vocabulary-sharded weight in, per-token numbers out, no logits kept.

Row scaling commutes with matmuls, so E = exp(z - m), kept from forward or recomputed, serves any per-token gradient g:

    dx = (g alpha) * (E @ W) + target terms        dW = E.T @ ((g alpha) * x) + target terms

with alpha = exp(m - lse). E is 0 at each token's label, and the target terms (the label's row of W for dx, x in the
label's row for dW) are added exactly, from the statistics. docs/head.md derives it.

Legend: T tokens (after any gather), D hidden size, V columns of this rank's vocabulary shard. m: the shard's row
maximum. G_TV: the gradient matrix, E itself unless entropy or softcap bend it.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank
from megatron_ext.head import matmul, statistics
from megatron_ext.head.checks import check_exchange
from megatron_ext.head.once import differentiable_once
from megatron_ext.head.options import HeadOptions
from megatron_ext.head.passes import (
    add_label_rows,
    finish_dx,
    row_gradient,
    row_statistics,
    token_gradient,
    token_results,
)
from megatron_ext.head.rows import accumulation_dtype
from megatron_ext.head.sizes import block_room, cached_columns, pieces, product_chunks, tiles
from megatron_ext.head.weight_gradient import WeightGradient


class LinearHead(torch.autograd.Function):
    """`(loss_T, entropy_T or None, hits_T or None, z_loss_T or None)` of hidden states `[T, D]`.

    `sizes`: with the sequence layout, where `hidden_TD` is this rank's slice, the number of each rank's tokens; else
    None. `keep`: a backward may follow.

    Communicates, at several ranks: forward one all-gather of statistics, backward one all-reduce of dx. With the
    sequence layout each also gathers the hidden states, and dx is reduce-scattered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        labels_T: Tensor,
        options: HeadOptions,
        sizes: list[int] | None,
        keep: bool,
    ):
        ctx.set_materialize_grads(False)
        with torch.autocast(hidden_TD.device.type, enabled=False):
            kept_T = labels_T != options.ignore_index
            target_T = (labels_T.long() - options.vocab.start).where(options.vocab.owns(labels_T) & kept_T, -1)
            stats_KT, exp_TV, shift_T = statistics_pass(hidden_TD, weight_VD, bias_V, target_T, options, sizes, keep)
            stats_RKT = statistics.exchange(stats_KT, options)
            check_exchange(stats_RKT, labels_T, options)
            stats, results = token_results(stats_RKT, stats_KT, shift_T, kept_T, options)
            ctx.options, ctx.sizes = options, sizes
            # Hooks on saved tensors (offloading, recomputation) hand back another object, without its attributes.
            ctx.parameter = weight_VD if options.fuse_main_grad else None
            ctx.save_for_backward(hidden_TD, weight_VD, bias_V, exp_TV, target_T, kept_T, *stats)
            ctx.mark_non_differentiable(*(mark for mark in (results.hits, results.z_loss) if mark is not None))
            return tuple(results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, grad_loss_T: Tensor | None, grad_entropy_T: Tensor | None, *_: None):
        saved = ctx.saved_tensors  # once: recomputation hands each of them out once
        with torch.autocast(saved[0].device.type, enabled=False):
            dx_TD, dw_VD, db_V = _backward(ctx, saved, grad_loss_T, grad_entropy_T)
        return dx_TD, dw_VD, db_V, None, None, None, None


def statistics_pass(hidden_TD, weight_VD, bias_V, target_T, options, sizes, keep):
    """This rank's statistics `[K, T]`, the exponentials (or logits) it keeps, and what exponentials are relative to."""
    tokens, columns, dtype = target_T.shape[0], weight_VD.shape[0], accumulation_dtype(hidden_TD.dtype)
    w_VD = weight_VD.to(hidden_TD.dtype)
    bias_V = None if bias_V is None else bias_V.to(dtype)
    stats_KT = statistics.new_statistics(tokens, options, dtype, hidden_TD.device)
    later = _backward_bytes(weight_VD, tokens, options) if keep else weight_VD.nbytes // 4
    cached = cached_columns(options, tokens, columns, hidden_TD, later) if keep else 0
    exp_TV = matmul.new_matrix(hidden_TD, tokens, cached) if cached else hidden_TD.new_empty(tokens, 0)
    shift_T = stats_KT.new_empty(tokens)
    in_place = cached == columns and not matmul.widens(hidden_TD)  # logits turn into what is kept of them

    def run(x_TD: Tensor, span: slice) -> None:
        for rows in product_chunks(span, options.chunk_tokens, columns, hidden_TD, later, in_place):
            kept = exp_TV[rows] if cached else None
            out_TV = kept if in_place else None
            z_TV = matmul.logits(x_TD[rows.start - span.start : rows.stop - span.start], w_VD, out_TV)
            if kept is not None and _keeps_logits(options, x_TD):
                if not in_place:
                    kept.copy_(z_TV[:, :cached])
                kept = None
            row_statistics(
                z_TV,
                target_T[rows],
                stats_KT[:, rows],
                kept,
                shift_T[rows],
                bias_V,
                options.vocab.counted,
                options.softcap,
                options.temperature,
                options.label_smoothing > 0,
                options.entropy,
                options.hits,
            )
            del z_TV  # before the next one is made

    if sizes is None or tokens == 0:
        run(hidden_TD, slice(0, tokens))
    else:
        gathered = collectives.start_all_gather(hidden_TD, options.group, sizes=sizes)
        start = sum(sizes[: group_rank(options.group)])
        own = slice(start, start + hidden_TD.shape[0])
        run(hidden_TD, own)  # while the other ranks' hidden states are on their way
        full_TD = gathered.wait()
        for span in (slice(0, own.start), slice(own.stop, tokens)):
            run(full_TD[span], span)
    return stats_KT, exp_TV, shift_T


def _keeps_logits(options, x_TD) -> bool:
    """Whether forward keeps logits, not their exponentials: those cannot tell the softcap's slope where it is small.

    Where forward has fp32 logits and keeps 16 bits of them (16-bit operands on CUDA), and a wide softcap leaves them
    large, that would cost more digits of the probabilities than it saves of the slope.
    """
    return options.softcap is not None and (not matmul.widens(x_TD) or options.softcap < 16)


def _backward_bytes(weight_VD, tokens, options) -> int:
    """Bytes that backward will need for dx and dW and that nothing holds during forward."""
    dw = 0 if options.fuse_main_grad or not weight_VD.requires_grad else weight_VD.nbytes
    return dw + 4 * tokens * weight_VD.shape[1] + 2 * weight_VD.element_size() * tokens * weight_VD.shape[1]


def _backward(ctx, saved, grad_loss_T, grad_entropy_T):
    options, sizes = ctx.options, ctx.sizes
    hidden_TD, weight_VD, bias_V, exp_TV, target_T, kept_T, *stats = saved
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    tokens, columns = target_T.shape[0], weight_VD.shape[0]
    in_slices = sizes is not None and tokens > 0
    # All ranks must decide alike whether to gather, and only a fraction of 1 keeps all columns everywhere.
    if in_slices and (need_dw or options.cache != 1):
        gathered = collectives.start_all_gather(hidden_TD, options.group, sizes=sizes)
    else:
        gathered = collectives.Pending(hidden_TD)

    grad = token_gradient(statistics.Statistics(*stats), kept_T, target_T, grad_loss_T, grad_entropy_T, options)
    w_VD = weight_VD.to(hidden_TD.dtype)
    fused = main_grad.buffer_of(ctx.parameter) if need_dw and options.fuse_main_grad else None
    dw_VD: Any = None if not need_dw else torch.empty_like(weight_VD) if fused is None else fused
    db_V: Any = grad.target.new_zeros(columns) if need_db else None
    product_TD = dx_TD = dx = dw = None
    cached, as_kept = exp_TV.shape[1], grad.inside is None
    for rows, block in tiles(hidden_TD, tokens, columns, cached, as_kept, need_dw, options.chunk_tokens):
        if as_kept and block.stop <= cached:
            g_TV = exp_TV[rows, block]  # E is G
        else:
            g_TV = _tile(rows, block, gathered.wait(), w_VD, bias_V, exp_TV, target_T, grad, options)
        if need_dx:
            product_TD = matmul.add_product(product_TD, g_TV, w_VD[block])
            if block.stop == columns:
                if dw is not None:
                    dw.release()
                done_TD = finished_dx(rows, product_TD, grad, target_T, w_VD, bias_V, options, in_slices)
                product_TD = None
                if dx_TD is None:
                    dx_TD = done_TD if rows.stop == tokens else done_TD.new_empty(tokens, done_TD.shape[1])
                if dx_TD is not done_TD:
                    dx_TD[rows] = done_TD
                if rows.stop == tokens and in_slices:
                    dx = collectives.start_reduce_scatter(dx_TD, options.group, sizes=sizes)
                elif rows.stop == tokens:
                    dx = collectives.start_all_reduce(dx_TD, options.group if tokens else None, in_place=True)
        if need_dw:
            if dw is None:
                counted_V = None if grad.offset is None else counted(bias_V, columns, options, grad.offset)
                parts = (grad.scale, target_T, grad.target, grad.offset, counted_V)
                dw = WeightGradient(dw_VD, gathered.wait(), *parts, accumulate=fused is not None)
            dw.add(block, g_TV)
        if need_db:
            db_V[block] += torch.mm(g_TV.t(), grad.scale[rows].to(g_TV.dtype).unsqueeze(1)).squeeze(1)
        del g_TV  # before the next one is made
    if dw is not None:
        dw.finish()
    if fused is not None:
        dw_VD = main_grad.finish(ctx.parameter, weight_VD.dtype)
    if need_db:
        common = counted_V = None
        if grad.offset is not None:
            common, counted_V = grad.offset.sum(0, True), counted(bias_V, columns, options, db_V)
        add_label_rows(db_V.unsqueeze(1), db_V.new_ones(tokens, 1), target_T, grad.target, common, counted_V)
        db_V = db_V.to(bias_V.dtype)
    return None if dx is None else dx.wait(), dw_VD, db_V


def _tile(tile, block, x_TD, w_VD, bias_V, exp_TV, target_T, grad, options) -> Tensor:
    """A tile of the gradient matrix: from what is kept of its logits, or from logits that are computed again."""
    kept, width = block.stop <= exp_TV.shape[1], block.stop - block.start
    target_T = target_T - block.start
    bias_V = None if bias_V is None else bias_V[block].to(grad.shift.dtype)
    g_TV = matmul.new_matrix(x_TD, tile.stop - tile.start, width)
    scale, slope, offset = grad.inside or (None, None, None)
    room = block_room(target_T.shape[0], w_VD.shape[0], x_TD)
    for rows in [tile] if kept else product_chunks(tile, None, width, x_TD, room):
        out_TV = g_TV[rows.start - tile.start : rows.stop - tile.start]
        source_TV = exp_TV[rows, block] if kept else matmul.logits(x_TD[rows], w_VD[block], out_TV)
        row_gradient(
            source_TV,
            kept and not _keeps_logits(options, x_TD),
            target_T[rows],
            grad.shift[rows],
            None if scale is None else scale[rows],
            None if slope is None else slope[rows],
            None if offset is None else offset[rows],
            None,
            out_TV,
            bias_V,
            min(max(options.vocab.counted - block.start, 0), width),
            options.softcap,
            options.temperature,
        )
        del source_TV
    return g_TV


def finished_dx(tile, product_TD, grad, target_T, w_VD, bias_V, options, passing) -> Tensor:
    """dx of the tokens of `tile` in the weight's dtype, from their rows' product with W, in its memory if possible.

    `passing`: dx is only on its way to a reduce-scatter, so it may sit in the first half of the product's memory.
    """
    if product_TD.dtype == w_VD.dtype:
        out_TD = product_TD
    elif passing:  # rows are converted in order: those not read yet lie behind those written
        out_TD = product_TD.view(w_VD.dtype).view(-1)[: product_TD.numel()].view(product_TD.shape)
    else:
        out_TD = w_VD.new_empty(product_TD.shape)
    common_D = None
    if grad.offset is not None:  # every row of W that counts, summed
        counted_V = counted(bias_V, w_VD.shape[0], options, grad.target)
        common_D = grad.target.new_zeros(w_VD.shape[1])
        for rows in pieces(w_VD):
            common_D += (w_VD[rows] * counted_V[rows].unsqueeze(1)).sum(0)
    offset_T = None if grad.offset is None else grad.offset[tile]
    finish_dx(out_TD, product_TD, grad.scale[tile], target_T[tile], grad.target[tile], w_VD, offset_T, common_D)
    return out_TD


def counted(bias_V, columns, options, like) -> Tensor:
    """1 for each column that counts, else 0, `[V]`: below the true vocabulary size and not masked by a bias of -inf."""
    counted_V = torch.arange(columns, device=like.device) < options.vocab.counted
    if bias_V is not None and options.softcap is None:
        counted_V &= bias_V > -torch.inf
    return counted_V.to(like.dtype)

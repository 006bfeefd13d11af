"""The fused linear head: hidden states and a vocabulary-sharded weight in, per-token numbers out, no logits kept.

Row scaling commutes with matmuls, so E = exp(z - m), kept from forward or recomputed, serves any per-token gradient g:

    dx = (g alpha) * (E @ W) + target terms        dW = E.T @ ((g alpha) * x) + target terms

with alpha = exp(m - lse). E is 0 at each token's label, and the target terms (the label's row of W for dx, x in the
label's row for dW) are added exactly, from the statistics. docs/head.md derives it.

Legend: T tokens (after any gather), D hidden size, V columns of this rank's vocabulary shard. m: the shard's row
maximum. G_TV: the gradient matrix, E itself unless entropy or softcap bend it.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_ext import main_grad
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank
from megatron_ext.head import gradient, matmul, statistics
from megatron_ext.head.checks import check_exchange
from megatron_ext.head.options import HeadOptions
from megatron_ext.head.rows import accumulation_dtype, row_gradient, row_statistics
from megatron_ext.head.sizes import cached_tokens, chunks, column_blocks


class LinearHead(torch.autograd.Function):
    """`(loss_T, entropy_T or None, hits_T or None)` of hidden states `[T, D]`.

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
            stats_KT, exp_TV, target_T = _statistics_pass(hidden_TD, weight_VD, bias_V, labels_T, options, sizes, keep)
            stats_RKT = statistics.exchange(stats_KT, options)
            check_exchange(stats_RKT, labels_T, options)
            stats = statistics.combine(stats_RKT, stats_KT, options)
            kept_T = labels_T != options.ignore_index
            ctx.options, ctx.sizes = options, sizes
            ctx.save_for_backward(hidden_TD, weight_VD, bias_V, exp_TV, target_T, kept_T, *stats)
            entropy = statistics.entropy(stats, kept_T) if options.entropy else None
            hits = None
            if stats.hits is not None:
                hits = stats.hits & kept_T
                ctx.mark_non_differentiable(hits)
            return statistics.loss(stats, kept_T, options), entropy, hits

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss_T: Tensor | None, grad_entropy_T: Tensor | None, _: None):
        with torch.autocast(ctx.saved_tensors[0].device.type, enabled=False):
            dx_TD, dw_VD, db_V = _backward(ctx, grad_loss_T, grad_entropy_T)
        return dx_TD, dw_VD, db_V, None, None, None, None


def _statistics_pass(hidden_TD, weight_VD, bias_V, labels_T, options, sizes, keep):
    """This rank's statistics `[K, T]`, the exponentials it keeps, and the labels' columns in its shard."""
    tokens, columns, dtype = labels_T.shape[0], weight_VD.shape[0], accumulation_dtype(hidden_TD.dtype)
    w_VD = weight_VD.to(hidden_TD.dtype)
    bias_V = None if bias_V is None else bias_V.to(dtype)
    mine_T = options.vocab.owns(labels_T) & (labels_T != options.ignore_index)
    target_T = (labels_T.long() - options.vocab.start).where(mine_T, -1)
    stats_KT = statistics.new_statistics(tokens, options, dtype, hidden_TD.device)
    cached = cached_tokens(options, tokens, columns, hidden_TD) if keep else 0
    exp_TV = hidden_TD.new_empty(cached, columns)

    def run(x_TD: Tensor, span: slice) -> None:
        for rows in chunks(span, cached, options.chunk_tokens, columns, hidden_TD.device):
            kept = exp_TV[rows] if rows.stop <= cached else None
            z_TV = matmul.logits(x_TD[rows.start - span.start : rows.stop - span.start], w_VD, kept)
            row_statistics(
                z_TV,
                target_T[rows],
                stats_KT[:, rows],
                kept,
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
    return stats_KT, exp_TV, target_T


class _Rows(NamedTuple):
    """`dlogits_TV = scale * G_TV + target at the label's column + offset in every column that counts`, each `[T]`."""

    scale: Tensor
    target: Tensor
    offset: Tensor | None


def _backward(ctx, grad_loss_T, grad_entropy_T):
    options, sizes = ctx.options, ctx.sizes
    hidden_TD, weight_VD, bias_V, exp_TV, target_T, kept_T, *stats = ctx.saved_tensors
    stats = statistics.Statistics(*stats)
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    tokens, cached, columns = target_T.shape[0], exp_TV.shape[0], weight_VD.shape[0]
    # All ranks must decide alike whether to gather, and only a fraction of 1 keeps every token everywhere.
    in_slices = sizes is not None and tokens > 0
    gathered = None
    if in_slices and (need_dw or options.cache != 1):
        gathered = collectives.start_all_gather(hidden_TD, options.group, sizes=sizes)

    coef = gradient.coefficients(stats, kept_T, grad_loss_T, grad_entropy_T, options)
    bend, rows = _gradient_matrix(stats, coef, target_T, options)
    w_VD = weight_VD.to(hidden_TD.dtype)
    fused = main_grad.buffer_of(weight_VD) if need_dw and options.fuse_main_grad else None
    dw_VD: Any = None if not need_dw else torch.empty_like(weight_VD) if fused is None else fused
    db_V: Any = rows.scale.new_zeros(columns) if need_db else None
    full_TD = scaled_TD = dx_TD = sent = None

    kept_as_is = cached == tokens and bend is None
    blocks = [slice(0, columns)] if kept_as_is else column_blocks(tokens, columns, options.chunk_tokens, hidden_TD)
    for block in blocks:
        last = block.stop == columns
        if kept_as_is:
            g_TV = exp_TV
        else:
            full_TD = hidden_TD if gathered is None else gathered.wait()
            g_TV = _gradient_block(block, full_TD, w_VD, bias_V, exp_TV, target_T, stats, bend, options)
        if need_dx:
            dx_TD = matmul.add_product(dx_TD, g_TV, w_VD[block], last)
        if need_dx and last:
            dx_TD = _finished_dx(dx_TD, rows, target_T, w_VD, bias_V, options)
            if in_slices:
                sent = collectives.start_reduce_scatter(dx_TD, options.group, sizes=sizes)
            elif tokens:
                sent = collectives.start_all_reduce(dx_TD, options.group, in_place=True)
        if need_dw:
            full_TD = hidden_TD if gathered is None else gathered.wait()
            if scaled_TD is None:
                scaled_TD = (full_TD * rows.scale.unsqueeze(1)).to(full_TD.dtype)
            if fused is None:
                matmul.weight_product(dw_VD[block], g_TV, scaled_TD)
            else:
                main_grad.add_product(fused[block], g_TV, scaled_TD)
        if need_db:
            db_V[block] = torch.mm(g_TV.t(), rows.scale.to(g_TV.dtype).unsqueeze(1)).squeeze(1)
        del g_TV  # before the next one is made
    if need_dw:
        _add_targets(dw_VD, rows, target_T, full_TD, bias_V, options)
    if fused is not None:
        dw_VD = main_grad.finish(weight_VD, weight_VD.dtype)
    if need_db:
        db_V.index_add_(0, target_T.clamp(min=0), rows.target)
        if rows.offset is not None:
            db_V += rows.offset.sum() * _counted(bias_V, columns, options, db_V)
        db_V = db_V.to(bias_V.dtype)
    return dx_TD if sent is None else sent.wait(), dw_VD, db_V


def _gradient_matrix(stats, coef, target_T, options) -> tuple[gradient.PassCoefficients | None, _Rows]:
    """How E is bent into G (None: not at all), and what completes G."""
    owned_T = target_T >= 0
    if coef.c is None and options.softcap is None:
        return None, _Rows(coef.a * coef.alpha, coef.target.where(owned_T, 0.0), coef.d)
    target, through = coef.target, None
    if options.softcap is not None:
        # The softcap's slope differs from column to column: the offset goes through the pass.
        target, through = target if coef.d is None else target + coef.d, coef.d
        target = target * gradient.target_bend(stats, options)
    # G's entries stay near probabilities, so that 16 bits hold them whatever the loss scale.
    sizes = [x.abs() for x in (coef.a, coef.c, through) if x is not None]
    unit = torch.stack(sizes).amax(0)
    bend = gradient.pass_coefficients(stats, coef._replace(d=through), unit.where(unit > 0, 1.0))
    return bend, _Rows(unit, target.where(owned_T, 0.0), coef.d if through is None else None)


def _gradient_block(block, full_TD, w_VD, bias_V, exp_TV, target_T, stats, bend, options) -> Tensor:
    """G of all tokens in the columns of `block`: from the exponentials kept, and recomputed for the other tokens."""
    tokens, cached, width = target_T.shape[0], exp_TV.shape[0], block.stop - block.start
    inside = (target_T >= block.start) & (target_T < block.stop)
    target_T = (target_T - block.start).where(inside, -1)
    counted = min(max(options.vocab.counted - block.start, 0), width)
    bias_V = None if bias_V is None else bias_V[block].to(stats.peak.dtype)
    g_TV = full_TD.new_empty(tokens, width)
    first = 0
    if bend is None:
        g_TV[:cached] = exp_TV[:, block]
        first = cached
    for rows in chunks(slice(first, tokens), cached, None, width, full_TD.device):
        known = rows.stop <= cached
        source = exp_TV[rows, block] if known else matmul.logits(full_TD[rows], w_VD[block], g_TV[rows])
        scale, slope, offset = (None if x is None else x[rows] for x in bend or (None, None, None))
        row_gradient(
            source,
            known,
            target_T[rows],
            stats.peak[rows],
            scale,
            slope,
            offset,
            None,
            g_TV[rows],
            bias_V,
            counted,
            options.softcap,
            options.temperature,
        )
        del source
    return g_TV


def _finished_dx(product_TD, rows, target_T, w_VD, bias_V, options) -> Tensor:
    """dx in the weight's dtype from `G @ W`, in the same memory where the dtype allows it."""
    out_TD = product_TD if product_TD.dtype == w_VD.dtype else w_VD.new_empty(product_TD.shape)
    common_D = None
    if rows.offset is not None:  # the sum of all rows of W that count
        counted_V = _counted(bias_V, w_VD.shape[0], options, rows.scale)
        common_D = rows.scale.new_zeros(w_VD.shape[1])
        for part in chunks(slice(0, w_VD.shape[0]), 0, None, w_VD.shape[1], w_VD.device):
            common_D += counted_V[part] @ w_VD[part].to(common_D.dtype)
    for part in chunks(slice(0, product_TD.shape[0]), 0, None, product_TD.shape[1], product_TD.device):
        dx_TD = w_VD[target_T[part].clamp(min=0)] * rows.target[part].unsqueeze(1)
        dx_TD.addcmul_(product_TD[part].to(dx_TD.dtype), rows.scale[part].unsqueeze(1))
        if common_D is not None:
            dx_TD.addcmul_(rows.offset[part].unsqueeze(1), common_D)
        out_TD[part] = dx_TD
    return out_TD


def _add_targets(dw_VD, rows, target_T, x_TD, bias_V, options) -> None:
    """Adds each token's own row, and the offset to every row that counts, in fp32; a 16-bit dW by blocks of D."""
    (columns, width), dtype = dw_VD.shape, rows.scale.dtype
    whole = dw_VD.dtype == dtype
    row_T = target_T.clamp(min=0)
    step = width if whole else max(64, (1 << 22) // max(columns, 1))
    for at in range(0, width, step):
        part = slice(at, min(at + step, width))
        out_VD = dw_VD[:, part] if whole else dw_VD[:, part].to(dtype)
        out_VD.index_add_(0, row_T, (x_TD[:, part] * rows.target.unsqueeze(1)).to(dtype))
        if rows.offset is not None:
            counted_V = _counted(bias_V, columns, options, rows.scale)
            out_VD.addcmul_(counted_V.unsqueeze(1), (x_TD[:, part] * rows.offset.unsqueeze(1)).sum(0))
        if not whole:
            dw_VD[:, part] = out_VD


def _counted(bias_V, columns, options, like) -> Tensor:
    """1 for each column that counts, else 0, `[V]`: below the true vocabulary size and not masked by a bias of -inf."""
    counted_V = torch.arange(columns, device=like.device) < options.vocab.counted
    if bias_V is not None and options.softcap is None:
        counted_V &= bias_V > -torch.inf
    return counted_V.to(like.dtype)

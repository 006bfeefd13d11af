"""The passes of the fused linear head over tokens and vocabulary: logits and statistics, tiles of the gradient, dx.

`linear.py` and `linear_steps.py` call them in their own order. No autograd. Legend: see `linear.py`.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank
from megatron_ext.head.call import matmul, statistics
from megatron_ext.head.call.chunk_sizes import block_room, cached_columns, pieces, product_chunks
from megatron_ext.head.call.matmul import Operand, SideBySide
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.row_passes.dispatch import passes_of
from megatron_ext.numerics import matrices
from megatron_ext.numerics.matrices import accumulation_dtype, part_of, parts_of


class FirstPass(NamedTuple):
    """First pass over a batch of tokens: what a rank has from its logits alone.

    Attributes:
        stats_KT: this rank's statistics, with a place more in each row for the exchange.
        exp_TV: exponentials (or logits) that are kept, `[T, 0]` if no gradient is wanted.
        shift_T: what they are relative to.
    """

    stats_KT: Tensor
    exp_TV: Tensor
    shift_T: Tensor


def statistics_pass(
    hidden_TD: Tensor, weight_VD: Operand, bias_V: Tensor | None, plan: Plan, sizes: list[int] | None, keep: bool
) -> FirstPass:
    """Logits, their statistics, and what is kept of them. `sizes`, `keep`, and what is communicated: see `LinearHead`,
    which has the exchange of statistics besides."""
    call, tokens, columns, dtype = plan.call, plan.tokens, weight_VD.shape[0], accumulation_dtype(hidden_TD.dtype)
    w_VD = weight_VD.to(hidden_TD.dtype)
    bias_V = None if bias_V is None else bias_V.to(dtype)
    stats_KT = statistics.new_statistics(tokens, call, dtype, hidden_TD.device)
    later, cached = kept_columns(weight_VD, hidden_TD, plan, keep)
    exp_TV = matrices.new_matrix(hidden_TD, tokens, cached) if cached else hidden_TD.new_empty(tokens, 0)
    shift_T = stats_KT.new_empty(tokens)
    # Logits turn into what is kept of them.
    in_place = cached == columns and not (hidden_TD.is_cuda and matrices.widens(hidden_TD, call.rounds))
    passes, options = passes_of(hidden_TD), call.sums(call.vocab.counted)
    as_logits = bool(cached) and call.softcap is not None and _keeps_logits(call, hidden_TD)

    def run(x_TD: Tensor, span: slice) -> None:
        for rows in product_chunks(span, call.chunk_tokens, columns, hidden_TD, later, in_place):
            x_tD, kept_tV, stats_Kt, target_t, shift_t = x_TD, exp_TV, stats_KT, plan.target_T, shift_T
            if rows.stop - rows.start != x_TD.shape[0]:
                x_tD = x_TD[rows.start - span.start : rows.stop - span.start]
            if rows.stop - rows.start != tokens:
                kept_tV, target_t, shift_t = exp_TV[rows], plan.target_T[rows], shift_T[rows]
            stats_Kt = stats_KT[:, rows]
            z_tV = matmul.logits(x_tD, w_VD, kept_tV if in_place else None, call.rounds)
            if as_logits and not in_place:
                kept_tV.copy_(z_tV[:, :cached])
            passes.row_statistics(
                z_tV,
                target_t,
                stats_Kt,
                exp_TV=kept_tV if cached and not as_logits else None,
                shift_T=shift_t,
                bias_V=bias_V,
                labelled=plan.labelled,
                **options,
            )
            del z_tV  # before the next one is made

    if sizes is None or tokens == 0:
        run(hidden_TD, slice(0, tokens))
    else:
        gathered = collectives.start_all_gather(hidden_TD, call.group, sizes=sizes)
        start = sum(sizes[: group_rank(call.group)])
        own = slice(start, start + hidden_TD.shape[0])
        run(hidden_TD, own)  # while the other ranks' hidden states are on their way
        full_TD = gathered.wait()
        for span in (slice(0, own.start), slice(own.stop, tokens)):
            run(full_TD[span], span)
    return FirstPass(stats_KT, exp_TV, shift_T)


def _keeps_logits(call, x_TD) -> bool:
    """Return whether forward keeps the logits instead of their exponentials.

    Backward needs the softcap's slope, `1 - tanh^2`, and where that is small it cannot be computed from rounded
    exponentials. The exception is a softcap of 16 or more with 16-bit operands on CUDA: there fp32 logits would be
    rounded to 16 bits, and such large logits lose more of the probabilities by that than the slope gains.
    """
    return call.softcap is not None and (not matrices.widens(x_TD, call.rounds) or call.softcap < 16)


def kept_columns(weight_VD: Operand, hidden_TD: Tensor, plan: Plan, keep: bool) -> tuple[int, int]:
    """Bytes that backward will need for dx and dW and that nothing holds during forward, or the weight's if none will
    follow: each chunk reads the weight; and for how many columns exponentials are kept."""
    if not keep:
        return weight_VD.nbytes, 0
    tokens, size = plan.tokens, weight_VD.element_size()
    first, *others = weight_VD.parts if isinstance(weight_VD, SideBySide) else [weight_VD]
    dw = 0 if plan.call.fuse_main_grad or not first.requires_grad else first.nbytes
    for part in others:
        dw += part.nbytes if part.requires_grad else 0
    later = dw + (4 + 2 * size) * tokens * weight_VD.shape[1]
    return later, cached_columns(plan.call, tokens, weight_VD.shape[0], hidden_TD, later)


def gradient_tile(tile, x_TD, w_VD, bias_V, exp_TV, grad, plan) -> Tensor:
    """A tile of the gradient matrix: from what is kept of its logits, or from logits that are computed again."""
    call, (tokens, block) = plan.call, tile
    kept, width = block.stop <= exp_TV.shape[1], block.stop - block.start
    target_T = plan.target_T - block.start
    bias_V = None if bias_V is None else bias_V[block].to(grad.shift.dtype)
    g_TV = matrices.new_matrix(x_TD, tokens.stop - tokens.start, width)
    inside = grad.inside or (None, None, None)
    room = block_room(target_T.shape[0], w_VD.shape[0], x_TD)
    for rows in [tokens] if kept else product_chunks(tokens, None, width, x_TD, room):
        out_TV = g_TV[rows.start - tokens.start : rows.stop - tokens.start]
        source_TV = exp_TV[rows, block] if kept else matmul.logits(x_TD[rows], w_VD[block], out_TV, call.rounds)
        scale_t, slope_t, offset_t = parts_of(rows, *inside)
        passes_of(source_TV).row_gradient(
            source_TV,
            part_of(target_T, rows),
            part_of(grad.shift, rows),
            out_TV,
            scale_T=scale_t,
            slope_T=slope_t,
            offset_T=offset_t,
            bias_V=bias_V,
            counted=min(max(call.vocab.counted - block.start, 0), width),
            softcap=call.softcap,
            temperature=call.temperature,
            source_is_exp=kept and not _keeps_logits(call, x_TD),
        )
        del source_TV
    return g_TV


def finished_dx(tile, product_TD, grad, w_VD, bias_V, plan, passing) -> Tensor:
    """dx of the tokens of `tile` in the weight's dtype, from their rows' product with W, in its memory if possible.

    `passing`: dx is only on its way to a reduce-scatter, so it may sit in the first half of the product's memory.
    """
    if isinstance(w_VD, SideBySide):
        whole_TD = (
            product_TD if product_TD.dtype == w_VD.dtype else product_TD.new_empty(product_TD.shape, dtype=w_VD.dtype)
        )
        for (part_TD, w_VP), (out_TD, _) in zip(w_VD.across(product_TD), w_VD.across(whole_TD), strict=True):
            done_TD = finished_dx(tile, part_TD, grad, w_VP, bias_V, plan, passing=False)
            if done_TD is not part_TD:
                out_TD.copy_(done_TD)
        return whole_TD
    if product_TD.dtype == w_VD.dtype:
        out_TD = product_TD
    elif passing:  # rows are converted in order: those not read yet lie behind those written
        out_TD = product_TD.view(w_VD.dtype).view(-1)[: product_TD.numel()].view(product_TD.shape)
    else:
        out_TD = w_VD.new_empty(product_TD.shape)
    common_D = None
    if grad.offset is not None:  # every row of W that counts, summed
        common_D = weighed_sum(w_VD, counted(bias_V, w_VD.shape[0], plan.call, grad.target))
    scale_t, value_t, target_t, offset_t = grad.scale, grad.target, plan.target_T, grad.offset
    if tile.stop - tile.start != plan.tokens:
        scale_t, value_t, target_t = scale_t[tile], value_t[tile], target_t[tile]
        offset_t = None if offset_t is None else offset_t[tile]
    passes_of(product_TD).finish_dx(out_TD, product_TD, scale_t, target_t, value_t, w_VD, offset_t, common_D)
    return out_TD


def weighed_sum(x_ND: Tensor, factor_N: Tensor) -> Tensor:
    """`sum factor * x` over rows."""
    total_D = factor_N.new_zeros(x_ND.shape[1])
    for rows in pieces(x_ND):
        total_D += (x_ND[rows] * factor_N[rows].unsqueeze(1)).sum(0)
    return total_D


def counted(bias_V, columns, call, like) -> Tensor:
    """1 for each column that counts, else 0, `[V]`: below the true vocabulary size and not masked by a bias of -inf."""
    counted_V = torch.arange(columns, device=like.device) < call.vocab.counted
    if bias_V is not None and call.softcap is None:
        counted_V &= bias_V > -torch.inf
    return counted_V.to(like.dtype)

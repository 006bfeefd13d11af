"""The passes of the fused linear head over tokens and vocabulary: logits and statistics, tiles of the gradient, dx.

`linear.py` and `linear_steps.py` call them in their own order. No autograd. Legend: see `linear.py`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.distributed.groups import group_rank
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.call import statistics
from megatron_ext.head.call.chunk_sizes import block_room, cached_columns, product_chunks
from megatron_ext.head.call.logit_gradient import GradientParts
from megatron_ext.head.call.matmul import Operand, SideBySide, weighed_sum
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.row_passes import engine_order
from megatron_ext.head.row_passes.dispatch import RowPasses, passes_of
from megatron_ext.numerics import fixed_order, matrices
from megatron_ext.numerics.matrices import accumulation_dtype, part_of, parts_of
from megatron_ext.numerics.tree_sums import sum_of_ranks


class LeafWeight(NamedTuple):
    """The columns of a leaf: with "fast" bits and with "batch" all of this rank's, see `call/leaves.py`.

    Attributes:
        rows: of the rank's own weight.
        w_VD: the weight as products take it, in the hidden states' dtype, with rows of zeros where the vocabulary ends
            before the leaf does.
        bias_V: in the dtype of the passes.
        target_T: the column of each label in the leaf, -1 where it has none.
        vocab: which columns they are.
    """

    rows: slice
    w_VD: Operand
    bias_V: Tensor | None
    target_T: Tensor
    vocab: VocabShard


class FirstPass(NamedTuple):
    """First pass over a batch of tokens: what a rank has from the logits of a leaf alone.

    Attributes:
        stats_KT: the leaf's statistics, with a place more in each row for the exchange.
        exp_TV: exponentials (or logits) that are kept, `[T, 0]` if no gradient is wanted.
        shift_T: what they are relative to.
    """

    stats_KT: Tensor
    exp_TV: Tensor
    shift_T: Tensor


def statistics_pass(
    hidden_TD: Tensor,
    w_VD: Operand,
    leaves: Sequence[LeafWeight],
    plan: Plan,
    passes: RowPasses,
    sizes: list[int] | None,
    keep: bool,
) -> list[FirstPass]:
    """Logits of each leaf of the weight `w`, their statistics, and what is kept of them. `sizes`, `keep`, and what is
    communicated: see `LinearHead`, which has the exchange of statistics besides."""
    call, tokens, columns, dtype = plan.call, plan.tokens, leaves[0].w_VD.shape[0], accumulation_dtype(hidden_TD.dtype)
    arithmetic, on_gpu = plan.arithmetic, hidden_TD.is_cuda
    later, cached = kept_columns(w_VD, hidden_TD, plan, keep)
    fixed = call.bits != "fast"
    if fixed:
        cached = _kept_of_leaf(cached / max(w_VD.shape[0], 1), columns, plan, hidden_TD)
    as_logits = bool(cached) and (fixed or call.softcap is not None) and keeps_logits(call, hidden_TD)
    kept = matrices.logit_dtype(hidden_TD, call.rounds) if fixed and as_logits else None  # else the hidden states'
    # Logits turn into what is kept of them.
    in_place = cached == columns and not (on_gpu and matrices.widens(hidden_TD, call.rounds))
    # A kernel that also stores exponentials has other threads for its columns, which add in another order then.
    apart = bool(cached) and not as_logits and on_gpu and fixed
    found = []
    for _ in leaves:
        stats_KT = statistics.new_statistics(tokens, plan.shared_rows, call, dtype, hidden_TD.device)
        exp_TV = matrices.new_matrix(hidden_TD, tokens, cached, kept) if cached else hidden_TD.new_empty(tokens, 0)
        found.append(FirstPass(stats_KT, exp_TV, stats_KT.new_empty(tokens)))

    def run(x_TD: Tensor, span: slice) -> None:
        for rows in product_chunks(span, call.chunk_tokens, columns, hidden_TD, later, in_place):
            x_tD = x_TD
            if rows.stop - rows.start != x_TD.shape[0]:
                x_tD = x_TD[rows.start - span.start : rows.stop - span.start]
            for leaf, (stats_KT, kept_tV, shift_t) in zip(leaves, found, strict=True):
                target_t = leaf.target_T
                if rows.stop - rows.start != tokens:
                    kept_tV, target_t, shift_t = kept_tV[rows], target_t[rows], shift_t[rows]
                z_tV = arithmetic.logits(x_tD, leaf.w_VD, kept_tV if in_place else None, call.rounds)
                if as_logits and not in_place:
                    kept_tV.copy_(z_tV[:, :cached])
                passes.row_statistics(
                    z_tV,
                    target_t,
                    stats_KT[:, rows],
                    exp_TV=kept_tV if cached and not (as_logits or apart) else None,
                    shift_T=shift_t,
                    bias_V=leaf.bias_V,
                    labelled=plan.labelled and len(leaves) == 1,
                    **call.sums(leaf.vocab.counted),
                )
                if apart:
                    _keep_apart(z_tV[:, :cached], target_t, shift_t, kept_tV, leaf, call)
                if fixed and engine_order.applies(call, hidden_TD):
                    engine_order.write_sums(z_tV, stats_KT[:, rows], leaf.bias_V, leaf.vocab.counted, call)
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
    return found


def _keep_apart(
    z_tV: Tensor, target_t: Tensor, shift_t: Tensor, out_tV: Tensor, leaf: LeafWeight, call: ResolvedHead
) -> None:
    """Write the exponentials of a leaf's first columns by a pass of their own."""
    width = out_tV.shape[1]
    passes_of(z_tV).row_gradient(
        z_tV,
        target_t,
        shift_t,
        out_tV,
        bias_V=None if leaf.bias_V is None else leaf.bias_V[:width],
        counted=min(leaf.vocab.counted, width),
        softcap=call.softcap,
        temperature=call.temperature,
    )


def keeps_logits(call: ResolvedHead, x_TD: Tensor) -> bool:
    """Return whether forward keeps the logits instead of their exponentials.

    Backward needs the softcap's slope, `1 - tanh^2`, and where that is small it cannot be computed from rounded
    exponentials. The exception is a softcap of 16 or more with 16-bit operands on CUDA: there fp32 logits would be
    rounded to 16 bits, and such large logits lose more of the probabilities by that than the slope gains. With fixed
    bits logits are kept, unrounded, for an entropy too: those of exponentials are not the bits of logits made again.
    """
    if call.bits != "fast":
        return call.softcap is not None or call.expected
    return call.softcap is not None and (not matrices.widens(x_TD, call.rounds) or call.softcap < 16)


def _kept_of_leaf(share: float, columns: int, plan: Plan, x_TD: Tensor) -> int:
    """Return for how many of a leaf's columns something is kept, of the `share` of all that memory is for."""
    if keeps_logits(plan.call, x_TD):
        share *= x_TD.element_size() / matrices.logit_dtype(x_TD, plan.call.rounds).itemsize
    multiple = fixed_order.multiple(x_TD)
    return columns if share >= 1 else int(columns * share) // multiple * multiple


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


def gradient_tile(
    tokens: slice, block: slice, x_TD: Tensor, leaf: LeafWeight, exp_TV: Tensor, grad: GradientParts, plan: Plan
) -> Tensor:
    """A tile of a leaf's gradient matrix: from what is kept of its logits, or from logits that are computed again."""
    call = plan.call
    kept, width = block.stop <= exp_TV.shape[1], block.stop - block.start
    target_T = leaf.target_T - block.start
    bias_V = None if leaf.bias_V is None else leaf.bias_V[block]
    g_TV = matrices.new_matrix(x_TD, tokens.stop - tokens.start, width)
    inside = grad.inside or (None, None, None)
    room = block_room(target_T.shape[0], leaf.w_VD.shape[0], x_TD)
    for rows in [tokens] if kept else product_chunks(tokens, None, width, x_TD, room):
        out_TV = g_TV[rows.start - tokens.start : rows.stop - tokens.start]
        if kept:
            source_TV = exp_TV[rows, block]
        else:
            source_TV = plan.arithmetic.logits(x_TD[rows], leaf.w_VD[block], out_TV, call.rounds)
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
            counted=min(max(leaf.vocab.counted - block.start, 0), width),
            softcap=call.softcap,
            temperature=call.temperature,
            source_is_exp=kept and not keeps_logits(call, x_TD),
        )
        del source_TV
    return g_TV


def finished_dx(
    rows: slice,
    product_TD: Tensor,
    grad: GradientParts,
    leaf: LeafWeight,
    call: ResolvedHead,
    passes: RowPasses,
    passing: bool,
) -> Tensor:
    """A leaf's part of dx of the tokens `rows`, from their product with W, in its memory if possible: in the weight's
    dtype, with fixed bits in that of the sums.

    `passing`: dx is only on its way to a reduce-scatter, so it may sit in the first half of the product's memory.
    """
    w_VD = leaf.w_VD
    if isinstance(w_VD, SideBySide):
        whole_TD = (
            product_TD if product_TD.dtype == w_VD.dtype else product_TD.new_empty(product_TD.shape, dtype=w_VD.dtype)
        )
        for (part_TD, w_VP), (out_TD, _) in zip(w_VD.across(product_TD), w_VD.across(whole_TD), strict=True):
            done_TD = finished_dx(rows, part_TD, grad, leaf._replace(w_VD=w_VP), call, passes, passing=False)
            if done_TD is not part_TD:
                out_TD.copy_(done_TD)
        return whole_TD
    if product_TD.dtype == w_VD.dtype or call.bits != "fast":
        out_TD = product_TD
    elif passing:  # rows are converted in order: those not read yet lie behind those written
        out_TD = product_TD.view(w_VD.dtype).view(-1)[: product_TD.numel()].view(product_TD.shape)
    else:
        out_TD = w_VD.new_empty(product_TD.shape)
    common_D = None
    if grad.offset is not None:  # every row of W that counts, summed
        common_D = weighed_sum(w_VD, counted_columns(leaf, call, grad.target))
    scale_t, value_t, target_t, offset_t = grad.scale, grad.target, leaf.target_T, grad.offset
    if rows.stop - rows.start != target_t.shape[0]:
        scale_t, value_t, target_t = scale_t[rows], value_t[rows], target_t[rows]
        offset_t = None if offset_t is None else offset_t[rows]
    if (
        call.bits != "fast" and not out_TD.is_cuda
    ):  # not by `addcmul_`, which rounds otherwise in a tensor's last elements
        out_TD.mul_(scale_t.unsqueeze(1)).add_(w_VD[target_t.clamp(min=0)] * value_t.unsqueeze(1))
        if offset_t is not None and common_D is not None:
            out_TD += offset_t.unsqueeze(1) * common_D
        return out_TD
    passes.finish_dx(out_TD, product_TD, scale_t, target_t, value_t, w_VD, offset_t, common_D)
    return out_TD


def counted_columns(leaf: LeafWeight, call: ResolvedHead, like: Tensor) -> Tensor:
    """1 for each column that counts, else 0, `[V]`: below the true vocabulary size and not masked by a bias of -inf."""
    counted_V = torch.arange(leaf.w_VD.shape[0], device=like.device) < leaf.vocab.counted
    if leaf.bias_V is not None and call.softcap is None:
        counted_V &= leaf.bias_V > -torch.inf
    return counted_V.to(like.dtype)


def start_sum_of_ranks(dx_TD: Tensor, like: Tensor, head: ResolvedHead, sizes: list[int] | None) -> Pending:
    """Begin to add up every rank's dx, in its memory where it can be; with fixed bits in the dtype of `like`.

    Communicates: 1 all-reduce, with `sizes`, of which each rank keeps its own tokens, 1 reduce-scatter; with fixed bits
    `sum_of_ranks`.
    """
    tokens, group = dx_TD.shape[0], head.group
    if head.bits != "fast":
        return Pending(sum_of_ranks(dx_TD, like, group, sizes))
    if sizes is not None and tokens:
        return collectives.start_reduce_scatter(dx_TD, group, sizes=sizes)
    return collectives.start_all_reduce(dx_TD, group if tokens else None, in_place=True)

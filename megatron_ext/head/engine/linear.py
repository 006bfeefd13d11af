"""The fused linear head: read-outs of the softmax from hidden states and a vocabulary-sharded weight, no logits kept.

Row scaling commutes with matmuls, so E = exp(z - m), kept from forward or recomputed, serves any per-token gradient g:

    dx = (g alpha) * (E @ W) + target terms        dW = E.T @ ((g alpha) * x) + target terms

with alpha = exp(m - lse). E is 0 at each token's label, and the target terms (the label's row of W for dx, x in the
label's row for dW) are added exactly, from the statistics. docs/head.md derives it.

With fixed bits m is the maximum of a leaf of the vocabulary (`leaves_of`), which no rank's shard changes, and
statistics and dx are taken leaf by leaf and added in the order of a tree. `Arithmetic` has the products.

Legend: T tokens (after any gather), D hidden size, V columns of this rank's vocabulary shard or of a leaf. m: the
shard's row maximum. G_TV: the gradient matrix, E itself unless entropy or softcap bend it.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.autograd import differentiable_once, save_groups, saved_groups, without_autocast
from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.distributed.groups import group_rank
from megatron_ext.head.call import statistics
from megatron_ext.head.call.chunk_sizes import (
    block_room,
    keeps_all,
    keeps_logits,
    kept_columns,
    kept_of_leaf,
    product_chunks,
    tiles,
)
from megatron_ext.head.call.logit_gradient import GradientParts, basis_of
from megatron_ext.head.call.matmul import Operand, SideBySide, in_one, operand, weighed_sum
from megatron_ext.head.call.resolved_head import Leaf, leaves_of
from megatron_ext.head.call.statistics import Statistics
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.row_passes.passes import PYTORCH, engine_combined, in_engine_order, write_engine_sums
from megatron_ext.numerics import fixed_order, tensors
from megatron_ext.numerics.tensors import accumulation_dtype, part_of, parts_of, widens
from megatron_ext.numerics.tree_sums import TreeSum, start_sum_of_ranks

# Elements of a piece of the scaled hidden states on CPU. On CUDA they are one: their product with G has as many tiles
# as it can, in memory that dx's fp32 product has left or, while that is there, dW does not need in 16 bits.
_SCALED = 1 << 25


class LinearHead(torch.autograd.Function):
    """The results of `plan`'s read-outs, one after the other: of hidden states `[T, D]`, weight, bias and low rank, for
    read-outs of the softmax alone.

    `sizes`: with the sequence layout, where hidden states are this rank's slice, the number of each rank's tokens; else
    None. `keep`: a backward may follow. The low rank lies beside the weight, and the last columns of the hidden states
    are its own.

    Communicates, at several ranks: forward one all-gather of statistics, backward one all-reduce of dx, with fixed bits
    `sum_of_ranks`. With the sequence layout each also gathers the hidden states, and dx is reduce-scattered.
    """

    @staticmethod
    def forward(
        ctx: Any,
        plan: Plan,
        sizes: list[int] | None,
        keep: bool,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        low_VR: Tensor | None,
    ) -> tuple[Tensor, ...]:
        with without_autocast(hidden_TD):
            x_TD = fixed_order.aligned(hidden_TD) if plan.fixed else hidden_TD
            w_VD, leaves = leaf_weights(weight_VD, low_VR, bias_V, plan, x_TD)
            own_KT, exps, shifts = statistics_pass(x_TD, w_VD, leaves, plan, sizes, keep)
            del leaves  # copies of the weight's rows, where there are several
            stats_RKT = plan.exchange(own_KT)
            if plan.fixed:
                stats = engine_combined(stats_RKT, own_KT, shifts[0], plan.call, x_TD)
            else:
                stats = plan.passes.combined(stats_RKT, own_KT, shifts[0], plan.call)
            results, saved = plan.results(stats, stats_RKT, own_KT)
        ctx.plan, ctx.sizes = plan, sizes
        ctx.parameter = weight_VD if plan.call.fuse_main_grad else None
        given_TD = hidden_TD if plan.held is None else hidden_TD.to(plan.held)  # widened from it
        save_groups(ctx, (given_TD, weight_VD, bias_V, low_VR), stats, exps, shifts[1:], *saved)
        return plan.give(ctx, results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (hidden_TD, weight_VD, bias_V, low_VR), fields, exps, shifts, *saved = saved_groups(ctx)
        stats = Statistics(*fields)
        if ctx.plan.held is not None:
            hidden_TD = hidden_TD.to(torch.float32)
        with without_autocast(hidden_TD):
            basis = basis_of(ctx.plan.readouts, stats, saved, [*map((*grads, None).__getitem__, ctx.firsts)])
            if ctx.plan.fixed:
                hidden_TD = fixed_order.aligned(hidden_TD)
            of_head = hidden_TD, weight_VD, bias_V, low_VR
            return None, None, None, *_gradients(ctx, of_head, exps, [stats.shift, *shifts], stats, basis)


def leaf_weights(
    weight_VD: Tensor, low_VR: Tensor | None, bias_V: Tensor | None, plan: Plan, x_TD: Tensor
) -> tuple[Operand, list[Leaf]]:
    """The weight with the low rank beside it, and its leaves in order; `x_TD`: hidden states, whose dtype they take."""
    call, w_VD = plan.call, operand(weight_VD, low_VR)
    whole_VD = w_VD if low_VR is None and w_VD.dtype == x_TD.dtype else w_VD.to(x_TD.dtype)
    bias_V = None if bias_V is None else bias_V.to(accumulation_dtype(x_TD.dtype))
    if not plan.fixed:
        return w_VD, [Leaf(slice(0, w_VD.shape[0]), call.vocab, whole_VD, bias_V, plan.target_T)]
    found, whole_VD = [], in_one(whole_VD)
    for leaf in leaves_of(call):
        of_bias, target_T = None if bias_V is None else leaf.cut(bias_V), leaf.columns(plan.target_T)
        found.append(Leaf(leaf.rows, leaf.vocab, leaf.cut(whole_VD), of_bias, target_T))
    return w_VD, found


def _gradients(
    ctx: Any, of_head: Any, exps: Sequence[Tensor], shifts: Sequence[Tensor], stats: Statistics, basis: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, weight, bias and low rank, of the read-outs' gradient `basis`."""
    hidden_TD, weight_VD, bias_V, low_VR = of_head
    need_dx, need_dw, need_db, need_dlow = ctx.needs_input_grad[3:]
    plan, sizes, head = ctx.plan, ctx.sizes, ctx.plan.call
    w_VD, leaves = leaf_weights(weight_VD, low_VR, bias_V, plan, hidden_TD)
    tokens, passes, arithmetic = plan.tokens, plan.passes, plan.arithmetic
    fused_VD = main_grad.buffer_of(ctx.parameter) if ctx.parameter is not None and need_dw else None
    in_slices, need_dweights = sizes is not None and tokens > 0, need_dw or need_dlow
    several, fixed, columns = len(leaves) > 1, plan.fixed, leaves[0].w_VD.shape[0]
    of_logits, gathered = fixed and keeps_logits(plan.call, hidden_TD), None
    wider = of_logits and widens(hidden_TD, head.rounds)  # than exponentials: of fewer columns they are kept
    if in_slices and (need_dweights or wider or not keeps_all(head, tokens, hidden_TD)):  # alike on all ranks
        gathered = collectives.start_all_gather(hidden_TD, head.group, sizes=sizes)
    grads = []
    for leaf, shift_T in zip(leaves, shifts, strict=True):
        own = stats._replace(shift=shift_T) if several else stats
        labelled = plan.labelled and not several
        grads.append(passes.token_gradient(own, plan.kept_T, leaf.target_T, basis, head, labelled))
    db_V: Any = grads[0].target.new_zeros(weight_VD.shape[0]) if need_db else None
    dw_VD = dlow_VR = None
    dx_TD: Any = None
    sum_TD: Pending | None = None
    as_kept = grads[0].inside is None and not of_logits
    cached, all_at_once = exps[0].shape[1], need_dweights or (need_db and fixed)
    multiple = fixed_order.multiple(hidden_TD) if fixed else 1
    parts = tiles(hidden_TD, tokens, columns, cached, as_kept, all_at_once, head, multiple)
    for rows, blocks in parts:
        tree = TreeSum() if several else None
        for leaf, exp_TV, grad in zip(leaves, exps, grads, strict=True):
            product_TD = None
            sides: list[WeightGradient] = []
            for block in blocks:
                if as_kept and block.stop <= cached:  # E is G
                    g_TV = exp_TV if rows.stop - rows.start == tokens else exp_TV[rows]
                    g_TV = g_TV if block == slice(0, cached) else g_TV[:, block]
                else:
                    x_TD = hidden_TD if gathered is None else gathered.wait()
                    g_TV = gradient_tile(rows, block, x_TD, leaf, exp_TV, grad, plan)
                if need_dx:
                    of_block = leaf.w_VD if block == slice(0, columns) else leaf.w_VD[block]
                    product_TD = arithmetic.add_product(product_TD, g_TV, of_block)
                    if block.stop == columns:
                        for side in sides:
                            side.release()
                        done_TD = finished_dx(rows, product_TD, grad, leaf, plan, in_slices)
                        product_TD = None
                        if tree is not None:
                            tree.add(done_TD)
                        if leaf is leaves[-1]:
                            done_TD = done_TD if tree is None else tree.total()
                            if dx_TD is None:
                                dx_TD = done_TD if rows.stop == tokens else done_TD.new_empty(tokens, done_TD.shape[1])
                            if dx_TD is not done_TD:
                                dx_TD[rows] = done_TD
                            if rows.stop == tokens and (plan.ranks > 1 or fixed):
                                sum_TD = start_sum_of_ranks(dx_TD, hidden_TD, head.group, sizes, fixed)
                if need_dweights:
                    if not sides:
                        if need_dw and dw_VD is None:
                            dw_VD = torch.empty_like(weight_VD) if fused_VD is None else fused_VD
                        if need_dlow and dlow_VR is None:
                            dlow_VR = torch.empty_like(low_VR)
                        outs, adds = [dw_VD, dlow_VR], [fused_VD is not None, False]
                        x_TD = hidden_TD if gathered is None else gathered.wait()
                        sides = weight_gradients(w_VD, outs, x_TD, leaf, grad, plan, adds)
                    for side in sides:
                        side.add(block, g_TV)
                if need_db:
                    own_V = db_V[leaf.rows][block]
                    own_V += arithmetic.column_sums(g_TV, grad.scale[rows])[: len(own_V)]
                del g_TV  # before the next one is made
            for side in sides:
                side.finish()
    if several:  # behind the vocabulary's end
        for out_VD in (None if fused_VD is not None else dw_VD, dlow_VR):
            if out_VD is not None:
                out_VD[leaves[-1].rows.stop :] = 0
    if need_db:
        ones_T1 = db_V.new_ones(tokens, 1)
        for leaf, grad in zip(leaves, grads, strict=True):
            if leaf.rows.stop > leaf.rows.start:
                WeightGradient(db_V[leaf.rows].unsqueeze(1), ones_T1, leaf, grad, plan, accumulate=True).add_exact()
        db_V = db_V.to(bias_V.dtype)
    if fused_VD is not None:
        dw_VD = main_grad.finish(ctx.parameter, weight_VD.dtype)
    return dx_TD if sum_TD is None else sum_TD.wait(), dw_VD, db_V, dlow_VR


def statistics_pass(
    hidden_TD: Tensor,
    w_VD: Operand,
    leaves: Sequence[Leaf],
    plan: Plan,
    sizes: list[int] | None,
    keep: bool,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Compute the part of forward that needs this rank's logits alone.

    Returns:
        The statistics of this rank's columns, with one more place in each row for the exchange; for each leaf of the
        weight `w` the exponentials (or logits) that are kept, `[T, 0]` if no gradient is wanted; and for each leaf the
        maxima `[T]` to which its exponentials are relative.

    `sizes`, `keep`, and what is communicated: see `LinearHead`, which then exchanges the statistics.
    """
    call, tokens, columns = plan.call, plan.tokens, leaves[0].w_VD.shape[0]
    dtype = accumulation_dtype(hidden_TD.dtype)
    arithmetic, on_gpu = plan.arithmetic, hidden_TD.is_cuda
    later, cached = kept_columns(call, tokens, w_VD, hidden_TD, keep)
    fixed = plan.fixed
    if fixed:
        cached = kept_of_leaf(cached / max(w_VD.shape[0], 1), columns, call, hidden_TD)
    as_logits = bool(cached) and (fixed or call.softcap is not None) and keeps_logits(plan.call, hidden_TD)
    kept = tensors.logit_dtype(hidden_TD, call.rounds) if fixed and as_logits else None  # else the hidden states'
    # Logits turn into what is kept of them.
    in_place = cached == columns and not (on_gpu and tensors.widens(hidden_TD, call.rounds))
    # A kernel that also stores exponentials has other threads for its columns, which add in another order then.
    apart = bool(cached) and not as_logits and on_gpu and fixed
    stats, exps, shifts = [], [], []
    for _ in leaves:
        stats.append(statistics.new_statistics(tokens, plan.shared_rows, plan.ranks, dtype, hidden_TD.device))
        exps.append(tensors.new_matrix(hidden_TD, tokens, cached, kept) if cached else hidden_TD.new_empty(tokens, 0))
        shifts.append(stats[-1].new_empty(tokens))

    def run(x_TD: Tensor, span: slice) -> None:
        if call.fused_epilogue:
            leaf, stats_KT, exp_TV, shift_T = leaves[0], stats[0], exps[0], shifts[0]
            plan.passes.product_statistics(
                x_TD,
                leaf.w_VD,
                part_of(leaf.target_T, span),
                stats_KT[:, span],
                part_of(shift_T, span),
                part_of(exp_TV, span) if cached else None,
                leaf.bias_V,
                counted=leaf.vocab.counted,
                temperature=call.temperature,
                with_entropy=call.expected,
                with_hits=call.hits,
                sm_margin=call.sm_margin,
            )
            return
        for rows in product_chunks(span, call.chunk_tokens, columns, hidden_TD, later, in_place):
            x_tD = x_TD
            if rows.stop - rows.start != x_TD.shape[0]:
                x_tD = x_TD[rows.start - span.start : rows.stop - span.start]
            for leaf, stats_KT, kept_tV, shift_t in zip(leaves, stats, exps, shifts, strict=True):
                target_t = leaf.target_T
                if rows.stop - rows.start != tokens:
                    kept_tV, target_t, shift_t = kept_tV[rows], target_t[rows], shift_t[rows]
                z_tV = arithmetic.logits(x_tD, leaf.w_VD, kept_tV if in_place else None, call.rounds)
                if as_logits and not in_place:
                    kept_tV.copy_(z_tV[:, :cached])
                plan.passes.row_statistics(
                    z_tV,
                    target_t,
                    stats_KT[:, rows],
                    exp_TV=kept_tV if cached and not (as_logits or apart) else None,
                    shift_T=shift_t,
                    bias_V=leaf.bias_V,
                    labelled=plan.labelled and len(leaves) == 1,
                    counted=leaf.vocab.counted,
                    **plan.sums,
                )
                if apart:  # by a pass of their own
                    plan.passes.row_gradient(
                        z_tV[:, :cached],
                        target_t,
                        shift_t,
                        kept_tV,
                        bias_V=None if leaf.bias_V is None else leaf.bias_V[:cached],
                        counted=min(leaf.vocab.counted, cached),
                        softcap=call.softcap,
                        temperature=call.temperature,
                    )
                if fixed and in_engine_order(call, hidden_TD):
                    write_engine_sums(z_tV, stats_KT[:, rows], leaf.bias_V, leaf.vocab.counted, call)
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
    if len(leaves) == 1:
        return stats[0], exps, shifts
    own_KT = statistics.new_statistics(tokens, plan.shared_rows, plan.ranks, dtype, hidden_TD.device)
    stats_NKT = torch.stack([each_KT[:, :-1] for each_KT in stats])
    joined_KT = statistics.joined(stats_NKT, call)
    own_KT[: len(joined_KT), :-1] = joined_KT
    if call.softcap is not None:  # its slope at the label is one leaf's
        own_KT[len(joined_KT), :-1] = stats_NKT[:, len(joined_KT)].amax(0)
    return own_KT, exps, shifts


def gradient_tile(
    tokens: slice, block: slice, x_TD: Tensor, leaf: Leaf, exp_TV: Tensor, grad: GradientParts, plan: Plan
) -> Tensor:
    """A tile of a leaf's gradient matrix: from what is kept of its logits, or from logits that are computed again."""
    call = plan.call
    kept, width = block.stop <= exp_TV.shape[1], block.stop - block.start
    target_T = leaf.target_T - block.start
    bias_V = None if leaf.bias_V is None else leaf.bias_V[block]
    g_TV = tensors.new_matrix(x_TD, tokens.stop - tokens.start, width)
    inside = grad.inside or (None, None, None)
    if call.fused_epilogue and not kept:
        scale_T, slope_T = parts_of(tokens, *inside[:2])
        plan.passes.product_gradient(
            part_of(x_TD, tokens),
            leaf.w_VD[block],
            part_of(target_T, tokens),
            part_of(grad.shift, tokens),
            g_TV,
            scale_T=scale_T,
            slope_T=slope_T,
            bias_V=bias_V,
            counted=min(max(leaf.vocab.counted - block.start, 0), width),
            temperature=call.temperature,
            sm_margin=call.sm_margin,
        )
        return g_TV
    room = block_room(target_T.shape[0], leaf.w_VD.shape[0], x_TD)
    for rows in [tokens] if kept else product_chunks(tokens, None, width, x_TD, room):
        out_TV = g_TV[rows.start - tokens.start : rows.stop - tokens.start]
        if kept:
            source_TV = exp_TV[rows, block]
        else:
            source_TV = plan.arithmetic.logits(x_TD[rows], leaf.w_VD[block], out_TV, call.rounds)
        scale_t, slope_t, offset_t = parts_of(rows, *inside)
        plan.passes.row_gradient(
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
            source_is_exp=kept and not keeps_logits(plan.call, x_TD),
        )
        del source_TV
    return g_TV


def finished_dx(
    rows: slice,
    product_TD: Tensor,
    grad: GradientParts,
    leaf: Leaf,
    plan: Plan,
    passing: bool,
    given_TD: Tensor | None = None,
) -> Tensor:
    """A leaf's part of dx of the tokens `rows`, from their product with W, in its memory if possible: in the weight's
    dtype, with fixed bits in that of the sums.

    `passing`: dx is only on its way to a reduce-scatter, so it may sit in the first half of the product's memory.
    `given`: where it is written instead.
    """
    w_VD = leaf.w_VD
    if isinstance(w_VD, SideBySide):
        whole_TD = given_TD
        if whole_TD is None:
            alike = product_TD.dtype == w_VD.dtype
            whole_TD = product_TD if alike else product_TD.new_empty(product_TD.shape, dtype=w_VD.dtype)
        for (part_TD, w_VP), (out_TD, _) in zip(w_VD.across(product_TD), w_VD.across(whole_TD), strict=True):
            place_TD = None if given_TD is None else out_TD
            done_TD = finished_dx(rows, part_TD, grad, leaf._replace(w_VD=w_VP), plan, False, place_TD)
            if place_TD is None and whole_TD is not product_TD:
                out_TD.copy_(done_TD)
        return whole_TD
    if given_TD is not None:
        out_TD = given_TD
    elif product_TD.dtype == w_VD.dtype or plan.fixed:
        out_TD = product_TD
    elif passing:  # rows are converted in order: those not read yet lie behind those written
        out_TD = product_TD.view(w_VD.dtype).view(-1)[: product_TD.numel()].view(product_TD.shape)
    else:
        out_TD = w_VD.new_empty(product_TD.shape)
    common_D = None
    if grad.offset is not None:  # every row of W that counts, summed
        common_D = weighed_sum(w_VD, leaf.counted_columns(plan.call.softcap, grad.target))
    scale_t, value_t, target_t, offset_t = grad.scale, grad.target, leaf.target_T, grad.offset
    if rows.stop - rows.start != target_t.shape[0]:
        scale_t, value_t, target_t = scale_t[rows], value_t[rows], target_t[rows]
        offset_t = None if offset_t is None else offset_t[rows]
    if plan.fixed and not out_TD.is_cuda:  # not by `addcmul_`, which rounds otherwise in a tensor's last elements
        out_TD.mul_(scale_t.unsqueeze(1)).add_(w_VD[target_t.clamp(min=0)] * value_t.unsqueeze(1))
        if offset_t is not None and common_D is not None:
            out_TD += offset_t.unsqueeze(1) * common_D
        return out_TD
    plan.passes.finish_dx(out_TD, product_TD, scale_t, target_t, value_t, w_VD, offset_t, common_D)
    return out_TD


class WeightGradient:
    """Fills `out_VD` (`accumulate`: adds to it, a main_grad) block by block of a leaf's rows; `finish` once all are
    there. `x`: hidden states, of which each row of `out` has a factor."""

    def __init__(self, out_VD: Tensor, x_TD: Tensor, leaf: Leaf, grad: GradientParts, plan: Plan, accumulate: bool):
        self._out_VD, self._x_TD, self._grad, self._target_T = out_VD, x_TD, grad, leaf.target_T
        self._fixed, self._arithmetic = plan.fixed, plan.arithmetic
        self._labelled = plan.labelled and not self._fixed
        self._counted_V = None
        if grad.offset is not None:
            self._counted_V = leaf.counted_columns(plan.call.softcap, grad.offset)[: out_VD.shape[0]]
            self._offset_D = self._arithmetic.weighed_sum(x_TD, grad.offset)
        self._accumulate = accumulate
        summed = not x_TD.is_cuda and (self._fixed or x_TD.element_size() == 2)
        self._rows = plan.arithmetic.CPU_ROWS if summed else None
        self._passes = plan.passes
        width = x_TD.shape[1]
        step = width if x_TD.is_cuda or self._fixed else max(64, _SCALED // max(x_TD.shape[0], 1))
        self._parts = [slice(at, min(at + step, width)) for at in range(0, width, max(step, 1))]
        self._whole: Tensor | None = None

    def add(self, block: slice, g_TV: Tensor) -> None:
        """The product for the rows of `block`; on a CPU, where it is made in fp32, with their exact terms."""
        stop = min(block.stop, self._out_VD.shape[0])
        if stop <= block.start:  # the vocabulary ends before
            return
        for part in self._parts:
            x_TD = self._scaled(part)
            if self._rows is None:
                out_VD = self._out_VD if stop - block.start == self._out_VD.shape[0] else self._out_VD[block]
                out_VD = out_VD if len(self._parts) == 1 else out_VD[:, part]
                of_rows = g_TV if stop == block.stop else g_TV[:, : out_VD.shape[0]]
                self._arithmetic.write_transposed(out_VD, of_rows, x_TD, self._accumulate)
                continue
            for start in range(block.start, stop, self._rows):
                rows = slice(start, min(start + self._rows, block.stop))
                own = slice(start, min(rows.stop, stop))
                of_rows = g_TV[:, rows.start - block.start : rows.stop - block.start]
                sum_VD = self._arithmetic.transposed(of_rows, x_TD)[: own.stop - start]
                self.add_exact(sum_VD, own, part)
                if self._accumulate:
                    self._out_VD[own, part] += sum_VD
                else:
                    self._out_VD[own, part] = sum_VD
                del sum_VD  # before the next one is made

    def release(self) -> None:
        """Frees what is made again where it is needed: the scaled hidden states."""
        self._whole = None

    def finish(self) -> None:
        """Adds the exact terms where `add` did not."""
        self._whole = None
        if self._rows is None:
            self.add_exact()

    def add_exact(self, out_VD: Tensor | None = None, rows: slice = slice(None), part: slice = slice(None)) -> None:
        """Adds to these rows, or all, the terms that no product has: the labels', and that of every column that
        counts."""
        out_VD = self._out_VD if out_VD is None else out_VD
        row_T, labelled = self._target_T, self._labelled
        if out_VD.shape[0] != self._out_VD.shape[0]:
            inside_T = (row_T >= rows.start) & (row_T < rows.stop)
            row_T, labelled = (row_T - rows.start).where(inside_T, -1), False
        common_D = counted_V = None
        if self._counted_V is not None:
            common_D, counted_V = self._offset_D[part], self._counted_V[rows]
        x_TD = self._x_TD if len(self._parts) == 1 else self._x_TD[:, part]
        passes = PYTORCH if self._fixed and not x_TD.is_cuda else self._passes
        given = out_VD, x_TD, row_T, self._grad.target, common_D, counted_V
        passes.add_label_rows(*given, in_order=self._fixed, labelled=labelled)

    def _scaled(self, part: slice) -> Tensor:
        """`scale * x`, rounded once; on CPU by pieces of D: at large T and D a whole one would be a tensor too many."""
        if self._whole is not None:
            return self._whole
        x_TD = self._x_TD if len(self._parts) == 1 else self._x_TD[:, part]
        out_TD = x_TD.new_empty(x_TD.shape)
        self._passes.scale_rows(out_TD, x_TD, self._grad.scale)
        if len(self._parts) == 1:
            self._whole = out_TD
        return out_TD


def weight_gradients(
    w_VD: Operand,
    outs: Sequence[Tensor | None],
    x_TD: Tensor,
    leaf: Leaf,
    grad: GradientParts,
    plan: Plan,
    accumulate: Sequence[bool],
) -> list[WeightGradient]:
    """Return the gradients of the parts of `w` in a leaf's rows. `outs`: of each part, None where it is not wanted, or
    there is no such part. `accumulate`: of each, whether its gradient is added to what is there."""
    spans = w_VD.columns if isinstance(w_VD, SideBySide) else [slice(0, w_VD.shape[1])]
    found = []
    for out_VD, span, adds in zip(outs, spans, accumulate, strict=False):
        if out_VD is not None and leaf.rows.stop > leaf.rows.start:
            of_leaf = out_VD if leaf.rows.stop - leaf.rows.start == len(out_VD) else out_VD[leaf.rows]
            side_TD = x_TD if len(spans) == 1 else x_TD[:, span]
            found.append(WeightGradient(of_leaf, side_TD, leaf, grad, plan, adds))
    return found

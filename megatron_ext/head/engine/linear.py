"""The fused linear head: read-outs of the softmax from hidden states and a vocabulary-sharded weight, no logits kept.

Row scaling commutes with matmuls, so E = exp(z - m), kept from forward or recomputed, serves any per-token gradient g:

    dx = (g alpha) * (E @ W) + target terms        dW = E.T @ ((g alpha) * x) + target terms

with alpha = exp(m - lse). E is 0 at each token's label, and the target terms (the label's row of W for dx, x in the
label's row for dW) are added exactly, from the statistics. docs/head.md derives it.

With fixed bits m is the maximum of a leaf of the vocabulary (`call/leaves.py`), which no rank's shard changes, and
statistics and dx are taken leaf by leaf and added in the order of a tree. `call/arithmetic.py` has the products.

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
from megatron_ext.head.call import statistics
from megatron_ext.head.call.chunk_sizes import keeps_all, tiles
from megatron_ext.head.call.leaves import leaves_of
from megatron_ext.head.call.matmul import Operand, SideBySide, in_one, operand
from megatron_ext.head.call.statistics import Statistics
from megatron_ext.head.engine import linear_passes
from megatron_ext.head.engine.linear_passes import FirstPass, LeafWeight
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.engine.weight_gradient import WeightGradient, weight_gradients
from megatron_ext.head.row_passes import engine_order
from megatron_ext.head.row_passes.dispatch import passes_of
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.matrices import accumulation_dtype, widens
from megatron_ext.numerics.tree_sums import TreeSum


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
            fixed, passes = plan.call.bits != "fast", passes_of(hidden_TD)
            x_TD = fixed_order.aligned(hidden_TD) if fixed else hidden_TD
            w_VD, leaves = leaf_weights(weight_VD, low_VR, bias_V, plan, x_TD)
            first = linear_passes.statistics_pass(x_TD, w_VD, leaves, plan, passes, sizes, keep)
            del leaves  # copies of the weight's rows, where there are several
            own_KT = first[0].stats_KT if len(first) == 1 else _joined(first, plan)
            stats_RKT = plan.exchange(own_KT)
            if fixed:
                stats = _of_all_shards(stats_RKT, first, plan, x_TD)
            else:
                stats = passes.combined(stats_RKT, own_KT, first[0].shift_T, plan.call)
            results, saved = plan.results(stats, stats_RKT, own_KT)
        ctx.plan, ctx.sizes, ctx.parameter = plan, sizes, weight_VD if plan.call.fuse_main_grad else None
        given_TD = hidden_TD if plan.held is None else hidden_TD.to(plan.held)  # widened from it
        of_leaves: list[Tensor] = []
        for leaf in first:
            of_leaves += leaf.exp_TV, leaf.shift_T
        save_groups(ctx, (given_TD, weight_VD, bias_V, low_VR), stats, of_leaves, *saved)
        return plan.give(ctx, results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        (hidden_TD, weight_VD, bias_V, low_VR), fields, of_leaves, *saved = saved_groups(ctx)
        stats = Statistics(*fields)
        if ctx.plan.held is not None:
            hidden_TD = hidden_TD.to(torch.float32)
        with without_autocast(hidden_TD):
            basis = ctx.plan.basis(stats, saved, [*map((*grads, None).__getitem__, ctx.firsts)])
            if ctx.plan.call.bits != "fast":
                hidden_TD = fixed_order.aligned(hidden_TD)
            of_head = hidden_TD, weight_VD, bias_V, low_VR
            return None, None, None, *_gradients(ctx, of_head, of_leaves[::2], of_leaves[1::2], stats, basis)


def leaf_weights(
    weight_VD: Tensor, low_VR: Tensor | None, bias_V: Tensor | None, plan: Plan, x_TD: Tensor
) -> tuple[Operand, list[LeafWeight]]:
    """The weight with the low rank beside it, and its leaves in order; `x_TD`: hidden states, whose dtype they take."""
    call, w_VD = plan.call, operand(weight_VD, low_VR)
    whole_VD, bias_V = w_VD.to(x_TD.dtype), None if bias_V is None else bias_V.to(accumulation_dtype(x_TD.dtype))
    if call.bits == "fast":
        return w_VD, [LeafWeight(slice(0, w_VD.shape[0]), whole_VD, bias_V, plan.target_T, call.vocab)]
    found, whole_VD = [], in_one(whole_VD)
    for leaf in leaves_of(call):
        of_bias, target_T = None if bias_V is None else leaf.cut(bias_V), leaf.columns(plan.target_T)
        found.append(LeafWeight(leaf.rows, leaf.cut(whole_VD), of_bias, target_T, leaf.vocab))
    return w_VD, found


def _of_all_shards(stats_RKT: Tensor, first: Sequence[FirstPass], plan: Plan, like: Tensor) -> Statistics:
    """The statistics of the whole vocabulary with fixed bits; `first`: those of this rank's leaves."""
    call, (own_KT, _, shift_T) = plan.call, first[0]
    if len(first) > 1 and call.softcap is not None:  # its slope at the label is one leaf's
        own_KT = torch.stack([each.stats_KT for each in first]).amax(0)
    return engine_order.combined(stats_RKT, own_KT, shift_T, call, like)


def _joined(first: Sequence[FirstPass], plan: Plan) -> Tensor:
    """The statistics of several leaves, to be sent as those of one shard."""
    like = first[0].stats_KT
    own_KT = statistics.new_statistics(plan.tokens, plan.shared_rows, plan.call, like.dtype, like.device)
    joined_KT = statistics.joined(torch.stack([each.stats_KT[:, :-1] for each in first]), plan.call)
    own_KT[: len(joined_KT), :-1] = joined_KT
    return own_KT


def _gradients(
    ctx: Any, of_head: Any, exps: Sequence[Tensor], shifts: Sequence[Tensor], stats: Statistics, basis: Any
) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, weight, bias and low rank, of the read-outs' gradient `basis`."""
    hidden_TD, weight_VD, bias_V, low_VR = of_head
    need_dx, need_dw, need_db, need_dlow = ctx.needs_input_grad[3:]
    plan, sizes, head = ctx.plan, ctx.sizes, ctx.plan.call
    w_VD, leaves = leaf_weights(weight_VD, low_VR, bias_V, plan, hidden_TD)
    tokens, passes, arithmetic = plan.tokens, passes_of(hidden_TD), plan.arithmetic
    fused_VD = main_grad.buffer_of(ctx.parameter) if ctx.parameter is not None and need_dw else None
    in_slices, need_dweights = sizes is not None and tokens > 0, need_dw or need_dlow
    several, fixed, columns = len(leaves) > 1, head.bits != "fast", leaves[0].w_VD.shape[0]
    of_logits, gathered = fixed and linear_passes.keeps_logits(head, hidden_TD), None
    wider = of_logits and widens(hidden_TD, head.rounds)  # than exponentials: of fewer columns they are kept
    if in_slices and (need_dweights or wider or not keeps_all(head, tokens, hidden_TD)):  # alike on all ranks
        gathered = collectives.start_all_gather(hidden_TD, head.group, sizes=sizes)
    grads = []
    for leaf, shift_T in zip(leaves, shifts, strict=True):
        own = stats._replace(shift=shift_T) if several else stats
        labelled = plan.labelled and not several
        grads.append(passes.token_gradient(own, plan.kept_T, leaf.target_T, basis, head, labelled))
    db_V: Any = grads[0].target.new_zeros(weight_VD.shape[0]) if need_db else None
    dw_VD = dlow_VR = dx_TD = None
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
                    g_TV = linear_passes.gradient_tile(rows, block, x_TD, leaf, exp_TV, grad, plan)
                if need_dx:
                    of_block = leaf.w_VD if block == slice(0, columns) else leaf.w_VD[block]
                    product_TD = arithmetic.add_product(product_TD, g_TV, of_block)
                    if block.stop == columns:
                        for side in sides:
                            side.release()
                        done_TD = linear_passes.finished_dx(rows, product_TD, grad, leaf, head, passes, in_slices)
                        product_TD = None
                        if tree is not None:
                            tree.add(done_TD)
                        if leaf is leaves[-1]:
                            done_TD = done_TD if tree is None else tree.total()
                            if dx_TD is None:
                                dx_TD = done_TD if rows.stop == tokens else done_TD.new_empty(tokens, done_TD.shape[1])
                            if dx_TD is not done_TD:
                                dx_TD[rows] = done_TD
                            if rows.stop == tokens:
                                sum_TD = linear_passes.start_sum_of_ranks(dx_TD, hidden_TD, head, sizes)
                if need_dweights:
                    if not sides:
                        if need_dw and dw_VD is None:
                            dw_VD = torch.empty_like(weight_VD) if fused_VD is None else fused_VD
                        if need_dlow and dlow_VR is None:
                            dlow_VR = torch.empty_like(low_VR)
                        adds, outs = fused_VD is not None, [dw_VD] if low_VR is None else [dw_VD, dlow_VR]
                        x_TD = hidden_TD if gathered is None else gathered.wait()
                        spans = w_VD.columns if isinstance(w_VD, SideBySide) else [slice(0, w_VD.shape[1])]
                        sides = weight_gradients(outs, spans, x_TD, leaf, grad, plan, adds)
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
            for side in weight_gradients(
                [db_V.unsqueeze(1)], [slice(0, 1)], ones_T1, leaf, grad, plan, accumulate=True
            ):
                side.add_exact()
        db_V = db_V.to(bias_V.dtype)
    if fused_VD is not None:
        dw_VD = main_grad.finish(ctx.parameter, weight_VD.dtype)
    return None if sum_TD is None else sum_TD.wait(), dw_VD, db_V, dlow_VR

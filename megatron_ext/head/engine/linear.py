"""The fused linear head: read-outs of the softmax from hidden states and a vocabulary-sharded weight, no logits kept.

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
from megatron_ext.autograd import differentiable_once, without_autocast
from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.head.call import matmul
from megatron_ext.head.call.chunk_sizes import keeps_all, tiles
from megatron_ext.head.call.matmul import operand
from megatron_ext.head.call.statistics import Statistics
from megatron_ext.head.engine import linear_passes
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.engine.weight_gradient import WeightGradient, weight_gradients
from megatron_ext.head.row_passes.dispatch import passes_of
from megatron_ext.numerics import cpu_products


class LinearHead(torch.autograd.Function):
    """The results of `plan`'s read-outs, one after the other: of hidden states `[T, D]`, weight, bias and low rank, for
    read-outs of the softmax alone.

    `sizes`: with the sequence layout, where hidden states are this rank's slice, the number of each rank's tokens; else
    None. `keep`: a backward may follow. The low rank lies beside the weight, and the last columns of the hidden states
    are its own.

    Communicates, at several ranks: forward one all-gather of statistics, backward one all-reduce of dx. With the
    sequence layout each also gathers the hidden states, and dx is reduce-scattered.
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
            w_VD = operand(weight_VD, low_VR)
            passes = passes_of(hidden_TD)
            first = linear_passes.statistics_pass(hidden_TD, w_VD, bias_V, plan, sizes, keep)
            stats_RKT = plan.exchange(first.stats_KT)
            stats = passes.combined(stats_RKT, first.stats_KT, first.shift_T, plan.call)
            results, saved = plan.results(stats, stats_RKT, first.stats_KT)
        ctx.set_materialize_grads(False)
        ctx.plan, ctx.sizes, ctx.parameter = plan, sizes, weight_VD if plan.call.fuse_main_grad else None
        given_TD = hidden_TD if plan.held is None else hidden_TD.to(plan.held)  # widened from it
        tensors, ctx.saved = [given_TD, weight_VD, bias_V, low_VR, first.exp_TV, *stats], []
        found: list[Tensor] = []
        plain: list[Tensor] = []  # the first result of each read-out may have a gradient
        ctx.firsts = []
        for readout, each, own in zip(plan.readouts, results, saved, strict=True):
            ctx.firsts.append(len(found) if readout.differentiable else None)
            ctx.saved.append(slice(len(tensors), len(tensors) + len(own)))
            tensors += own
            found += each
            plain += each[1:] if readout.differentiable else each
        ctx.save_for_backward(*tensors)
        ctx.mark_non_differentiable(*plain)
        return tuple(found)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # asked for once: recomputation hands out each tensor once
        hidden_TD, weight_VD, bias_V, low_VR, exp_TV, *statistics = tensors[: 5 + len(Statistics._fields)]
        saved = [list(tensors[span]) for span in ctx.saved]
        firsts = [None if at is None else grads[at] for at in ctx.firsts]
        if ctx.plan.held is not None:
            hidden_TD = hidden_TD.to(torch.float32)
        with without_autocast(hidden_TD):
            basis = ctx.plan.basis(Statistics(*statistics), saved, firsts)
            of_head = hidden_TD, weight_VD, bias_V, low_VR
            return None, None, None, *_gradients(ctx, of_head, exp_TV, Statistics(*statistics), basis)


def _gradients(ctx: Any, of_head: Any, exp_TV: Tensor, stats: Statistics, basis: Any) -> tuple[Tensor | None, ...]:
    """Return the gradients of hidden states, weight, bias and low rank, of the read-outs' gradient `basis`."""
    hidden_TD, weight_VD, bias_V, low_VR = of_head
    need_dx, need_dw, need_db, need_dlow = ctx.needs_input_grad[3:]
    plan, sizes, head, target_T = ctx.plan, ctx.sizes, ctx.plan.call, ctx.plan.target_T
    tokens, columns, passes = plan.tokens, weight_VD.shape[0], passes_of(target_T)
    fused_VD = main_grad.buffer_of(ctx.parameter) if ctx.parameter is not None and need_dw else None
    in_slices, need_dweights = sizes is not None and tokens > 0, need_dw or need_dlow
    gathered = None
    if in_slices and (need_dweights or not keeps_all(head, tokens, hidden_TD)):  # alike on all ranks
        gathered = collectives.start_all_gather(hidden_TD, head.group, sizes=sizes)

    def all_TD() -> Tensor:
        return hidden_TD if gathered is None else gathered.wait()

    grad = passes.token_gradient(stats, plan.kept_T, target_T, basis, head, plan.labelled)
    w_VD: Any = operand(weight_VD, low_VR).to(hidden_TD.dtype)
    db_V: Any = grad.target.new_zeros(columns) if need_db else None
    dw_VD = dlow_VR = product_TD = dx_TD = None
    sum_TD: Pending | None = None
    sides: list[WeightGradient] = []
    cached, as_kept = exp_TV.shape[1], grad.inside is None
    for tile in tiles(hidden_TD, tokens, columns, cached, as_kept, need_dweights, head.chunk_tokens):
        rows, block = tile
        if as_kept and block.stop <= cached:  # E is G
            g_TV = exp_TV if rows.stop - rows.start == tokens else exp_TV[rows]
            g_TV = g_TV if block == slice(0, cached) else g_TV[:, block]
        else:
            g_TV = linear_passes.gradient_tile(tile, all_TD(), w_VD, bias_V, exp_TV, grad, plan)
        if need_dx:
            product_TD = matmul.add_product(product_TD, g_TV, w_VD if block == slice(0, columns) else w_VD[block])
            if block.stop == columns:
                for side in sides:
                    side.release()
                done_TD = linear_passes.finished_dx(rows, product_TD, grad, w_VD, bias_V, plan, in_slices)
                product_TD = None
                if dx_TD is None:
                    dx_TD = done_TD if rows.stop == tokens else done_TD.new_empty(tokens, done_TD.shape[1])
                if dx_TD is not done_TD:
                    dx_TD[rows] = done_TD
                if rows.stop == tokens and in_slices:
                    sum_TD = collectives.start_reduce_scatter(dx_TD, head.group, sizes=sizes)
                elif rows.stop == tokens:
                    sum_TD = collectives.start_all_reduce(dx_TD, head.group if tokens else None, in_place=True)
        if need_dweights:
            if not sides:
                if need_dw:
                    dw_VD = torch.empty_like(weight_VD) if fused_VD is None else fused_VD
                if need_dlow:
                    dlow_VR = torch.empty_like(low_VR)
                outs, adds = (dw_VD, dlow_VR), fused_VD is not None
                sides = weight_gradients(w_VD, outs, all_TD(), bias_V, grad, plan, adds)
            for side in sides:
                side.add(block, g_TV)
        if need_db:
            db_V[block] += cpu_products.mm(g_TV.t(), grad.scale[rows].to(g_TV.dtype).unsqueeze(1)).squeeze(1)
        del g_TV  # before the next one is made
    for side in sides:
        side.finish()
    if need_db:
        common = counted_V = None
        if grad.offset is not None:
            common, counted_V = grad.offset.sum(0, True), linear_passes.counted(bias_V, columns, head, db_V)
        ones_T1 = db_V.new_ones(tokens, 1)
        passes.add_label_rows(db_V.unsqueeze(1), ones_T1, target_T, grad.target, common, counted_V)
        db_V = db_V.to(bias_V.dtype)
    if fused_VD is not None:
        dw_VD = main_grad.finish(ctx.parameter, weight_VD.dtype)
    return None if sum_TD is None else sum_TD.wait(), dw_VD, db_V, dlow_VR

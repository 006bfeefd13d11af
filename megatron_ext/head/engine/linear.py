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

from megatron_ext import cpu_products, main_grad
from megatron_ext.distributed import collectives
from megatron_ext.head.engine import linear_steps
from megatron_ext.head.engine.autograd import (
    differentiable_once,
    first_of_each,
    give,
    keep_for_backward,
    kept_from_forward,
)
from megatron_ext.head.engine.chunk_sizes import keeps_all, tiles
from megatron_ext.head.engine.linear_passes import counted, finished_dx, gradient_tile
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.engine.weight_gradient import WeightGradient
from megatron_ext.head.row_passes import matmul
from megatron_ext.head.row_passes.dispatch import add_label_rows, token_gradient
from megatron_ext.head.row_passes.logit_passes import part_of


class FusedHead(torch.autograd.Function):
    """The results of `plan`'s read-outs of hidden states `[T, D]`, one after the other.

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
        plan: Plan,
        sizes: list[int] | None,
        keep: bool,
    ):
        with torch.autocast(hidden_TD.device.type, enabled=False):
            first = linear_steps.first_pass(hidden_TD, weight_VD, bias_V, plan, sizes, keep)
            stats_RKT = plan.exchange(first.stats_KT)
            stats, results, saved = linear_steps.read_out(first, stats_RKT, plan, checked=True)
        ctx.sizes = sizes
        # Hooks on saved tensors (offloading, recomputation) hand back another object, without its attributes.
        ctx.parameter = weight_VD if plan.call.fuse_main_grad else None
        keep_for_backward(ctx, plan, (hidden_TD, weight_VD, bias_V, first.exp_TV), stats, saved)
        return give(ctx, plan, results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None):
        inputs, stats, saved = kept_from_forward(ctx)
        with torch.autocast(inputs[0].device.type, enabled=False):
            basis = ctx.plan.basis(stats, saved, first_of_each(ctx, grads))
            dx_TD, dw_VD, db_V = _backward(ctx, inputs, stats, basis)
        return dx_TD, dw_VD, db_V, None, None, None


def _backward(ctx, inputs, stats, basis):
    plan, sizes = ctx.plan, ctx.sizes
    call, target_T = plan.call, plan.target_T
    hidden_TD, weight_VD, bias_V, exp_TV = inputs
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    tokens, columns = target_T.shape[0], weight_VD.shape[0]
    in_slices = sizes is not None and tokens > 0
    if in_slices and (need_dw or not keeps_all(call, tokens, hidden_TD)):  # alike on all ranks
        gathered = collectives.start_all_gather(hidden_TD, call.group, sizes=sizes)
    else:
        gathered = collectives.Pending(hidden_TD)

    grad = token_gradient(stats, plan.kept_T, target_T, basis, call)
    w_VD = weight_VD.to(hidden_TD.dtype)
    fused = main_grad.buffer_of(ctx.parameter) if need_dw and call.fuse_main_grad else None
    dw_VD: Any = None if not need_dw else torch.empty_like(weight_VD) if fused is None else fused
    db_V: Any = grad.target.new_zeros(columns) if need_db else None
    product_TD = dx_TD = dx = dw = None
    cached, as_kept = exp_TV.shape[1], grad.inside is None
    for tile in tiles(hidden_TD, tokens, columns, cached, as_kept, need_dw, call.chunk_tokens):
        rows, block = tile
        if as_kept and block.stop <= cached:
            g_TV = part_of(exp_TV, rows)  # E is G
            g_TV = g_TV if block == slice(0, cached) else g_TV[:, block]
        else:
            g_TV = gradient_tile(tile, gathered.wait(), w_VD, bias_V, exp_TV, target_T, grad, call)
        if need_dx:
            product_TD = matmul.add_product(product_TD, g_TV, part_of(w_VD, block))
            if block.stop == columns:
                if dw is not None:
                    dw.release()
                done_TD = finished_dx(rows, product_TD, grad, target_T, w_VD, bias_V, call, in_slices)
                product_TD = None
                if dx_TD is None:
                    dx_TD = done_TD if rows.stop == tokens else done_TD.new_empty(tokens, done_TD.shape[1])
                if dx_TD is not done_TD:
                    dx_TD[rows] = done_TD
                if rows.stop == tokens and in_slices:
                    dx = collectives.start_reduce_scatter(dx_TD, call.group, sizes=sizes)
                elif rows.stop == tokens:
                    dx = collectives.start_all_reduce(dx_TD, call.group if tokens else None, in_place=True)
        if need_dw:
            if dw is None:
                counted_V = None if grad.offset is None else counted(bias_V, columns, call, grad.offset)
                parts = (grad.scale, target_T, grad.target, grad.offset, counted_V)
                dw = WeightGradient(dw_VD, gathered.wait(), *parts, accumulate=fused is not None)
            dw.add(block, g_TV)
        if need_db:
            db_V[block] += cpu_products.mm(g_TV.t(), grad.scale[rows].to(g_TV.dtype).unsqueeze(1)).squeeze(1)
        del g_TV  # before the next one is made
    if dw is not None:
        dw.finish()
    if fused is not None:
        dw_VD = main_grad.finish(ctx.parameter, weight_VD.dtype)
    if need_db:
        common = counted_V = None
        if grad.offset is not None:
            common, counted_V = grad.offset.sum(0, True), counted(bias_V, columns, call, db_V)
        add_label_rows(db_V.unsqueeze(1), db_V.new_ones(tokens, 1), target_T, grad.target, common, counted_V)
        db_V = db_V.to(bias_V.dtype)
    return None if dx is None else dx.wait(), dw_VD, db_V

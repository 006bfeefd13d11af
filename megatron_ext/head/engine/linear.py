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

from megatron_ext.distributed import collectives
from megatron_ext.head.engine import linear_passes
from megatron_ext.head.engine.autograd import Asked, HeadGradients, Passed, Way
from megatron_ext.head.engine.chunk_sizes import keeps_all, tiles
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.engine.weight_gradient import WeightGradient, weight_gradients
from megatron_ext.head.row_passes import matmul
from megatron_ext.head.row_passes.dispatch import add_label_rows, token_gradient
from megatron_ext.head.row_passes.logit_passes import part_of
from megatron_ext.head.row_passes.side_by_side import operand
from megatron_ext.numerics import cpu_products


class OfSoftmax(Way):
    """Hidden states `[T, D]`, weight, bias and low rank, for read-outs of the softmax alone.

    `sizes`: with the sequence layout, where hidden states are this rank's slice, the number of each rank's tokens; else
    None. `keep`: a backward may follow. The low rank lies beside the weight, and the last columns of the hidden states
    are its own.

    Communicates, at several ranks: forward one all-gather of statistics, backward one all-reduce of dx. With the
    sequence layout each also gathers the hidden states, and dx is reduce-scattered.
    """

    def __init__(self, sizes: list[int] | None, keep: bool):
        self.sizes, self.keep = sizes, keep

    def forward(self, plan: Plan, *inputs: Any) -> Passed:
        hidden_TD, weight_VD, bias_V, low_VR = inputs
        w_VD = operand(weight_VD, low_VR)
        first = linear_passes.statistics_pass(hidden_TD, w_VD, bias_V, plan, self.sizes, self.keep)
        return linear_passes.read_out(first, plan.exchange(first.stats_KT), plan)._replace(kept=(first.exp_TV,))

    def backward(self, asked: Asked) -> tuple[Tensor | None, ...]:
        plan, sizes, call, target_T = asked.plan, self.sizes, asked.plan.call, asked.plan.target_T
        (hidden_TD, weight_VD, bias_V, low_VR), (exp_TV,) = asked.inputs, asked.kept
        out = HeadGradients(asked, sizes)
        tokens, columns = plan.tokens, weight_VD.shape[0]
        in_slices = sizes is not None and tokens > 0
        if in_slices and (out.dweights or not keeps_all(call, tokens, hidden_TD)):  # alike on all ranks
            gathered = collectives.start_all_gather(hidden_TD, call.group, sizes=sizes)
        else:
            gathered = collectives.Pending(hidden_TD)

        basis = plan.basis(asked.stats, asked.saved, asked.grads)
        grad = token_gradient(asked.stats, plan.kept_T, target_T, basis, call, plan.labelled)
        w_VD: Any = operand(weight_VD, low_VR).to(hidden_TD.dtype)
        db_V: Any = grad.target.new_zeros(columns) if out.db else None
        product_TD = dx_TD = None
        dw: list[WeightGradient] = []
        cached, as_kept = exp_TV.shape[1], grad.inside is None
        for tile in tiles(hidden_TD, tokens, columns, cached, as_kept, out.dweights, call.chunk_tokens):
            rows, block = tile
            if as_kept and block.stop <= cached:
                g_TV = part_of(exp_TV, rows)  # E is G
                g_TV = g_TV if block == slice(0, cached) else g_TV[:, block]
            else:
                g_TV = linear_passes.gradient_tile(tile, gathered.wait(), w_VD, bias_V, exp_TV, grad, plan)
            if out.dx:
                product_TD = matmul.add_product(product_TD, g_TV, part_of(w_VD, block))
                if block.stop == columns:
                    for each in dw:
                        each.release()
                    done_TD = linear_passes.finished_dx(rows, product_TD, grad, w_VD, bias_V, plan, in_slices)
                    product_TD = None
                    if dx_TD is None:
                        dx_TD = done_TD if rows.stop == tokens else done_TD.new_empty(tokens, done_TD.shape[1])
                    if dx_TD is not done_TD:
                        dx_TD[rows] = done_TD
                    if rows.stop == tokens:
                        out.send(dx_TD)
            if out.dweights:
                if not dw:
                    if out.dw:
                        out.dw_VD = torch.empty_like(weight_VD) if out.fused is None else out.fused
                    if out.dlow:
                        out.dlow_VR = torch.empty_like(low_VR)
                    outs, accumulate = (out.dw_VD, out.dlow_VR), out.fused is not None
                    dw = weight_gradients(w_VD, outs, gathered.wait(), bias_V, grad, plan, accumulate)
                for each in dw:
                    each.add(block, g_TV)
            if out.db:
                db_V[block] += cpu_products.mm(g_TV.t(), grad.scale[rows].to(g_TV.dtype).unsqueeze(1)).squeeze(1)
            del g_TV  # before the next one is made
        for each in dw:
            each.finish()
        if out.db:
            common = counted_V = None
            if grad.offset is not None:
                common, counted_V = grad.offset.sum(0, True), linear_passes.counted(bias_V, columns, call, db_V)
            add_label_rows(db_V.unsqueeze(1), db_V.new_ones(tokens, 1), target_T, grad.target, common, counted_V)
            out.db_V = db_V
        return out.given()

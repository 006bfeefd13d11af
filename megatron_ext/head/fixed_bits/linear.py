"""The linear head with the same bits for any other tokens, chunk and cache, and by leaves for any number of ranks.

It gives read-outs of the softmax, as `engine/linear.py` does and with the same gradient form; what differs is that
every sum has one order. A token's logits come from products of one order (`numerics/fixed_order.py`); its statistics
are taken leaf by leaf (`leaves.py`) and joined in the tree's order; E = exp(z - m) is relative to the maximum of its
leaf, which no rank's shard changes. dx is summed over a leaf's columns, then over the leaves and ranks by the tree,
and rounded once; dW over tokens, one after the other. What is kept for backward (`source.py`) has the bits of what is
made again.

Legend: T tokens (after any gather), t of a chunk, D hidden size, V columns of this rank's vocabulary shard, K
statistics, L leaves.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.head.call import statistics
from megatron_ext.head.call.leaves import of_shard
from megatron_ext.head.call.matmul import in_one, operand
from megatron_ext.head.engine.autograd import Asked, HeadGradients, Passed, Way
from megatron_ext.head.engine.linear_passes import kept_columns
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.fixed_bits.gradient import Gradient
from megatron_ext.head.fixed_bits.source import Source, part_kept
from megatron_ext.head.row_passes import engine_order
from megatron_ext.head.row_passes.dispatch import passes_of
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.tree_sums import TreeSum


class OfSoftmaxFixed(Way):
    """Hidden states `[T, D]`, weight, bias and low rank; arguments as for `LinearHead`.

    A low rank lies beside the weight in one operand, which each pass makes.

    Communicates, at several ranks: forward one all-gather of statistics; backward `sum_of_ranks` of dx in fp32. With
    the sequence layout each also gathers the hidden states.
    """

    def __init__(self, sizes: list[int] | None, keep: bool):
        self.sizes, self.keep = sizes, keep

    def forward(self, plan: Plan, *inputs: Any) -> Passed:
        (hidden_TD, weight_VD, *_), call = inputs, plan.call
        later, cached = kept_columns(weight_VD, hidden_TD, plan, self.keep)
        source = self._source(inputs, plan)
        kept = source.new_kept(cached / max(weight_VD.shape[0], 1))
        stats_LKT, shift_LT = _statistics(source, plan, kept, later)
        if len(stats_LKT) == 1:
            own_KT = stats_LKT[0]
        else:  # sent as those of one shard
            own_KT = statistics.new_statistics(plan.tokens, call, stats_LKT.dtype, stats_LKT.device)
            joined_KT = statistics.joined(stats_LKT[..., :-1], call)
            own_KT[: len(joined_KT), :-1] = joined_KT
        stats_RKT = plan.exchange(own_KT)
        stats = statistics.combine(stats_RKT, stats_LKT.amax(0), shift_LT[0], call)
        if engine_order.applies(call, source.x_TD):
            stats = engine_order.rounded(stats, stats_RKT)
        return Passed(stats, *plan.results(stats, stats_RKT, own_KT), (shift_LT, *kept))

    def backward(self, asked: Asked) -> tuple[Tensor | None, ...]:
        plan, (_, weight_VD, bias_V, low_VR), (shift_LT, *kept) = asked.plan, asked.inputs, asked.kept
        source, out = self._source(asked.inputs, plan), HeadGradients(asked, self.sizes)
        basis = plan.basis(asked.stats, asked.saved, asked.grads)
        gradient = Gradient(source, plan, kept, asked.stats, shift_LT, basis)
        total_VD: Any = gradient.total(weight_VD, out.fused) if out.dw else None
        total_VR: Any = gradient.total(low_VR) if out.dlow else None
        total_V: Any = gradient.total(bias_V) if out.db else None
        own, beside = slice(0, weight_VD.shape[1]), slice(weight_VD.shape[1], None)
        tiles = source.tiles(kept)
        sum_TD = shift_LT.new_empty(source.x_TD.shape) if out.dx and len(tiles) != 1 else None
        for rows, blocks in tiles:
            tree = TreeSum()
            for at in range(len(source.leaves)):
                product_tD = None
                for block in blocks[at]:
                    g_tV = gradient.matrix(rows, at, block)
                    if out.dx:
                        product_tD = fixed_order.product(g_tV, source.weights[at][block], product_tD)
                    if out.dw:
                        gradient.add_dw(total_VD, rows, at, block, g_tV, own, total_VD is out.fused)
                    if out.dlow:
                        gradient.add_dw(total_VR, rows, at, block, g_tV, beside)
                    if out.db:
                        gradient.add_db(total_V, rows, at, block, g_tV)
                    del g_tV  # before the next one is made
                if product_tD is not None:
                    tree.add(gradient.dx(rows, at, product_tD))
            if sum_TD is not None:
                sum_TD[rows] = tree.total()
            elif out.dx:
                sum_TD = tree.total()
        if sum_TD is not None:
            out.send(sum_TD)
        if out.dw:
            gradient.add_labels(total_VD, source.x_TD[:, own])
            out.dw_VD = of_shard(total_VD, weight_VD, out.fused, begun=not source.on_gpu)
        if out.dlow:
            gradient.add_labels(total_VR, source.x_TD[:, beside])
            out.dlow_VR = of_shard(total_VR, low_VR)
        if out.db:
            gradient.add_labels(total_V.unsqueeze(1), total_V.new_ones(plan.tokens, 1))
            out.db_V = of_shard(total_V, bias_V)
        return out.given()

    def _source(self, inputs: Any, plan: Plan) -> Source:
        x_TD, weight_VD, bias_V, low_VR = inputs
        if self.sizes is not None and plan.tokens:
            x_TD = collectives.all_gather(x_TD, plan.call.group, sizes=self.sizes)
        return Source(x_TD, in_one(operand(weight_VD, low_VR).to(x_TD.dtype)), bias_V, plan.call)


def _statistics(source: Source, plan: Plan, kept: list[Tensor], room: int) -> tuple[Tensor, Tensor]:
    """`[L, K, T + 1]`, those of each leaf, and `[L, T]`, what exponentials are relative to; `kept` is filled."""
    call, tokens = plan.call, plan.tokens
    found = [
        statistics.new_statistics(tokens, replace(call, vocab=leaf.vocab), source.dtype, source.x_TD.device)
        for leaf in source.leaves
    ]
    shift_LT = found[0].new_empty(len(found), tokens)
    for rows in source.token_chunks(kept, room):
        for at, leaf in enumerate(source.leaves):
            z_tV, exp_tV = _logits(source, rows, at, kept[at])
            target_t, shift_t = leaf.columns(plan.target_T[rows]), shift_LT[at, rows]
            own_Kt, bias_V = found[at][:, rows], source.biases[at]
            passes_of(z_tV).row_statistics(
                z_tV,
                target_t,
                own_Kt,
                exp_TV=exp_tV,
                shift_T=shift_t,
                bias_V=bias_V,
                **call.sums(leaf.vocab.counted),
            )
            if source.on_gpu:
                _keep(source, at, kept[at][rows], z_tV, target_t, shift_t)
            if engine_order.applies(call, source.x_TD):
                engine_order.write_sums(z_tV, own_Kt, bias_V, leaf.vocab.counted, call)
            del z_tV, exp_tV  # before the next ones are made
    return torch.stack(found), shift_LT


def _logits(source: Source, rows: slice, at: int, kept_TV: Tensor) -> tuple[Tensor, Tensor | None]:
    """The logits of leaf `at`, and where their exponentials are to be kept. On a CPU these take the logits' place, on
    CUDA `_keep` writes them."""
    whole = slice(0, source.leaves[at].width)
    if source.on_gpu:
        return source.logits(rows, at, whole), None
    here = part_kept(kept_TV, rows, whole)
    z_tV = source.logits(rows, at, whole, source.room(rows, at, whole) if here is None else here)
    return z_tV, here if source.keeps_exp else None


def _keep(source: Source, at: int, kept_tV: Tensor, z_tV: Tensor, target_t: Tensor, shift_t: Tensor) -> None:
    """Write what is kept of the first columns, by a launch of its own: a kernel that also stores exponentials has
    other threads for its columns, which add in another order then."""
    width, call, bias_V = kept_tV.shape[1], source.call, source.biases[at]
    if not width:
        return
    z_tV, bias_V = z_tV[:, :width], None if bias_V is None else bias_V[:width]
    if not source.keeps_exp:
        kept_tV.copy_(z_tV)
        return
    passes_of(z_tV).row_gradient(
        z_tV,
        target_t,
        shift_t,
        kept_tV,
        bias_V=bias_V,
        counted=min(source.leaves[at].vocab.counted, width),
        softcap=call.softcap,
        temperature=call.temperature,
    )

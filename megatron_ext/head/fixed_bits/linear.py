"""The linear head with the same bits for any other tokens, chunk and cache, and by leaves for any number of ranks.

It gives read-outs of the softmax, as `engine/linear.py` does and with the same gradient form; what differs is that
every sum has one order. A token's logits come from products of a fixed order (`products.py`); its statistics are taken
leaf by leaf (`leaves.py`) and joined in the tree's order; E = exp(z - m) is relative to the maximum of its leaf, which
no rank's shard changes. dx is summed over a leaf's columns, then over the leaves and ranks by the tree, and rounded
once; dW over tokens, one after the other. What is kept for backward (`source.py`) has the bits of what is made again.

Legend: T tokens (after any gather), t of a chunk, D hidden size, V columns of this rank's vocabulary shard, K
statistics, L leaves.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed import collectives
from megatron_ext.head.engine import chunk_sizes, linear_passes, statistics
from megatron_ext.head.engine.autograd import (
    differentiable_once,
    first_of_each,
    give,
    keep_for_backward,
    kept_from_forward,
)
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.fixed_bits import engine_order, products
from megatron_ext.head.fixed_bits.gradient import Gradient
from megatron_ext.head.fixed_bits.leaves import TreeSum, sum_of_ranks
from megatron_ext.head.fixed_bits.source import Source, part_kept
from megatron_ext.head.row_passes.dispatch import row_statistics


class FixedHead(torch.autograd.Function):
    """The results of `plan`'s read-outs of hidden states `[T, D]`, one after the other; arguments as for `FusedHead`.

    Communicates, at several ranks: forward one all-gather of statistics; backward `sum_of_ranks` of dx in fp32. With
    the sequence layout each also gathers the hidden states.
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
            call, tokens, columns = plan.call, plan.tokens, weight_VD.shape[0]
            later = linear_passes.backward_bytes(weight_VD, tokens, call) if keep else weight_VD.nbytes // 4
            cached = chunk_sizes.cached_columns(call, tokens, columns, hidden_TD, later) if keep else 0
            source = Source(_gathered(hidden_TD, plan, sizes), weight_VD, bias_V, call)
            kept = source.new_kept(cached / max(columns, 1))
            stats_LKT, shift_LT = _statistics(source, plan, kept, later)
            own_KT = _of_this_rank(stats_LKT, plan)
            stats_RKT = plan.exchange(own_KT)
            stats = statistics.combine(stats_RKT, stats_LKT.amax(0), call, shift_LT[0])
            if engine_order.applies(call, source.x_TD):
                stats = engine_order.rounded(stats, stats_RKT)
            results, saved = plan.results(stats, stats_RKT, own_KT)
        ctx.sizes = sizes
        # Hooks on saved tensors (offloading, recomputation) hand back another object, without its attributes.
        ctx.parameter = weight_VD if call.fuse_main_grad else None
        keep_for_backward(ctx, plan, (hidden_TD, weight_VD, bias_V, shift_LT, *kept), stats, saved)
        return give(ctx, plan, results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None):
        inputs, stats, saved = kept_from_forward(ctx)
        with torch.autocast(inputs[0].device.type, enabled=False):
            assert stats is not None
            basis = ctx.plan.basis(stats, saved, first_of_each(ctx, grads))
            found = _backward(ctx, inputs, stats, basis)
        return *found, None, None, None


def _gathered(hidden_TD: Tensor, plan: Plan, sizes: list[int] | None) -> Tensor:
    if sizes is None or plan.tokens == 0:
        return hidden_TD
    return collectives.all_gather(hidden_TD, plan.call.group, sizes=sizes)


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
            target_t = leaf.columns(plan.target_T[rows])
            row_statistics(
                z_tV,
                target_t,
                found[at][:, rows],
                exp_tV,
                shift_LT[at, rows],
                source.biases[at],
                leaf.vocab.counted,
                call.softcap,
                call.temperature,
                call.mean,
                call.expected,
                call.hits,
            )
            if engine_order.applies(call, source.x_TD):
                engine_order.write_sums(z_tV, found[at][:, rows], source.biases[at], leaf.vocab.counted, call)
            if call.softcap is not None and not source.on_gpu:
                slope_t = _slope_at(target_t, z_tV, source.biases[at], call.softcap, source.dtype)
                found[at][statistics.own_rows(call) - 1, rows] = slope_t
            del z_tV, exp_tV  # before the next ones are made
    return torch.stack(found), shift_LT


def _logits(source: Source, rows: slice, at: int, kept_TV: Tensor) -> tuple[Tensor, Tensor | None]:
    """The logits of leaf `at`, and where their exponentials are to be kept. On a CPU these take the logits' place."""
    whole = slice(0, source.leaves[at].width)
    if source.on_gpu:
        z_tV = source.logits(rows, at, whole)
        if source.keeps_exp:
            return z_tV, kept_TV[rows]  # though it may have no column: what they are relative to follows from it
        kept_TV[rows] = z_tV[:, : kept_TV.shape[1]]
        return z_tV, None
    here = part_kept(kept_TV, rows, whole)
    z_tV = source.logits(rows, at, whole, source.room(rows, at, whole) if here is None else here)
    return z_tV, here if source.keeps_exp else None


def _of_this_rank(stats_LKT: Tensor, plan: Plan) -> Tensor:
    """`[K, T + 1]`: the leaves' statistics as those of one shard, which is what is sent."""
    if len(stats_LKT) == 1:
        return stats_LKT[0]
    call, tokens = plan.call, plan.tokens
    own_KT = statistics.new_statistics(tokens, call, stats_LKT.dtype, stats_LKT.device)
    found_KT = statistics.joined(stats_LKT[..., :-1], call)
    own_KT[: len(found_KT), :-1] = found_KT
    return own_KT


def _backward(
    ctx: Any, inputs: list[Any], stats: Any, basis: Any
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    plan, sizes, call = ctx.plan, ctx.sizes, ctx.plan.call
    hidden_TD, weight_VD, bias_V, shift_LT, *kept = inputs
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    source = Source(_gathered(hidden_TD, plan, sizes), weight_VD, bias_V, call)
    gradient = Gradient(source, plan, kept, stats, shift_LT, basis)

    fused = main_grad.buffer_of(ctx.parameter) if need_dw and call.fuse_main_grad else None
    total_VD: Any = gradient.total(weight_VD, fused) if need_dw else None
    total_V: Any = gradient.total(bias_V) if need_db else None
    sum_TD: Any = None
    tiles = source.tiles(kept)
    for rows, blocks in tiles:
        tree = TreeSum()
        for at in range(len(source.leaves)):
            product_tD = None
            for block in blocks[at]:
                g_tV = gradient.matrix(rows, at, block)
                if need_dx:
                    product_tD = products.product(g_tV, source.weights[at][block], product_tD)
                if need_dw:
                    gradient.add_dw(total_VD, rows, at, block, g_tV, total_VD is fused)
                if need_db:
                    gradient.add_db(total_V, rows, at, block, g_tV)
                del g_tV  # before the next one is made
            if product_tD is not None:
                tree.add(gradient.dx(rows, at, product_tD))
        if need_dx and len(tiles) == 1:
            sum_TD = tree.total()
        elif need_dx:
            sum_TD = shift_LT.new_empty(plan.tokens, hidden_TD.shape[1]) if sum_TD is None else sum_TD
            sum_TD[rows] = tree.total()
    if need_dx and sum_TD is None:
        sum_TD = shift_LT.new_empty(0, hidden_TD.shape[1])
    dx_TD = sum_of_ranks(sum_TD, hidden_TD, call.group, sizes) if need_dx else None
    if need_dw:
        gradient.add_labels(total_VD, source.x_TD)
    if need_db:
        gradient.add_labels(total_V.unsqueeze(1), total_V.new_ones(plan.tokens, 1))
        total_V = gradient.of_shard(total_V, bias_V)
    if fused is None:
        return dx_TD, None if total_VD is None else gradient.of_shard(total_VD, weight_VD), total_V
    gradient.into(fused, total_VD)
    return dx_TD, main_grad.finish(ctx.parameter, weight_VD.dtype), total_V


def _slope_at(column_t: Tensor, z_tV: Tensor, bias_V: Tensor | None, softcap: float, dtype: torch.dtype) -> Tensor:
    """The same at one column of each token, `[t]`; 0 where that is -1."""
    at_t = column_t.clamp(min=0)
    z_t = z_tV.gather(1, at_t.unsqueeze(1)).squeeze(1)
    slope_t = products.softcap_slope(z_t, None if bias_V is None else bias_V[at_t], softcap, dtype)
    return slope_t.where(column_t >= 0, 0.0)

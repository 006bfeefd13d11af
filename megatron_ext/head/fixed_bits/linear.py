"""The linear head with the same bits for any other tokens, chunk and cache, and by leaves for any number of ranks.

It gives read-outs of the softmax, as `engine/linear.py` does and with the same gradient form; what differs is that
every sum has one order. A token's logits come from products of a fixed shape (`products.py`); its statistics are taken
leaf by leaf (`leaves.py`) and combined in the tree's order; E = exp(z - M) is relative to the maximum M of the whole
vocabulary, which no rank's shard changes. dx is summed over a leaf's columns, then over the leaves and ranks by the
tree, and rounded once; dW over tokens in blocks of 256, the last one padded with zeros. What is kept for backward are
logits, of the first tokens: those that are made again have their bits.

Legend: T tokens (after any gather), t of a chunk, D hidden size, V columns of this rank's vocabulary shard, K
statistics, L leaves.
"""

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
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
from megatron_ext.head.engine.call import Call
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.fixed_bits import products
from megatron_ext.head.fixed_bits.leaves import Leaf, TreeSum, leaves_of, sum_of_ranks
from megatron_ext.head.fixed_bits.products import TOKENS
from megatron_ext.head.row_passes.dispatch import row_gradient, row_statistics
from megatron_ext.head.row_passes.label_terms import add_label_rows
from megatron_ext.head.row_passes.logit_passes import accumulation_dtype, transformed
from megatron_ext.head.row_passes.token_terms import token_gradient


class FixedHead(torch.autograd.Function):
    """The results of `plan`'s read-outs of hidden states `[T, D]`, one after the other; arguments as for `FusedHead`.

    Communicates, at several ranks: forward one all-gather of statistics, those of each leaf; backward `sum_of_ranks` of
    dx in fp32. With the sequence layout each also gathers the hidden states.
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
            cached = chunk_sizes.cached_columns(call, tokens, columns, hidden_TD) if keep else 0
            kept_tokens = tokens * cached // max(columns, 1)
            if kept_tokens < tokens:
                kept_tokens = kept_tokens // TOKENS * TOKENS
            source = _Source(_gathered(hidden_TD, plan, sizes), weight_VD, bias_V, call)
            kept = [products.new_rows(hidden_TD, kept_tokens, leaf.width) for leaf in source.leaves]
            stats_LKT = _statistics(source, plan, kept)
            stats_RKT = plan.exchange_leaves(stats_LKT)
            stats = statistics.combine(stats_RKT, stats_LKT.amax(0), call)
            largest = stats.largest.where(stats.largest > -torch.inf, 0.0)
            stats = stats._replace(shift=largest.to(stats.shift.dtype))
            results, saved = plan.results(stats, stats_RKT, stats_LKT[0])
        ctx.sizes = sizes
        # Hooks on saved tensors (offloading, recomputation) hand back another object, without its attributes.
        ctx.parameter = weight_VD if call.fuse_main_grad else None
        keep_for_backward(ctx, plan, (hidden_TD, weight_VD, bias_V, *kept), stats, saved)
        return give(ctx, plan, results)

    @staticmethod
    @differentiable_once
    def backward(ctx: Any, *grads: Tensor | None):
        inputs, stats, saved = kept_from_forward(ctx)
        with torch.autocast(inputs[0].device.type, enabled=False):
            assert stats is not None
            basis = ctx.plan.basis(stats, saved, first_of_each(ctx, grads))
            grad = token_gradient(stats, ctx.plan.kept_T, ctx.plan.target_T, basis, ctx.plan.call)
            found = _backward(ctx, inputs, grad)
        return *found, None, None, None


def chunks(call: Call, tokens: int, kept_tokens: int, columns: int) -> list[slice]:
    """Tokens in chunks of a multiple of `TOKENS`, none of which holds both kept logits and others."""
    given = slice(0, call.chunk_tokens or tokens)
    first = given if call.chunk_tokens else (chunk_sizes.chunks(given, None, columns) or [given])[0]
    step = products.whole_blocks(first)
    parts = [slice(0, kept_tokens), slice(kept_tokens, tokens)]
    return [slice(at, min(at + step, part.stop)) for part in parts for at in range(part.start, part.stop, step)]


class _Source:
    """Hidden states of all tokens, and weight and bias leaf by leaf."""

    def __init__(self, x_TD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, call: Call):
        self.x_TD, self.leaves = products.aligned(x_TD), leaves_of(call)
        w_VD = weight_VD.to(x_TD.dtype)
        self.weights = [leaf.cut(w_VD) for leaf in self.leaves]
        wide_V = None if bias_V is None else bias_V.to(accumulation_dtype(x_TD.dtype))
        self.biases = [None if wide_V is None else leaf.cut(wide_V) for leaf in self.leaves]
        self.columns = sum(leaf.width for leaf in self.leaves)

    def logits(self, rows: slice, at: int, kept: list[Tensor], room: "_Room") -> tuple[Tensor, bool]:
        """Those of leaf `at`, `[t, V]`, and whether they are kept: else they are in `room`."""
        if rows.stop <= kept[at].shape[0]:
            return kept[at][rows], True
        z_tV = room.of(self.x_TD, rows, self.leaves[at])
        products.logits(self.x_TD[rows], self.weights[at], z_tV)
        return z_tV, False


class _Room:
    """Memory for one leaf's logits or gradient of a chunk, taken once."""

    def __init__(self) -> None:
        self._whole: Tensor | None = None

    def of(self, like: Tensor, rows: slice, leaf: Leaf) -> Tensor:
        """`[t, V]`."""
        tokens = rows.stop - rows.start
        if self._whole is None or self._whole.shape[0] < tokens:
            self._whole = products.new_rows(like, tokens, leaf.width)
        return self._whole[:tokens]


def _gathered(hidden_TD: Tensor, plan: Plan, sizes: list[int] | None) -> Tensor:
    if sizes is None or plan.tokens == 0:
        return hidden_TD
    return collectives.all_gather(hidden_TD, plan.call.group, sizes=sizes)


def _statistics(source: _Source, plan: Plan, kept: list[Tensor]) -> Tensor:
    """`[L, K, T + 1]`: those of each leaf; logits are left in `kept` as far as that has room."""
    call, x_TD, tokens, room = plan.call, source.x_TD, plan.tokens, _Room()
    dtype = accumulation_dtype(x_TD.dtype)
    found = []
    for leaf in source.leaves:
        own = replace(call, vocab=leaf.vocab)
        found.append(statistics.new_statistics(tokens, own, dtype, x_TD.device))
    for rows in chunks(call, tokens, kept[0].shape[0], source.columns):
        for at, leaf in enumerate(source.leaves):
            if rows.stop <= kept[at].shape[0]:
                z_tV = kept[at][rows]
                products.logits(x_TD[rows], source.weights[at], z_tV)
            else:
                z_tV, _ = source.logits(rows, at, kept, room)
            row_statistics(
                z_tV,
                leaf.columns(plan.target_T[rows]),
                found[at][:, rows],
                None,
                None,
                source.biases[at],
                leaf.vocab.counted,
                call.softcap,
                call.temperature,
                call.mean,
                call.expected,
                call.hits,
            )
            if call.softcap is not None:
                slope_t = _slope_at(leaf.columns(plan.target_T[rows]), z_tV, source.biases[at], call.softcap, dtype)
                found[at][statistics.own_rows(call) - 1, rows] = slope_t
    return torch.stack(found)


def _backward(ctx: Any, inputs: list[Any], grad: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    plan, sizes, call = ctx.plan, ctx.sizes, ctx.plan.call
    hidden_TD, weight_VD, bias_V, *kept = inputs
    need_dx, need_dw, need_db = ctx.needs_input_grad[:3]
    tokens = plan.tokens
    source = _Source(_gathered(hidden_TD, plan, sizes), weight_VD, bias_V, call)
    passes = _Passes(source, plan, grad, kept)

    fused = main_grad.buffer_of(ctx.parameter) if need_dw and call.fuse_main_grad else None
    total_VD: Any = passes.total(weight_VD, fused) if need_dw else None
    total_V: Any = passes.total(bias_V) if need_db else None
    sum_TD: Any = grad.scale.new_empty(tokens, hidden_TD.shape[1]) if need_dx else None
    for rows in chunks(call, tokens, kept[0].shape[0], source.columns):
        tree = TreeSum()
        for at in range(len(source.leaves)):
            g_tV = passes.gradient(rows, at)
            if need_dx:
                tree.add(passes.dx(rows, at, g_tV))
            if need_dw:
                passes.add_dw(total_VD[passes.columns(at)], rows, g_tV)
            if need_db:
                passes.add_db(total_V[passes.columns(at)], rows, g_tV)
        if need_dx:
            sum_TD[rows] = tree.total()
    dx_TD = sum_of_ranks(sum_TD, hidden_TD, call.group, sizes) if need_dx else None

    exact = (plan.target_T, grad.target)
    if need_dw:
        common_D = None if grad.offset is None else _common(source.x_TD, grad.offset)
        add_label_rows(total_VD, source.x_TD, *exact, common_D, passes.counted_V())
    if need_db:
        common = None if grad.offset is None else grad.offset.sum(0, True)
        ones_T1 = total_V.new_ones(tokens, 1)
        add_label_rows(total_V.unsqueeze(1), ones_T1, *exact, common, passes.counted_V())
        total_V = _of_shard(total_V, bias_V)
    if fused is None:
        return dx_TD, None if total_VD is None else _of_shard(total_VD, weight_VD), total_V
    if total_VD is not fused:
        held = min(len(fused), len(total_VD))
        if fused.dtype == total_VD.dtype:
            fused[:held] = total_VD[:held]
        else:
            fused[:held] += total_VD[:held]
    return dx_TD, main_grad.finish(ctx.parameter, weight_VD.dtype), total_V


class _Passes:
    """The products of backward for a chunk of tokens and a leaf. `grad`: the parts of the gradient, as `linear.py`."""

    def __init__(self, source: _Source, plan: Plan, grad: Any, kept: list[Tensor]):
        self._source, self._plan, self._grad, self._kept = source, plan, grad, kept
        self._room = _Room()
        self._common: dict[int, Tensor] = {}

    def gradient(self, rows: slice, at: int) -> Tensor:
        """G, `[t, V]`."""
        plan, grad, leaf, call = self._plan, self._grad, self._source.leaves[at], self._plan.call
        g_tV = self._room.of(self._source.x_TD, rows, leaf)
        z_tV, _ = self._source.logits(rows, at, self._kept, self._room)
        scale, slope, offset = grad.inside or (None, None, None)
        bias_V, capped = self._source.biases[at], call.softcap is not None
        source_tV = transformed(z_tV, bias_V, call.softcap, 1.0, grad.scale.dtype) if capped else z_tV
        out_tV = source_tV if capped else g_tV
        row_gradient(
            source_tV,
            False,
            leaf.columns(plan.target_T[rows]),
            grad.shift[rows],
            None if scale is None else scale[rows],
            None if slope is None else slope[rows],
            None if offset is None else offset[rows],
            None,
            out_tV,
            None if capped else bias_V,
            leaf.vocab.counted,
            None,
            call.temperature,
        )
        if call.softcap is not None:
            g_tV.copy_(out_tV.mul_(products.softcap_slope(z_tV, bias_V, call.softcap, out_tV.dtype)))
        return g_tV

    def dx(self, rows: slice, at: int, g_tV: Tensor) -> Tensor:
        """This leaf's part of dx, `scale * (G @ W)` and the exact terms, each rounded once, in fp32 (fp64)."""
        grad, leaf, w_VD = self._grad, self._source.leaves[at], self._source.weights[at]
        dx_tD = products.product(g_tV, w_VD).mul_(grad.scale[rows].unsqueeze(1))
        column_t = leaf.columns(self._plan.target_T[rows])
        value_t = grad.target[rows].where(column_t >= 0, 0.0)
        dx_tD += w_VD[column_t.clamp(min=0)] * value_t.unsqueeze(1)
        if grad.offset is not None:
            if at not in self._common:
                self._common[at] = _common(w_VD, self._counted(at))
            dx_tD += grad.offset[rows].unsqueeze(1) * self._common[at]
        return dx_tD

    def total(self, weight: Tensor, fused: Tensor | None = None) -> Tensor:
        """Room for the sum of `weight`'s gradient over tokens, a row for each column of the leaves: they may be more
        than the weight has (the vocabulary ends in the last leaf) or fewer (padding). With an `fused` fp32 buffer it
        is that, or begins with its values, since sums in another order have other bits."""
        wide = self._grad.scale.dtype
        if fused is not None and fused.dtype == wide and len(fused) == self._source.columns:
            return fused
        found = weight.new_zeros(self._source.columns, *weight.shape[1:], dtype=wide)
        if fused is not None and fused.dtype == wide:
            held = min(len(fused), len(found))
            found[:held] = fused[:held]
        return found

    def columns(self, at: int) -> slice:
        """Where leaf `at` is in such a sum."""
        width = self._source.leaves[at].width
        return slice(at * width, (at + 1) * width)

    def add_dw(self, sum_VD: Tensor, rows: slice, g_tV: Tensor) -> None:
        """Add `G.T @ (scale * x)`."""
        x_tD = self._source.x_TD[rows]
        scaled_tD = torch.mul(x_tD, self._grad.scale[rows].unsqueeze(1), out=torch.empty_like(x_tD))
        products.add_transposed(sum_VD, g_tV, scaled_tD)

    def add_db(self, sum_V: Tensor, rows: slice, g_tV: Tensor) -> None:
        """Add the sum of `scale * G` over tokens, block by block."""
        for g, scale in zip(g_tV.split(TOKENS), self._grad.scale[rows].split(TOKENS), strict=True):
            sum_V += (g.to(sum_V.dtype) * scale.unsqueeze(1)).sum(0)

    def counted_V(self) -> Tensor | None:
        """1 for each of the leaves' columns that counts, else 0, where the gradient has an offset."""
        if self._grad.offset is None:
            return None
        return torch.cat([self._counted(at) for at in range(len(self._source.leaves))])

    def _counted(self, at: int) -> Tensor:
        leaf = self._source.leaves[at]
        call = replace(self._plan.call, vocab=leaf.vocab)
        return linear_passes.counted(self._source.biases[at], leaf.width, call, self._grad.scale)


def _slope_at(column_t: Tensor, z_tV: Tensor, bias_V: Tensor | None, softcap: float, dtype: torch.dtype) -> Tensor:
    """The same at one column of each token, `[t]`; 0 where that is -1."""
    at_t = column_t.clamp(min=0)
    z_t = z_tV.gather(1, at_t.unsqueeze(1)).squeeze(1)
    slope_t = products.softcap_slope(z_t, None if bias_V is None else bias_V[at_t], softcap, dtype)
    return slope_t.where(column_t >= 0, 0.0)


def _of_shard(total: Tensor, weight: Tensor) -> Tensor:
    """The rows of `weight`, in its dtype; 0 for those that no leaf has."""
    if len(total) >= len(weight):
        return total[: len(weight)].to(weight.dtype)
    return F.pad(total, (*(0, 0) * (total.dim() - 1), 0, len(weight) - len(total))).to(weight.dtype)


def _common(x_ND: Tensor, factor_N: Tensor) -> Tensor:
    """`sum factor * x` over rows."""
    total_D = factor_N.new_zeros(x_ND.shape[1])
    for rows in chunk_sizes.pieces(x_ND):
        total_D += (x_ND[rows] * factor_N[rows].unsqueeze(1)).sum(0)
    return total_D

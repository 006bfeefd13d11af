"""The backward of the head with fixed bits, tile by tile: the gradient matrix, its products, and the exact terms.

Legend: T tokens, t of a tile, D hidden size, V columns of a tile, of a leaf or of all leaves, L leaves.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call import chunk_sizes
from megatron_ext.head.call.leaves import total_of
from megatron_ext.head.call.statistics import Statistics
from megatron_ext.head.engine import linear_passes
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.fixed_bits.source import Source, part_kept
from megatron_ext.head.row_passes.dispatch import PYTORCH, passes_of
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.matrices import part_of, parts_of


class Gradient:
    """Gradient of logits, by the parts of `GradientParts` for each leaf, whose exponentials have a shift of
    their own."""

    def __init__(self, source: Source, plan: Plan, kept: list[Tensor], stats: Statistics, shift_LT: Tensor, basis: Any):
        self._source, self._plan, self._kept = source, plan, kept
        self._columns = [leaf.columns(plan.target_T) for leaf in source.leaves]
        self._grads = [
            passes_of(shift_T).token_gradient(stats._replace(shift=shift_T), plan.kept_T, column_T, basis, plan.call)
            for shift_T, column_T in zip(shift_LT, self._columns, strict=True)
        ]
        self._offset = self._grads[0].offset
        self._scaled: tuple[tuple[int, int], Tensor] | None = None
        self._common: dict[int, Tensor] = {}

    def matrix(self, rows: slice, at: int, block: slice) -> Tensor:
        """G, `[t, V]`: what is kept, if that are exponentials and nothing bends them."""
        source, grad, leaf, call = self._source, self._grads[at], self._source.leaves[at], self._plan.call
        kept_tV = part_kept(self._kept[at], rows, block)
        if kept_tV is not None and source.keeps_exp:
            return kept_tV
        g_tV, parts, width, bias_V = source.room(rows, at, block), [rows], block.stop - block.start, source.biases[at]
        if source.on_gpu and kept_tV is None:
            room = chunk_sizes.block_room(rows.stop, source.columns, source.x_TD)
            parts = chunk_sizes.product_chunks(rows, None, width, source.x_TD, room)
        counted = min(max(leaf.vocab.counted - block.start, 0), width)
        bias_V = None if bias_V is None else bias_V[block]
        for part in parts:
            own = slice(part.start - rows.start, part.stop - rows.start)
            z_tV = source.logits(part, at, block, g_tV) if kept_tV is None else kept_tV[own]
            target_t = self._columns[at][part] - block.start
            scale_t, slope_t, offset_t = parts_of(part, *(grad.inside or (None, None, None)))
            passes_of(z_tV).row_gradient(
                z_tV,
                target_t,
                part_of(grad.shift, part),
                g_tV[own],
                scale_T=scale_t,
                slope_T=slope_t,
                offset_T=offset_t,
                bias_V=bias_V,
                counted=counted,
                softcap=call.softcap,
                temperature=call.temperature,
            )
            del z_tV  # before the next one is made
        return g_tV

    def dx(self, rows: slice, at: int, product_tD: Tensor) -> Tensor:
        """This leaf's part of dx of its product: `scale * (G @ W)` and the exact terms, in fp32 (fp64)."""
        grad, w_VD, column_t = self._grads[at], self._source.weights[at], self._columns[at][rows]
        scale_t, value_t = grad.scale[rows], grad.target[rows]
        offset_t, common_D = None, None
        if self._offset is not None:
            if at not in self._common:
                self._common[at] = linear_passes.weighed_sum(w_VD, self._counted(at))
            offset_t, common_D = self._offset[rows], self._common[at]
        if self._source.on_gpu:
            passes_of(product_tD).finish_dx(
                product_tD, product_tD, scale_t, column_t, value_t, w_VD, offset_t, common_D
            )
            return product_tD
        # Not by the plain `finish_dx`, whose `addcmul_` rounds otherwise in a tensor's last elements.
        dx_tD = product_tD.mul_(scale_t.unsqueeze(1))
        dx_tD += w_VD[column_t.clamp(min=0)] * value_t.unsqueeze(1)
        if offset_t is not None and common_D is not None:
            dx_tD += offset_t.unsqueeze(1) * common_D
        return dx_tD

    def total(self, weight: Tensor, fused: Tensor | None = None) -> Tensor:
        """Room for `weight`'s gradient, as `total_of`: on a CPU, where it is a sum over tiles, in fp32. On CUDA each
        row is written once, in the weight's dtype, and added to a `fused` buffer then."""
        source = self._source
        if not source.on_gpu:
            return total_of(source.columns, weight, source.dtype, fused)
        if fused is not None and len(fused) == source.columns:
            return fused
        return total_of(source.columns, weight, weight.dtype if weight.dim() == 2 else source.dtype)

    def add_dw(
        self, total_VD: Tensor, rows: slice, at: int, block: slice, g_tV: Tensor, of_x: slice, adds: bool = False
    ) -> None:
        """Add `G.T @ (scale * x)`, of some columns of `x`. `adds`: there is something in `total` already, on CUDA."""
        place = (rows.start, at)
        if self._scaled is None or self._scaled[0] != place:
            x_tD = self._source.x_TD[rows]
            self._scaled = place, torch.empty_like(x_tD)
            passes_of(x_tD).scale_rows(self._scaled[1], x_tD, self._grads[at].scale[rows])
        out_VD, scaled_tD = total_VD[self._rows_of(at, block)], self._scaled[1][:, of_x]
        if self._source.on_gpu:
            fixed_order.transposed(out_VD, g_tV, scaled_tD, adds)
        else:
            fixed_order.add_transposed(out_VD, g_tV, scaled_tD)

    def add_db(self, total_V: Tensor, rows: slice, at: int, block: slice, g_tV: Tensor) -> None:
        """Add the sum of `scale * G` over tokens."""
        out_V, scale_t = total_V[self._rows_of(at, block)], self._grads[at].scale[rows]
        if self._source.on_gpu:
            fixed_order.transposed(out_V.unsqueeze(1), g_tV, scale_t.to(g_tV.dtype).unsqueeze(1))
            return
        fixed_order.add_column_sums(out_V, g_tV, scale_t)

    def add_labels(self, total_VD: Tensor, x_TD: Tensor) -> None:
        """Add the exact terms: of the labels, and of every column that counts where the gradient has an offset."""
        common_D = counted_V = None
        if self._offset is not None:
            common_D = self._offset.new_zeros(x_TD.shape[1])
            fixed_order.add_column_sums(common_D, x_TD, self._offset)
            counted_V = torch.cat([self._counted(at) for at in range(len(self._grads))])
        value_T = self._grads[0].target
        for grad in self._grads[1:]:
            value_T = value_T + grad.target  # of which one is not 0
        passes = passes_of(total_VD) if self._source.on_gpu else PYTORCH
        passes.add_label_rows(total_VD, x_TD, self._plan.target_T, value_T, common_D, counted_V, in_order=True)

    def _rows_of(self, at: int, block: slice) -> slice:
        start = at * self._source.leaves[at].width
        return slice(start + block.start, start + block.stop)

    def _counted(self, at: int) -> Tensor:
        """1 for each column of leaf `at` that counts, else 0."""
        leaf = self._source.leaves[at]
        call = replace(self._plan.call, vocab=leaf.vocab)
        return linear_passes.counted(self._source.biases[at], leaf.width, call, self._grads[at].scale)

"""The weight gradient: one matrix product of 16-bit operands, and the label terms added in fp32.

    dW = G.T @ (scale * x) + value * x in each label's row + sum(offset * x) in every row that counts

The product and the label's rows may be large and cancel, so on CPU, where a 16-bit product comes rounded, it is summed
over chunks of tokens in fp32, the exact terms are added there, and dW is rounded once. On CUDA the product is one GEMM.

Legend: T tokens, D hidden size, V columns of this rank's vocabulary shard. G_TV: a gradient matrix, or what stands for
one.
"""

from collections.abc import Sequence

from torch import Tensor

from megatron_ext.head.call.logit_gradient import GradientParts
from megatron_ext.head.call.resolved_head import Leaf
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.row_passes.passes import PYTORCH
from megatron_ext.numerics.tensors import pieces

# Elements of a piece of the scaled hidden states on CPU. On CUDA they are one: their product with G has as many tiles
# as it can, in memory that dx's fp32 product has left or, while that is there, dW does not need in 16 bits.
_SCALED = 1 << 25


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
        for rows in [slice(0, x_TD.shape[0])] if x_TD.is_cuda else pieces(x_TD):
            if rows.stop - rows.start == x_TD.shape[0]:
                self._passes.scale_rows(out_TD, x_TD, self._grad.scale)
            else:
                self._passes.scale_rows(out_TD[rows], x_TD[rows], self._grad.scale[rows])
        if len(self._parts) == 1:
            self._whole = out_TD
        return out_TD


def weight_gradients(
    outs: Sequence[Tensor | None],
    spans: Sequence[slice],
    x_TD: Tensor,
    leaf: Leaf,
    grad: GradientParts,
    plan: Plan,
    accumulate: bool,
) -> list[WeightGradient]:
    """Return the gradients of an operand's parts in a leaf's rows, each with its columns `spans` of `x`; `outs`: None
    where a part wants none. `accumulate`: the first part's is added to what is there."""
    found = []
    for at, (out_VD, span) in enumerate(zip(outs, spans, strict=True)):
        if out_VD is not None and leaf.rows.stop > leaf.rows.start:
            of_leaf = out_VD if leaf.rows.stop - leaf.rows.start == len(out_VD) else out_VD[leaf.rows]
            side_TD = x_TD if len(spans) == 1 else x_TD[:, span]
            found.append(WeightGradient(of_leaf, side_TD, leaf, grad, plan, accumulate and at == 0))
    return found

"""The weight gradient: one matrix product of 16-bit operands, and the label terms added in fp32.

    dW = G.T @ (scale * x) + value * x in each label's row + sum(offset * x) in every row that counts

The product and the label's rows may be large and cancel, so on CPU, where a 16-bit product comes rounded, it is summed
over chunks of tokens in fp32, the exact terms are added there, and dW is rounded once. On CUDA the product is one GEMM.

Legend: T tokens, D hidden size, V columns of this rank's vocabulary shard. G_TV: a gradient matrix, or what stands for
one.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.head.call.chunk_sizes import pieces
from megatron_ext.head.call.logit_gradient import GradientParts
from megatron_ext.head.call.matmul import Operand, column_spans, tensors_of
from megatron_ext.head.engine.linear_passes import counted, weighed_sum
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.row_passes.dispatch import passes_of
from megatron_ext.numerics import cpu_products
from megatron_ext.numerics.matrices import on_tensor_cores

# Rows of dW at a time on CPU with 16-bit operands: their fp32 sum takes little memory, and the product comes faster
# than as a whole (294 ms against 380 at T 4096, D 512, V 32768). The tokens are summed in this many chunks.
_CPU_ROWS, _CPU_CHUNKS = 2048, 4

# Elements of a piece of the scaled hidden states on CPU. On CUDA they are one: their product with G has as many tiles
# as it can, in memory that dx's fp32 product has left or, while that is there, dW does not need in 16 bits.
_SCALED = 1 << 25


class WeightGradient:
    """Fills `out_VD` (`accumulate`: adds to it, a main_grad) block by block of rows; `finish` once all are there."""

    def __init__(
        self, out_VD: Tensor, x_TD: Tensor, bias_V: Tensor | None, grad: GradientParts, plan: Plan, accumulate: bool
    ):
        self._out_VD, self._x_TD, self._grad, self._target_T = out_VD, x_TD, grad, plan.target_T
        self._labelled = plan.labelled
        self._counted_V = None
        if grad.offset is not None:
            self._counted_V = counted(bias_V, out_VD.shape[0], plan.call, grad.offset)
            self._offset_D = weighed_sum(x_TD, grad.offset)
        self._accumulate = accumulate
        self._rounds_once = not x_TD.is_cuda and x_TD.element_size() == 2
        step = x_TD.shape[1] if x_TD.is_cuda else max(64, _SCALED // max(x_TD.shape[0], 1))
        self._parts = [slice(at, min(at + step, x_TD.shape[1])) for at in range(0, x_TD.shape[1], max(step, 1))]
        self._whole: Tensor | None = None

    def add(self, block: slice, g_TV: Tensor) -> None:
        """The product for the rows of `block`, and on CPU with 16-bit operands their exact terms."""
        for part in self._parts:
            x_TD = self._scaled(part)
            if not self._rounds_once:
                out_VD = self._out_VD if block.stop - block.start == self._out_VD.shape[0] else self._out_VD[block]
                out_VD = out_VD if len(self._parts) == 1 else out_VD[:, part]
                _product(out_VD, g_TV, x_TD, self._accumulate)
                continue
            for start in range(block.start, block.stop, _CPU_ROWS):
                rows = slice(start, min(start + _CPU_ROWS, block.stop))
                out_VD = self._out_VD[rows, part]
                sum_VD = self._grad.scale.new_empty(out_VD.shape)
                tokens = x_TD.shape[0]
                step = max(64, -(-tokens // _CPU_CHUNKS))
                for at in range(0, tokens or 1, step):  # of no token the product is 0
                    g_VT = g_TV[at : at + step, rows.start - block.start : rows.stop - block.start].t()
                    product_VD = cpu_products.mm(g_VT, x_TD[at : at + step])
                    sum_VD = sum_VD.add_(product_VD) if at else sum_VD.copy_(product_VD)
                    del product_VD  # before the next one is made
                self._add_exact(sum_VD, rows, part)
                if self._accumulate:
                    out_VD += sum_VD
                else:
                    out_VD.copy_(sum_VD)

    def release(self) -> None:
        """Frees what is made again where it is needed: the scaled hidden states."""
        self._whole = None

    def finish(self) -> None:
        """Adds the exact terms where `add` did not."""
        self.release()
        if not self._rounds_once:
            self._add_exact(self._out_VD, slice(0, self._out_VD.shape[0]), slice(0, self._x_TD.shape[1]))

    def _add_exact(self, out_VD: Tensor, rows: slice, part: slice) -> None:
        row_T, labelled = self._target_T, self._labelled
        if out_VD.shape[0] != self._out_VD.shape[0]:
            inside_T = (row_T >= rows.start) & (row_T < rows.stop)
            row_T, labelled = (row_T - rows.start).where(inside_T, -1), False
        common_D = counted_V = None
        if self._counted_V is not None:
            common_D, counted_V = self._offset_D[part], self._counted_V[rows]
        x_TD = self._x_TD if len(self._parts) == 1 else self._x_TD[:, part]
        given = out_VD, x_TD, row_T, self._grad.target, common_D, counted_V
        passes_of(out_VD).add_label_rows(*given, labelled=labelled)

    def _scaled(self, part: slice) -> Tensor:
        """`scale * x`, rounded once; on CPU by pieces of D: at large T and D a whole one would be a tensor too many."""
        if self._whole is not None:
            return self._whole
        x_TD = self._x_TD if len(self._parts) == 1 else self._x_TD[:, part]
        out_TD = x_TD.new_empty(x_TD.shape)
        for rows in [slice(0, x_TD.shape[0])] if x_TD.is_cuda else pieces(x_TD):
            if rows.stop - rows.start == x_TD.shape[0]:
                passes_of(x_TD).scale_rows(out_TD, x_TD, self._grad.scale)
            else:
                passes_of(x_TD).scale_rows(out_TD[rows], x_TD[rows], self._grad.scale[rows])
        if len(self._parts) == 1:
            self._whole = out_TD
        return out_TD


def weight_gradients(
    w_VD: Operand,
    outs: Sequence[Tensor | None],
    x_TD: Tensor,
    bias_V: Tensor | None,
    grad: GradientParts,
    plan: Plan,
    accumulate: bool,
) -> list[WeightGradient]:
    """Return the gradients of an operand's parts, each with its columns of `x`; `outs`: None where a part wants none,
    and where there is none. `accumulate`: the first part's is added to what is there."""
    spans = column_spans(tensors_of(w_VD))
    sides = [x_TD] if len(spans) == 1 else [x_TD[:, span] for span in spans]
    return [
        WeightGradient(out_VD, side_TD, bias_V, grad, plan, accumulate and at == 0)
        for at, (out_VD, side_TD) in enumerate(zip(outs, sides, strict=False))
        if out_VD is not None
    ]


def _product(out_VD: Tensor, g_TV: Tensor, x_TD: Tensor, accumulate: bool) -> None:
    """`out = G.T @ x`, rounded once to `out`'s dtype; `out += ...` if `accumulate`."""
    if accumulate:
        main_grad.add_product(out_VD, g_TV, x_TD)
    elif out_VD.dtype == g_TV.dtype:
        torch.mm(g_TV.t(), x_TD, out=out_VD)
    elif on_tensor_cores(g_TV) and out_VD.dtype == torch.float32:
        torch.mm(g_TV.t(), x_TD, out_dtype=torch.float32, out=out_VD)
    else:
        out_VD.copy_(torch.mm(g_TV.t(), x_TD))

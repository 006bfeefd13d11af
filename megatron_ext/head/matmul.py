"""The head's matmuls: 16-bit operands, fp32 sums, one rounding.

On CUDA cuBLAS returns its fp32 accumulator (`out_dtype`). On CPU that does not exist and an fp32 matmul of 16-bit
operands takes four times as long: there a 16-bit product is rounded once, and sums of several run in fp32.

Legend: T tokens, D hidden size, V vocabulary columns. G_TV: a gradient matrix, or what stands for one.
"""

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.head.rows import accumulation_dtype
from megatron_ext.head.sizes import pieces

# Rows of a product at a time on CPU with 16-bit operands: what is added to wider memory takes little of its own, and
# the weight gradient comes faster than as a whole (294 ms against 380 at T 4096, D 512, V 32768).
_CPU_ROWS = 4096

# Elements of a piece of the scaled hidden states.
_SCALED = 1 << 25


def logits(x_TD: Tensor, w_VD: Tensor, out_TV: Tensor | None = None) -> Tensor:
    """`x @ W.T`: fp32 on CUDA for 16-bit operands, else in their dtype, and then in `out_TV`'s memory if given."""
    if x_TD.is_cuda and x_TD.element_size() == 2:
        return torch.mm(x_TD, w_VD.t(), out_dtype=torch.float32)
    if out_TV is not None:
        return torch.mm(x_TD, w_VD.t(), out=out_TV)
    return torch.mm(x_TD, w_VD.t())


def add_product(total_TD: Tensor | None, g_TV: Tensor, w_VD: Tensor, last: bool) -> Tensor:
    """`total + G @ W` in fp32, in place. On CPU an only summand (no total, and the last) keeps its 16 bits."""
    wide = accumulation_dtype(g_TV.dtype)
    if total_TD is None and (g_TV.dtype == wide or (last and not g_TV.is_cuda)):
        return torch.mm(g_TV, w_VD)
    if total_TD is None and g_TV.is_cuda:
        return torch.mm(g_TV, w_VD, out_dtype=wide)
    if total_TD is None:
        total_TD = g_TV.new_zeros(g_TV.shape[0], w_VD.shape[1], dtype=wide)
    if g_TV.dtype == wide:
        return total_TD.addmm_(g_TV, w_VD)
    if g_TV.is_cuda:
        return torch.addmm(total_TD, g_TV, w_VD, out_dtype=wide, out=total_TD)
    for at in range(0, g_TV.shape[0], _CPU_ROWS):
        total_TD[at : at + _CPU_ROWS] += torch.mm(g_TV[at : at + _CPU_ROWS], w_VD)
    return total_TD


class ScaledRows:
    """`scale * x`, rounded once, by pieces of its columns: at large T and D a whole one would be a tensor too many."""

    def __init__(self, x_TD: Tensor, scale_T: Tensor):
        self._x_TD, self._scale_T1 = x_TD, scale_T.unsqueeze(1)
        self._whole: Tensor | None = None
        tokens, width = x_TD.shape
        step = max(64, _SCALED // max(tokens, 1))
        self.pieces = [slice(at, min(at + step, width)) for at in range(0, width, step)]

    def __getitem__(self, part: slice) -> Tensor:
        if self._whole is not None:
            return self._whole
        x_TD = self._x_TD[:, part]
        out_TD = x_TD.new_empty(x_TD.shape)
        for rows in pieces(x_TD):
            torch.mul(x_TD[rows], self._scale_T1[rows], out=out_TD[rows])
        if len(self.pieces) == 1:
            self._whole = out_TD
        return out_TD


def weight_product(out_VD: Tensor, g_TV: Tensor, scaled: ScaledRows, accumulate: bool) -> None:
    """`out = G.T @ (scale * x)`, rounded once to `out`'s dtype; `out += ...` if `accumulate`."""
    narrow = g_TV.element_size() == 2
    step = _CPU_ROWS if narrow and out_VD.device.type == "cpu" else max(out_VD.shape[0], 1)
    for part in scaled.pieces:
        x_TD = scaled[part]
        for at in range(0, out_VD.shape[0], step):
            out, g_VT = out_VD[at : at + step, part], g_TV[:, at : at + step].t()
            if accumulate:
                main_grad.add_product(out, g_VT.t(), x_TD)
            elif out.dtype == g_VT.dtype:
                torch.mm(g_VT, x_TD, out=out)
            elif g_VT.is_cuda and out.dtype == torch.float32:
                torch.mm(g_VT, x_TD, out_dtype=torch.float32, out=out)
            else:
                out.copy_(torch.mm(g_VT, x_TD))

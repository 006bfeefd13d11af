"""The head's matmuls: 16-bit operands, fp32 sums, one rounding.

On CUDA cuBLAS returns its fp32 accumulator (`out_dtype`). On CPU that does not exist and an fp32 matmul of 16-bit
operands takes four times as long: there a 16-bit product is rounded once, and sums of several run in fp32.

Legend: T tokens, D hidden size, V vocabulary columns. G_TV: a gradient matrix, or what stands for one.
"""

import torch
from torch import Tensor

from megatron_ext.head.rows import accumulation_dtype

# Rows and inner columns of a product at a time on CPU with 16-bit operands: what is added to wider memory takes little
# of its own, and a sum of several rounded products errs less than one of them.
_CPU_ROWS, _CPU_CHUNKS = 2048, 4


def logits(x_TD: Tensor, w_VD: Tensor, out_TV: Tensor | None = None) -> Tensor:
    """`x @ W.T`: fp32 on CUDA for 16-bit operands, else in their dtype, and then in `out_TV`'s memory if given."""
    if x_TD.is_cuda and x_TD.element_size() == 2:
        return torch.mm(x_TD, w_VD.t(), out_dtype=torch.float32)
    if out_TV is not None:
        return torch.mm(x_TD, w_VD.t(), out=out_TV)
    return torch.mm(x_TD, w_VD.t())


def add_product(total_TD: Tensor | None, g_TV: Tensor, w_VD: Tensor) -> Tensor:
    """`total + G @ W` in fp32 (fp64 for fp64), in place; a new tensor without a total."""
    wide = accumulation_dtype(g_TV.dtype)
    if g_TV.dtype == wide:
        return torch.mm(g_TV, w_VD) if total_TD is None else total_TD.addmm_(g_TV, w_VD)
    if total_TD is None and g_TV.is_cuda:
        return torch.mm(g_TV, w_VD, out_dtype=wide)
    if total_TD is None:
        total_TD = g_TV.new_zeros(g_TV.shape[0], w_VD.shape[1], dtype=wide)
    if g_TV.is_cuda:
        return torch.addmm(total_TD, g_TV, w_VD, out_dtype=wide, out=total_TD)
    tokens, columns = g_TV.shape
    step = max(64, -(-columns // _CPU_CHUNKS))
    for rows in range(0, tokens, _CPU_ROWS):
        for at in range(0, columns, step):
            total_TD[rows : rows + _CPU_ROWS] += torch.mm(
                g_TV[rows : rows + _CPU_ROWS, at : at + step], w_VD[at : at + step]
            )
    return total_TD

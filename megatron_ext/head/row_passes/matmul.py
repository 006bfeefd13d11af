"""The head's matmuls: 16-bit operands, fp32 sums, one rounding.

On CUDA cuBLAS returns its fp32 accumulator (`out_dtype`). On CPU that does not exist and an fp32 matmul of 16-bit
operands takes four times as long where the processor has 16-bit products: there such a product is rounded once
(`megatron_ext.numerics.cpu_products`), and sums of several run in fp32.

Legend: T tokens, D hidden size, V vocabulary columns. G_TV: a gradient matrix, or what stands for one.
"""

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.head.row_passes.side_by_side import Operand, SideBySide
from megatron_ext.numerics import cpu_products
from megatron_ext.numerics.matrices import accumulation_dtype, new_matrix, widens

# Rows of a product at a time on CPU: it comes faster so, and a 16-bit one, which is added to wider memory, takes little
# of its own. That one is summed over this many chunks of columns: several rounded products err less than one.
_CPU_ROWS, _CPU_CHUNKS = 2048, 4


def logits(x_TD: Tensor, w_VD: Operand, out_TV: Tensor | None = None, rounds: bool = False) -> Tensor:
    """`x @ W.T`: fp32 on CUDA for 16-bit operands, if they are not to be rounded; else in their dtype, and then in
    `out_TV`'s memory if given. Of parts the last product comes first: where sums are rounded, it is the smallest."""
    if isinstance(w_VD, SideBySide):
        *others, last = w_VD.across(x_TD)
        out_TV = logits(*last, out_TV, rounds)
        for x_TP, w_VP in reversed(others):
            main_grad.add_product(out_TV, x_TP.t(), w_VP.t())
        return out_TV
    if x_TD.is_cuda and widens(x_TD, rounds):
        out_TV = new_matrix(x_TD, x_TD.shape[0], w_VD.shape[0], torch.float32)
        return torch.mm(x_TD, w_VD.t(), out_dtype=torch.float32, out=out_TV)
    out_TV = new_matrix(x_TD, x_TD.shape[0], w_VD.shape[0]) if out_TV is None else out_TV
    return cpu_products.mm(x_TD, w_VD.t(), out_TV)


def add_product(total_TD: Tensor | None, g_TV: Tensor, w_VD: Operand) -> Tensor:
    """`total + G @ W` in fp32 (fp64 for fp64), in place; a new tensor without a total."""
    wide = accumulation_dtype(g_TV.dtype)
    if isinstance(w_VD, SideBySide):
        if total_TD is None:
            total_TD = g_TV.new_zeros(g_TV.shape[0], w_VD.shape[1], dtype=wide)
        for part_TD, w_VP in w_VD.across(total_TD):
            add_product(part_TD, g_TV, w_VP)
        return total_TD
    if g_TV.is_cuda:
        if total_TD is None:
            return torch.mm(g_TV, w_VD) if g_TV.dtype == wide else torch.mm(g_TV, w_VD, out_dtype=wide)
        main_grad.add_product(total_TD, g_TV.t(), w_VD)
        return total_TD
    tokens, columns = g_TV.shape
    if total_TD is None and g_TV.dtype == wide and tokens <= _CPU_ROWS:
        return torch.mm(g_TV, w_VD)
    if total_TD is None:
        total_TD = g_TV.new_zeros(tokens, w_VD.shape[1], dtype=wide)
    step = max(columns, 1) if g_TV.dtype == wide else max(64, -(-columns // _CPU_CHUNKS))
    for start in range(0, tokens, _CPU_ROWS):
        rows = slice(start, start + _CPU_ROWS)
        for at in range(0, columns, step):
            parts = g_TV[rows, at : at + step], w_VD[at : at + step]
            if g_TV.dtype == wide:
                total_TD[rows].addmm_(*parts)
            else:
                total_TD[rows] += cpu_products.mm(*parts)
    return total_TD

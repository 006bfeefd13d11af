"""The head's matmuls: 16-bit operands, fp32 sums, one rounding.

On CUDA cuBLAS returns its fp32 accumulator (`out_dtype`). On CPU that does not exist and an fp32 matmul of 16-bit
operands takes four times as long: there a 16-bit product is rounded once, and sums of several run in fp32.

Legend: T tokens, D hidden size, V vocabulary columns. G_TV: a gradient matrix, or what stands for one.
"""

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.head.rows import accumulation_dtype

# Rows of the weight gradient at a time on CPU with 16-bit operands: a product that is added to wider memory takes
# little of its own, and the matmul is faster than of the whole (294 ms against 380 at T 4096, D 512, V 32768).
_CPU_ROWS = 4096


def logits(x_TD: Tensor, w_VD: Tensor, out_TV: Tensor | None = None) -> Tensor:
    """`x @ W.T`: fp32 on CUDA for 16-bit operands, else in their dtype, and then in `out_TV`'s memory if given."""
    if x_TD.is_cuda and x_TD.element_size() == 2:
        return torch.mm(x_TD, w_VD.t(), out_dtype=torch.float32)
    if out_TV is not None:
        return torch.mm(x_TD, w_VD.t(), out=out_TV)
    return torch.mm(x_TD, w_VD.t())


def add_product(total_TD: Tensor | None, g_TV: Tensor, w_VD: Tensor, last: bool) -> Tensor:
    """`total + G @ W` in fp32, in place; on CPU an only summand keeps its 16 bits."""
    wide = accumulation_dtype(g_TV.dtype)
    if g_TV.dtype == wide:
        return torch.mm(g_TV, w_VD) if total_TD is None else total_TD.addmm_(g_TV, w_VD)
    if g_TV.is_cuda:
        if total_TD is None:
            return torch.mm(g_TV, w_VD, out_dtype=wide)
        return torch.addmm(total_TD, g_TV, w_VD, out_dtype=wide, out=total_TD)
    product = torch.mm(g_TV, w_VD)
    if total_TD is None:
        return product if last else product.to(wide)
    return total_TD.add_(product)


def weight_product(out_VD: Tensor, g_TV: Tensor, x_TD: Tensor, accumulate: bool) -> None:
    """`out = G.T @ x`, rounded once to `out`'s dtype; `out += G.T @ x` if `accumulate`."""
    step = _CPU_ROWS if out_VD.device.type == "cpu" and g_TV.element_size() == 2 else max(out_VD.shape[0], 1)
    for at in range(0, out_VD.shape[0], step):
        out, g = out_VD[at : at + step], g_TV[:, at : at + step]
        if accumulate:
            main_grad.add_product(out, g, x_TD)
        elif out.dtype == g.dtype:
            torch.mm(g.t(), x_TD, out=out)
        elif g.is_cuda and out.dtype == torch.float32:
            torch.mm(g.t(), x_TD, out_dtype=torch.float32, out=out)
        else:
            out.copy_(torch.mm(g.t(), x_TD))

"""The nucleus of top-p sampling: the smallest logit that a token keeps, and the sum of the kept exponentials.

`kernels/nucleus.py` has the same function in Triton, which does not sort. Legend: T tokens, V vocabulary columns.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.call.matmul import transformed
from megatron_ext.head.row_passes.fixed_order_sums import prefix_sums
from megatron_ext.numerics.tensors import accumulation_dtype


def nucleus(
    z_TV: Tensor, top_p: float, temperature: float, multiply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row, as `[T]`: the smallest logit that is kept, in the logits' dtype; the largest logit over the
    temperature, in fp32 (fp64 for fp64), at least the least finite number; and the sum of the kept exponentials
    relative to that largest logit, in fp64, 1 in a row of -inf.

    A logit is kept if the probability of all larger logits is less than `top_p`, so equals are kept together.

    Args:
        z_TV: whole rows of the vocabulary, any floating dtype.
        top_p: in (0, 1].
        multiply: the matrix product that makes prefix sums on CUDA.
    """
    dtype = accumulation_dtype(z_TV.dtype)
    cut_T, peak_T = z_TV.new_empty(z_TV.shape[0]), z_TV.new_empty(z_TV.shape[0], dtype=dtype)
    sum_T = peak_T.new_empty(peak_T.shape, dtype=torch.float64)
    for at in blocks(z_TV):
        falling = z_TV[at].sort(dim=-1, descending=True).values
        scaled = transformed(falling, None, None, temperature, dtype)
        peak_t1 = scaled[:, :1].clamp(min=torch.finfo(dtype).min)
        exp = (scaled - peak_t1).exp_()
        mass = prefix_sums(exp, torch.float64, multiply)  # over a whole vocabulary fp32 would lose digits
        before = F.pad(mass[:, :-1], (1, 0))
        inside = (before < top_p * mass[:, -1:]) & (exp > 0)
        cut_t1 = falling.gather(1, inside.sum(1, keepdim=True).clamp(min=1) - 1)
        last_t1 = (falling >= cut_t1).sum(1, keepdim=True).clamp(min=1) - 1  # the last equal of the cut
        sum_t = mass.gather(1, last_t1)[:, 0]
        cut_T[at], peak_T[at] = cut_t1[:, 0], peak_t1[:, 0]
        sum_T[at] = sum_t.masked_fill(sum_t == 0, 1.0)
    return cut_T, peak_T, sum_T

"""Sums of rows that have one order: each is made in one program, and nothing is chosen by the shape."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.numerics.launches import launch


@triton.jit
def segment_sums_kernel(x_ptr, starts_ptr, out_ptr, columns, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """The sum of one row of `columns`, or given starts of what lies between two: by lanes, then over them."""
    row = tl.program_id(0).to(tl.int64)
    start, stop = row * columns, (row + 1) * columns
    if starts_ptr is not None:
        start, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    lane, total = tl.arange(0, BLOCK), tl.zeros([BLOCK], DTYPE)
    for at in range(start, stop, BLOCK):
        total += tl.load(x_ptr + at + lane, mask=at + lane < stop, other=0.0).to(DTYPE)
    tl.store(out_ptr + row, tl.sum(total, 0))


def row_sums(x_TN: Tensor) -> Tensor:
    """See `row_passes.fixed_order_sums.row_sums`."""
    return _sums(x_TN.contiguous(), None, *x_TN.shape)


def segment_sums(x_n: Tensor, lengths_T: Tensor) -> Tensor:
    """See `row_passes.fixed_order_sums.segment_sums`."""
    starts_T = torch.nn.functional.pad(lengths_T.cumsum(0), (1, 0))
    return _sums(x_n.contiguous(), starts_T, lengths_T.shape[0], 0).to(x_n.dtype)


def _sums(x: Tensor, starts_T: Tensor | None, rows: int, columns: int) -> Tensor:
    found_T = x.new_empty(rows, dtype=torch.float64)
    dtype = tl.float64 if x.dtype == torch.float64 else tl.float32
    sizes = {"DTYPE": dtype, "BLOCK": blocks.FIXED_SUM, "num_warps": 4}
    launch(segment_sums_kernel, (rows,), x, starts_T, found_T, columns, **sizes)
    return found_T

"""Sums of rows in one order: one program makes each sum, and no size is chosen by the shape; and a softmax's sums in
the order of inference engines' batch-invariant kernels, which Megatron-Core has too.

That order is: the row's maximum; `exp(z - maximum)` in blocks of 1024 columns, each summed by 4 warps and added to the
blocks before, in fp32; the logarithm of the sum. It is the order of batch_invariant_ops (Thinking Machines Lab), from
which vLLM's and Megatron's kernels come. The sums have one rounding more for each block than the head's own.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.call.statistics import MAX, SUM_EXP
from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import bends, logits, packed, rowwise, writable
from megatron_ext.numerics.launches import launch

_BLOCK = tl.constexpr(1024)  # columns that engines' kernels sum at a time


@triton.jit
def segment_sums_kernel(x_ptr, starts_ptr, out_ptr, columns, DTYPE: tl.constexpr, BLOCK: tl.constexpr):
    """Sum one row of `columns` numbers, or given `starts` one segment: first each lane, then over the lanes.

    x_ptr: `[T, columns]`, or `[n]` with starts_ptr: `[T + 1]`, int64; out_ptr: `[T]`, fp64, written; DTYPE: of sums.
    """
    row = tl.program_id(0).to(tl.int64)
    start, stop = row * columns, (row + 1) * columns
    if starts_ptr is not None:
        start, stop = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    lane, total = tl.arange(0, BLOCK), tl.zeros([BLOCK], DTYPE)
    for at in range(start, stop, BLOCK):
        total += tl.load(x_ptr + at + lane, mask=at + lane < stop, other=0.0).to(DTYPE)
    tl.store(out_ptr + row, tl.sum(total, 0))


def row_sums(x_TN: Tensor) -> Tensor:
    """Sum each row, in one launch. See `row_passes.fixed_order_sums.row_sums`."""
    return _sums(x_TN.contiguous(), None, *x_TN.shape)


def segment_sums(x_n: Tensor, lengths_T: Tensor) -> Tensor:
    """Sum each segment. See `row_passes.fixed_order_sums.segment_sums`."""
    starts_T = torch.nn.functional.pad(lengths_T.cumsum(0), (1, 0))
    return _sums(x_n.contiguous(), starts_T, lengths_T.shape[0], 0).to(x_n.dtype)


def _sums(x: Tensor, starts_T: Tensor | None, rows: int, columns: int) -> Tensor:
    found_T = x.new_empty(rows, dtype=torch.float64)
    dtype = tl.float64 if x.dtype == torch.float64 else tl.float32
    sizes = {"DTYPE": dtype, "BLOCK": blocks.FIXED_SUM, "num_warps": 4}
    launch(segment_sums_kernel, (rows,), x, starts_T, found_T, columns, **sizes)
    return found_T


@triton.jit
def _sums_kernel(
    z_ptr,
    bias_ptr,
    peak_ptr,
    sum_ptr,
    z_stride,
    counted,
    softcap: tl.float64,
    temperature: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Write the sum of exponentials of one token's logits. A thread takes as many neighbouring columns as in the
    engines' kernels, because this number decides the order within a block.

    z_ptr: `[T, V]`, of whose columns `counted` count; bias_ptr: `[V]`; peak_ptr: `[T]`, the maxima; sum_ptr: `[T]`,
    written; softcap, temperature: of all logits; TOGETHER: number of a thread's columns that are neighbours.
    """
    token = tl.program_id(0).to(tl.int64)
    z_ptr += token * z_stride
    softcap, temperature = tl.full([], softcap, tl.float32), tl.full([], temperature, tl.float32)
    row = (z_ptr, bias_ptr, counted, softcap, temperature, HAS_SOFTCAP, HAS_TEMPERATURE)
    peak = tl.load(peak_ptr + token)
    peak = tl.where(peak > float("-inf"), peak, 0.0)
    total = 0.0
    for start in range(0, counted, _BLOCK):
        columns = tl.max_contiguous(start + tl.arange(0, _BLOCK), TOGETHER)
        total += tl.sum(tl.exp(logits(row, columns, True) - peak), 0)
    tl.store(sum_ptr + token, total)


@triton.jit
def _log_kernel(out_ptr, x_ptr, count, BLOCK: tl.constexpr):
    """Write logarithms to out_ptr: `[count]`, those of x_ptr: `[count]`."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=1.0)
    tl.store(out_ptr + at, tl.log(x), mask=at < count)


def write_sums(
    z_TV: Tensor,
    stats_KT: Tensor,
    bias_V: Tensor | None,
    counted: int,
    softcap: float | None,
    temperature: float,
) -> None:
    """Overwrite the sums of exponentials in `stats_KT` by sums in the engines' order, relative to its maxima. Arguments
    are as for `row_statistics`, in fp32."""
    z_TV = rowwise(z_TV)
    launch(
        _sums_kernel,
        (len(z_TV) if counted else 0,),
        z_TV,
        packed(bias_V),
        writable(stats_KT)[MAX],
        stats_KT[SUM_EXP],
        z_TV.stride(0),
        counted=counted,
        **bends(softcap, temperature),
        # A thread loads 16 bytes, 4 fp32 logits, at a time if rows have a multiple of 16 columns; else 1 logit.
        TOGETHER=4 if counted % 16 == 0 else 1,
        num_warps=4,
    )


def log(x_T: Tensor) -> Tensor:
    """Return the natural logarithm of fp32 numbers, with the bits of Triton's `tl.log`."""
    out_T = torch.empty_like(x_T, memory_format=torch.contiguous_format)
    launch(_log_kernel, (triton.cdiv(x_T.numel(), 256),), out_T, x_T.contiguous(), x_T.numel(), BLOCK=256)
    return out_T

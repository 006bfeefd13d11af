"""Products whose sums have one order: each tile is made in one program, and nothing is chosen by the shape.

A product's tiles have one size for all shapes and its sums are serial, so an element's bits depend only on its row of
the left and its column of the right matrix. A library's products promise that for one shape at most. A sum may go on
from the result of an earlier launch, in the order of a single launch.

Legend: M rows, N columns, K the length that a product sums over.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.numerics.fixed_order import CUDA_STEP
from megatron_ext.numerics.launches import launch

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")


@triton.jit
def place(tile, down, across, together):
    """Return the row and the column of a tile among `down` x `across` tiles. Up to `together` tiles of the same columns
    follow each other, so that their operands are in the cache."""
    first = tile // (together * across) * together
    high = tl.minimum(down - first, together)
    within = tile % (together * across)
    return first + within % high, within // high


@triton.jit
def _summed(a, b, total, DTYPE: tl.constexpr):
    if INTERPRETED:  # numpy's fp32 products may have other bits at other places, and there are none in bf16
        step = tl.dot(a.to(tl.float64), b.to(tl.float64), input_precision="ieee", out_dtype=tl.float64)
        return total + step.to(DTYPE)
    return tl.dot(a, b, total, input_precision="ieee", out_dtype=DTYPE)


@triton.jit
def _read(out_ptr, out_stride, rows, columns, M: tl.constexpr, N: tl.constexpr):
    """Load a tile of which `rows` and `columns` exist."""
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    return tl.load(out_ptr + m * out_stride + n, mask=(m < rows) & (n < columns), other=0.0)


@triton.jit
def _write(total, out_ptr, out_stride, rows, columns, ADDS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    """Store a tile, or its first `rows` and `columns`; ADDS: plus the content of `out`."""
    if ADDS:
        total += _read(out_ptr, out_stride, rows, columns, M, N).to(total.dtype)
    m, n = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    inside = (m < rows) & (n < columns)
    tl.store(out_ptr + m * out_stride + n, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def fixed_product_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    rows,
    columns,
    length,
    a_stride_m,
    a_stride_k,
    b_stride_k,
    b_stride_n,
    out_stride,
    TAIL: tl.constexpr,
    GOES_ON: tl.constexpr,
    ADDS: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TOGETHER: tl.constexpr,
):
    """Compute one tile of `a @ b`. TAIL: K is no multiple of BLOCK_K, and zeros follow.

    Args:
        a_ptr: `[M, K]`, M `rows`, K the `length`, any strides. b_ptr: `[K, N]`, N `columns`, any strides.
        out_ptr: `[M, N]`, written; GOES_ON: the sum begins with its content; ADDS: its content is added, rounded once.
        DTYPE: of the sums. TOGETHER: how many tiles of rows follow each other in the order of tiles.
    """
    down, across = tl.cdiv(rows, BLOCK_M), tl.cdiv(columns, BLOCK_N)
    at_m, at_n = place(tl.program_id(0), down, across, TOGETHER)
    first_m, first_n = at_m * BLOCK_M, at_n * BLOCK_N
    m, n = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    out_ptr += first_m.to(tl.int64) * out_stride + first_n

    # Rows and columns past the end repeat the first one, and are not written.
    m_read = tl.max_contiguous(tl.multiple_of(tl.where(m < rows, m, 0), BLOCK_M), BLOCK_M).to(tl.int64)
    n_read = tl.max_contiguous(tl.multiple_of(tl.where(n < columns, n, 0), BLOCK_N), BLOCK_N).to(tl.int64)
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + m_read[:, None] * a_stride_m + k[None, :] * a_stride_k
    b_ptrs = b_ptr + k[:, None] * b_stride_k + n_read[None, :] * b_stride_n
    total = tl.zeros([BLOCK_M, BLOCK_N], DTYPE)
    if GOES_ON:
        total = _read(out_ptr, out_stride, rows - first_m, columns - first_n, BLOCK_M, BLOCK_N)
    for _ in range(length // BLOCK_K):
        total = _summed(tl.load(a_ptrs), tl.load(b_ptrs), total, DTYPE)
        a_ptrs += BLOCK_K * a_stride_k
        b_ptrs += BLOCK_K * b_stride_k
    if TAIL:
        there = k < length % BLOCK_K
        a = tl.load(a_ptrs, mask=there[None, :], other=0.0)
        b = tl.load(b_ptrs, mask=there[:, None], other=0.0)
        total = _summed(a, b, total, DTYPE)
    if ADDS:  # by halves: there are not enough registers for the whole
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = total.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        _write(left, out_ptr, out_stride, rows - first_m, columns - first_n, True, BLOCK_M, HALF)
        rest = columns - first_n - HALF
        _write(right, out_ptr + HALF, out_stride, rows - first_m, rest, True, BLOCK_M, HALF)
    else:
        _write(total, out_ptr, out_stride, rows - first_m, columns - first_n, False, BLOCK_M, BLOCK_N)


def fixed_product(dtype: torch.dtype, goes_on: bool) -> dict[str, Any]:
    """Choose constants, warps and stages of the product kernel; BLOCK_K and the dtype decide the order of sums.

    For 16 bits the tile is cuBLAS's for large products: a program's accumulator takes 128 registers of each thread. A
    program that `goes_on` would have to load as many before it sums, more than there are: it has half as many columns.
    """
    if dtype.itemsize == 2:
        columns = 128 if goes_on else 256
        sizes = {"BLOCK_M": 128, "BLOCK_N": columns, "BLOCK_K": CUDA_STEP, "num_warps": 8, "num_stages": 4}
    elif dtype.itemsize == 4:
        sizes = {"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 32, "num_warps": 8, "num_stages": 2}
    else:
        sizes = {"BLOCK_M": 32, "BLOCK_N": 32, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2}
    return {**sizes, "TOGETHER": 8}


def product(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, goes_on: bool = False, adds: bool = False) -> None:
    """Compute `out = a @ b` in one launch, summed in fp32 (fp64 for fp64) and rounded once to `out`'s dtype.

    `goes_on`: the sums begin with the content of `out`, which has their dtype: as if this K continued the K of an
    earlier product, which must be a multiple of BLOCK_K. `adds`: the content of `out` is added at the end.
    """
    (rows, length), columns = a_MK.shape, b_KN.shape[1]
    assert out_MN.stride(1) == 1 or columns == 1, "outputs are made by the head, columns next to each other"
    sizes: dict[str, Any] = fixed_product(a_MK.dtype, goes_on)
    launch(
        fixed_product_kernel,
        (triton.cdiv(rows, sizes["BLOCK_M"]) * triton.cdiv(columns, sizes["BLOCK_N"]),),
        a_MK,
        b_KN,
        out_MN,
        rows,
        columns,
        length,
        *a_MK.stride(),
        *b_KN.stride(),
        out_MN.stride(0),
        TAIL=length % sizes["BLOCK_K"] != 0,
        GOES_ON=goes_on,
        ADDS=adds,
        DTYPE=tl.float64 if a_MK.dtype == torch.float64 else tl.float32,
        **sizes,
    )

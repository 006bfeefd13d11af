"""Tiles of logits `x @ W.T`, which a program makes one after the other, in registers, for the epilogue of its kernel.

On Hopper TMA loads the next operands while warp groups multiply. A tile has the size that cuBLAS takes for large
products. Each run gives a program the same tiles, and every sum has one order.

Legend: T tokens, D hidden size, V columns of this rank's vocabulary shard or of a block of it.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_ext.head.call.gpu_properties import TILE_M, TILE_N, device_of
from megatron_ext.head.kernels.logits import LOG2_E, packed
from megatron_ext.numerics.fixed_order_kernels import INTERPRETED

_STEP = 64
# Strides of rows are multiples of this number of 16-bit elements: TMA takes rows that begin at multiples of 16 bytes.
MULTIPLE = 8


@triton.jit
def product(x, w, row, column, width, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Return a tile of `x @ W.T`, in fp32; zeros past the last row of `x` or of W."""
    total = tl.zeros([M, N], tl.float32)
    for k in range(0, width, K):
        a, b = x.load([row, k]), w.load([column, k])
        if INTERPRETED:  # the interpreter would multiply the bits of bf16
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b.T, total)
    return total


@triton.jit
def bent(z, bias_ptr, columns, counted, factor):
    """Return logits with the bias, times `factor`, 1 over the temperature; -inf in columns that do not count."""
    inside = columns < counted
    if bias_ptr is not None:
        z += tl.load(bias_ptr + columns, mask=inside, other=0.0)[None, :]
    if factor is not None:
        z *= factor
    if tl.min(columns, 0) + columns.shape[0] > counted:  # the last tiles alone
        z = tl.where(inside[None, :], z, float("-inf"))
    return z


@triton.jit
def exp(z, reference):
    """Return `exp(z - reference)`, with a `reference` for each row, in two instructions an element."""
    return tl.exp2(z * LOG2_E - (reference * LOG2_E)[:, None])


def launch(
    kernel: Any,
    x_TD: Tensor,
    w_VD: Tensor,
    by_rows: bool,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    sm_margin: int = 0,
    **arguments: Any,
) -> None:
    """Launch `kernel` over the tiles of `x @ W.T`: at most one program for each multiprocessor, less `sm_margin`.

    `by_rows`: all tiles of a program have the same rows, and up to 16 programs share them, whatever `sm_margin` is: so
    a few rows are soon done. `arguments`: those that this kernel alone has.
    """
    (tokens, width), columns = x_TD.shape, w_VD.shape[0]
    down, across = triton.cdiv(tokens, TILE_M), triton.cdiv(columns, TILE_N)
    most = max(device_of(x_TD).multiprocessors - sm_margin, 1)
    programs = down * min(across, 16) if by_rows else min(down * across, most)
    with torch.cuda.device_of(x_TD):  # Triton launches on the current device, wherever the tensors are
        kernel[(programs,)](
            x=descriptor(room(x_TD, copied=True), TILE_M, _STEP),
            w=descriptor(room(w_VD, copied=True), TILE_N, _STEP),
            bias_ptr=packed(bias_V),
            tokens=tokens,
            columns=columns,
            width=width,
            factor=None if temperature == 1.0 else 1.0 / temperature,
            together=down if by_rows else 8,
            M=TILE_M,
            N=TILE_N,
            K=_STEP,
            num_warps=8,
            num_stages=3,
            **{name: x.contiguous() if isinstance(x, Tensor) else x for name, x in arguments.items()},
        )


def descriptor(x_MN: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """Return the TMA descriptor of a tensor's tiles of `rows` x `columns`."""
    return TensorDescriptor(x_MN, [*x_MN.shape], [*x_MN.stride()], [rows, columns])


def room(x_MN: Tensor, copied: bool = False) -> Tensor:
    """Return `x_MN` if TMA takes its rows as they lie, else a new tensor of its shape, filled from it if `copied`."""
    if x_MN.stride(1) == 1 and x_MN.stride(0) % MULTIPLE == 0 and x_MN.data_ptr() % 16 == 0:
        return x_MN
    rows, columns = x_MN.shape
    found_MN = x_MN.new_empty(rows, triton.cdiv(columns, MULTIPLE) * MULTIPLE)[:, :columns]
    return found_MN.copy_(x_MN) if copied else found_MN

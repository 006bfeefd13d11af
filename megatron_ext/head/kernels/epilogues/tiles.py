"""Tiles of logits `x @ W.T` that one program makes one after the other and keeps in registers, for what follows there.

On Hopper operands come by TMA while warp groups multiply those before; a tile is the one that cuBLAS takes for large
products. A program's tiles are the same ones in each run, and every sum has one order.

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
# Elements of which rows are a multiple: TMA takes rows that begin at 16 bytes.
MULTIPLE = 8


@triton.jit
def product(x, w, row, column, width, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """A tile of `x @ W.T`; zeros past the ends of both."""
    total = tl.zeros([M, N], tl.float32)
    for k in range(0, width, K):
        a, b = x.load([row, k]), w.load([column, k])
        if INTERPRETED:  # the interpreter would multiply the bits of bf16
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b.T, total)
    return total


@triton.jit
def bent(z, bias_ptr, columns, counted, factor):
    """Logits with bias and temperature, whose reciprocal is `factor`, if any; -inf in columns that do not count."""
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
    """`exp(z - reference)`, `reference` of each row, in two instructions an element."""
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
    """Start as many programs as the device has multiprocessors, but for `sm_margin`, for the tiles of `x @ W.T`.

    `by_rows`: a program's tiles are of the same rows, and programs so many that few rows are soon done, whatever
    `sm_margin` is. `arguments`: the kernel's own, beside those that every kernel of tiles has.
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
    """The way to tiles of a tensor by TMA."""
    return TensorDescriptor(x_MN, [*x_MN.shape], [*x_MN.stride()], [rows, columns])


def room(x_MN: Tensor, copied: bool = False) -> Tensor:
    """`x_MN`, or new memory for it where its rows do not begin where TMA takes them; `copied`: with its numbers."""
    if x_MN.stride(1) == 1 and x_MN.stride(0) % MULTIPLE == 0 and x_MN.data_ptr() % 16 == 0:
        return x_MN
    rows, columns = x_MN.shape
    found_MN = x_MN.new_empty(rows, triton.cdiv(columns, MULTIPLE) * MULTIPLE)[:, :columns]
    return found_MN.copy_(x_MN) if copied else found_MN

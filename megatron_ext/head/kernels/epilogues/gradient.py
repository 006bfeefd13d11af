"""`product_gradient` in Triton: a block of the logits' gradient from hidden states and weight; no logits are written.

Backward knows the shift of each row, so a tile of logits becomes gradients in registers, and is rounded once, to the
dtype of the output.
"""

import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels.epilogues import tiles
from megatron_ext.head.kernels.logits import FAR, writable
from megatron_ext.numerics.fixed_order_kernels import place


@triton.jit
def product_gradient_kernel(
    x,
    w,
    out,
    target_ptr,
    shift_ptr,
    bias_ptr,
    sample_ptr,
    tokens,
    columns,
    width,
    counted,
    factor,
    together,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    scale_T=None,
    slope_T=None,
):
    """Write `exp(u) * (scale + slope * u)`, `u = z - shift`: 0 at the label and in columns that do not count.

    Given `sample`, a tile is skipped if the shift of each of its rows equals the row's sample. Arguments that are not
    here are as for `product_statistics_kernel`.

    Args:
        out: `[T, V]`, written, a descriptor of tiles that TMA moves. shift_ptr: `[T]`, subtracted from logits.
        scale_T: `[T]`, slope_T: `[T]`, coefficients; None: scale 1, or 0 beside a slope.
    """
    down, across = tl.cdiv(tokens, M), tl.cdiv(columns, N)
    stop = down * across
    if sample_ptr is not None:
        at = tl.program_id(0) % down * M + tl.arange(0, M)
        shift = tl.load(shift_ptr + at, mask=at < tokens, other=0.0)
        moved = shift != tl.load(sample_ptr + at, mask=at < tokens, other=0.0)
        stop *= tl.max(moved.to(tl.int32), 0)
    for tile in tl.range(tl.program_id(0), stop, tl.num_programs(0)):
        m, n = place(tile, down, across, together)
        z = tiles.product(x, w, m * M, n * N, width, M, N, K)
        at, column = m * M + tl.arange(0, M), n * N + tl.arange(0, N)
        z = tiles.bent(z, bias_ptr, column, counted, factor)
        inside = at < tokens
        target = tl.load(target_ptr + at, mask=inside, other=-1).to(tl.int32)
        if tl.max((target // N == n).to(tl.int32), 0) > 0:  # few tiles have a label's column
            z = tl.where(column[None, :] == target[:, None], float("-inf"), z)
        shift = tl.load(shift_ptr + at, mask=inside, other=0.0)
        g = tiles.exp(z, shift)
        if slope_T is not None:
            slope = tl.load(slope_T + at, mask=inside, other=0.0)[:, None]
            inner = slope * tl.maximum(z - shift[:, None], FAR)
            if scale_T is not None:
                inner += tl.load(scale_T + at, mask=inside, other=0.0)[:, None]
            g *= inner
        elif scale_T is not None:
            g *= tl.load(scale_T + at, mask=inside, other=0.0)[:, None]
        out.store([m * M, n * N], g.to(out.dtype))


def product_gradient(
    x_TD: Tensor,
    w_VD: Tensor,
    target_T: Tensor,
    shift_T: Tensor,
    out_TV: Tensor,
    scale_T: Tensor | None = None,
    slope_T: Tensor | None = None,
    bias_V: Tensor | None = None,
    *,
    counted: int,
    temperature: float = 1.0,
    sm_margin: int = 0,
) -> None:
    """Write a block of the logits' gradient in one launch. See `row_passes/passes.py`."""
    if x_TD.shape[0] == 0:
        return
    room_TV = tiles.room(writable(out_TV))
    tiles.launch(
        product_gradient_kernel,
        x_TD,
        w_VD,
        by_rows=False,
        bias_V=bias_V,
        temperature=temperature,
        sm_margin=sm_margin,
        out=tiles.descriptor(room_TV, tiles.TILE_M, tiles.TILE_N),
        target_ptr=target_T,
        shift_ptr=shift_T,
        sample_ptr=None,
        counted=counted,
        scale_T=scale_T,
        slope_T=slope_T,
    )
    if room_TV is not out_TV:
        out_TV.copy_(room_TV)

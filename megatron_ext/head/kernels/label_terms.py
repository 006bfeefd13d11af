"""`add_label_rows`, `finish_dx` and `scale_rows` in Triton, with the arguments and results of
`megatron_ext.head.row_passes.label_terms`.

Every number is summed by one program in an order that the labels decide, so results are the same bits from run to run,
and nothing is read back to the host.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import rowwise, writable

# Tokens that one program adds up one after the other. A label that more of them have is summed in two passes: at 128k
# tokens of one label 256 in the first and 512 sums in the second.
_WINDOW = 256


@triton.jit
def _add_tokens(
    total,
    order_ptr,
    x_ptr,
    value_ptr,
    first,
    stop,
    columns,
    inside,
    x_stride,
    DTYPE: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """`total` and `value * x` of the tokens at the places `first` to `stop`, in their order."""
    for start in range(first, stop, AHEAD):
        for ahead in tl.static_range(AHEAD):  # independent loads, on their way together
            there = start + ahead < stop
            token = tl.load(order_ptr + start + ahead, mask=there, other=0).to(tl.int64)
            value = tl.load(value_ptr + token, mask=there, other=0.0)
            x = tl.load(x_ptr + token * x_stride + columns, mask=inside & there, other=0.0)
            total += value * x.to(DTYPE)
    return total


@triton.jit
def _label_parts_kernel(
    parts_ptr,
    x_ptr,
    sorted_ptr,
    order_ptr,
    value_ptr,
    x_stride,
    tokens,
    width,
    WINDOW: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """A window's part of a run of equal labels that lies in several: of the one that comes from the window before, in
    the first of its two rows of `parts`, and of the one that begins here and goes on, in the second."""
    at = tl.program_id(0)
    goes_on = at % 2 == 1
    start = at // 2 * WINDOW
    stop = tl.minimum(start + WINDOW, tokens)
    row = tl.load(sorted_ptr + tl.where(goes_on, stop - 1, start))
    before = tl.load(sorted_ptr + start - 1, mask=start > 0, other=-1)
    after = tl.load(sorted_ptr + stop, mask=stop < tokens, other=-1)
    if (row < 0) | ((before == row) == goes_on) | (goes_on & (after != row)):
        return
    places = start + tl.arange(0, WINDOW)
    equal = tl.load(sorted_ptr + places, mask=places < stop, other=-1) == row
    count = tl.sum(equal.to(tl.int32), 0)
    first = tl.where(goes_on, stop - count, start)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < width
    total = tl.zeros([BLOCK_D], DTYPE)
    total = _add_tokens(
        total, order_ptr, x_ptr, value_ptr, first, first + count, columns, inside, x_stride, DTYPE, AHEAD
    )
    tl.store(parts_ptr + at.to(tl.int64) * width + columns, total, mask=inside)


@triton.jit
def _label_rows_kernel(
    out_ptr,
    x_ptr,
    sorted_ptr,
    order_ptr,
    bounds_ptr,
    value_ptr,
    parts_ptr,
    common_ptr,
    counted_ptr,
    out_stride,
    out_column_stride,
    x_stride,
    width,
    EVERY_ROW: tl.constexpr,
    IN_PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """One row of `out` and some of its columns: that of a run of equal labels, or with EVERY_ROW any.

    The tokens of a run that lies in one window are added here, else the sums of its parts in each (IN_PARTS).
    """
    at = tl.program_id(0)
    if EVERY_ROW:
        row, first, stop = at, tl.load(bounds_ptr + at), tl.load(bounds_ptr + at + 1)
    else:
        row, first, stop = tl.load(sorted_ptr + at), at, tl.load(bounds_ptr + at)
        before = tl.load(sorted_ptr + tl.maximum(at - 1, 0))
        if (row < 0) | ((at > 0) & (before == row)):
            return
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < width
    out_ptr += row.to(tl.int64) * out_stride + columns.to(tl.int64) * out_column_stride  # 1, or of a transposed weight
    total = tl.load(out_ptr, mask=inside, other=0.0).to(DTYPE)
    if EVERY_ROW:
        common = tl.load(common_ptr + columns, mask=inside, other=0.0)
        total += tl.load(counted_ptr + at) * common
    if IN_PARTS:
        window, last = first // WINDOW, (stop - 1) // WINDOW
        several = window < last  # of no token the last one lies before the first
        for start in range(window, tl.where(several, last + 1, window), AHEAD):
            for ahead in tl.static_range(AHEAD):
                part = 2 * (start + ahead) + (start + ahead == window).to(tl.int32)
                there = inside & (start + ahead <= last)
                total += tl.load(parts_ptr + part.to(tl.int64) * width + columns, mask=there, other=0.0)
        stop = tl.where(several, first, stop)
    total = _add_tokens(total, order_ptr, x_ptr, value_ptr, first, stop, columns, inside, x_stride, DTYPE, AHEAD)
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _finish_dx_kernel(
    out_ptr,
    product_ptr,
    scale_ptr,
    target_ptr,
    value_ptr,
    w_ptr,
    offset_ptr,
    common_ptr,
    out_stride,
    out_column_stride,
    product_stride,
    w_stride,
    width,
    HAS_OFFSET: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < width
    target = tl.load(target_ptr + token)
    owned = target >= 0
    value = tl.load(value_ptr + token, mask=owned, other=0.0)
    w = tl.load(w_ptr + target * w_stride + columns, mask=inside & owned, other=0.0).to(DTYPE)
    product = tl.load(product_ptr + token * product_stride + columns, mask=inside, other=0.0).to(DTYPE)
    dx = value * w + tl.load(scale_ptr + token) * product
    if HAS_OFFSET:
        dx += tl.load(offset_ptr + token) * tl.load(common_ptr + columns, mask=inside, other=0.0)
    out_ptr += token * out_stride + columns.to(tl.int64) * out_column_stride
    tl.store(out_ptr, dx.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_rows_kernel(out_ptr, x_ptr, scale_ptr, out_stride, x_stride, width, BLOCK_D: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    scale = tl.load(scale_ptr + token)
    x = tl.load(x_ptr + token * x_stride + columns, mask=columns < width, other=0.0).to(scale.dtype)
    tl.store(out_ptr + token * out_stride + columns, (scale * x).to(out_ptr.dtype.element_ty), mask=columns < width)


def add_label_rows(
    out_VD: Tensor,
    x_TD: Tensor,
    target_T: Tensor,
    value_T: Tensor,
    common_D: Tensor | None = None,
    counted_V: Tensor | None = None,
    *,
    in_order: bool = False,
    labelled: bool = False,
) -> None:
    """At most T rows are read and written, all of them only with `common`. See `row_passes/label_terms.py`.

    A stable sort on the device brings the tokens of a row together, in their own order. However many those are, no
    program adds up more than a window of them, or of the windows' sums. Where windows begin depends on the other
    labels, so with `in_order` there are none: a label of 10000 tokens takes about 2 ms then.
    """
    (tokens, width), rows = x_TD.shape, out_VD.shape[0]
    every_row = common_D is not None
    programs = rows if every_row else tokens
    if programs == 0 or width == 0:
        return
    with torch.cuda.device_of(out_VD):  # Triton launches on the current device, wherever the tensors are
        sorted_T, order_T = torch.sort(target_T.int(), stable=True)
        asked = torch.arange(rows + 1, device=out_VD.device, dtype=torch.int32) if every_row else sorted_T
        bounds = torch.searchsorted(sorted_T, asked, right=not every_row, out_int32=True)
        x_TD, block_d, warps = rowwise(x_TD), *blocks.sizes(blocks.LABEL_WIDTH, width, value_T.dtype == torch.float64)
        value_T, windows, parts = value_T.contiguous(), triton.cdiv(tokens, _WINDOW), value_T
        sizes: dict[str, Any] = {
            "WINDOW": _WINDOW,
            "DTYPE": _sum_type(value_T),
            "BLOCK_D": block_d,
            "AHEAD": 4,
            "num_warps": warps,
        }
        in_parts = windows > 1 and not in_order
        if in_parts:
            parts = value_T.new_empty(2 * windows, width)
            _label_parts_kernel[(2 * windows, triton.cdiv(width, block_d))](
                parts, x_TD, sorted_T, order_T, value_T, x_TD.stride(0), tokens, width, **sizes
            )
        _label_rows_kernel[(programs, triton.cdiv(width, block_d))](
            out_VD,
            x_TD,
            sorted_T,
            order_T,
            bounds,
            value_T,
            parts,
            value_T if common_D is None else common_D.contiguous(),
            value_T if counted_V is None else counted_V.contiguous(),
            out_VD.stride(0),
            out_VD.stride(1),
            x_TD.stride(0),
            width,
            EVERY_ROW=every_row,
            IN_PARTS=in_parts,
            **sizes,
        )


def finish_dx(
    out_TD: Tensor,
    product_TD: Tensor,
    scale_T: Tensor,
    target_T: Tensor,
    value_T: Tensor,
    w_VD: Tensor,
    offset_T: Tensor | None = None,
    common_D: Tensor | None = None,
) -> None:
    """dx from the product, in one launch. See `megatron_ext.head.row_passes.label_terms.finish_dx`."""
    if product_TD.numel() == 0:
        return
    scale_T, value_T, target_T, w_VD = scale_T.contiguous(), value_T.contiguous(), target_T.contiguous(), rowwise(w_VD)
    offset_T = scale_T if offset_T is None else offset_T.contiguous()
    width = product_TD.shape[1]
    block_d, warps = blocks.sizes(blocks.WIDTH, width, scale_T.dtype == torch.float64)

    def run(out_TD: Tensor, rows: slice) -> None:
        _finish_dx_kernel[(out_TD.shape[0], triton.cdiv(width, block_d))](
            out_TD,
            product_TD[rows],
            scale_T[rows],
            target_T[rows],
            value_T[rows],
            w_VD,
            offset_T[rows],
            scale_T if common_D is None else common_D.contiguous(),
            out_TD.stride(0),
            out_TD.stride(1),
            product_TD.stride(0),
            w_VD.stride(0),
            width,
            HAS_OFFSET=common_D is not None,
            DTYPE=_sum_type(scale_T),
            BLOCK_D=block_d,
            num_warps=warps,
        )

    with torch.cuda.device_of(out_TD):
        if out_TD.dtype == product_TD.dtype or out_TD.data_ptr() != product_TD.data_ptr():
            run(out_TD, slice(0, out_TD.shape[0]))
            return
        # In the product's own memory, with half of its element size: a launch reads rows n to 2n and writes where rows
        # n/2 to n were, which earlier ones have read. The first rows wait aside.
        aside_TD = torch.empty_like(out_TD[:_ASIDE])
        run(aside_TD, slice(0, _ASIDE))
        start = _ASIDE
        while start < out_TD.shape[0]:
            rows = slice(start, min(2 * start, out_TD.shape[0]))
            run(out_TD[rows], rows)
            start = rows.stop
        out_TD[:_ASIDE] = aside_TD


def scale_rows(out_TD: Tensor, x_TD: Tensor, scale_T: Tensor) -> None:
    """At the speed of memory. See `megatron_ext.head.row_passes.label_terms.scale_rows`."""
    (tokens, width), x_TD = x_TD.shape, rowwise(x_TD)
    if x_TD.numel() == 0:
        return
    block_d, warps = blocks.sizes(blocks.WIDTH, width, scale_T.dtype == torch.float64)
    with torch.cuda.device_of(out_TD):
        _scale_rows_kernel[(tokens, triton.cdiv(width, block_d))](
            writable(out_TD),
            x_TD,
            scale_T.contiguous(),
            out_TD.stride(0),
            x_TD.stride(0),
            width,
            BLOCK_D=block_d,
            num_warps=warps,
        )


_ASIDE = 64


def _sum_type(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32

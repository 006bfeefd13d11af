"""`add_label_rows`, `finish_dx` and `scale_rows` in Triton, with the arguments and results of
`megatron_ext.head.row_passes.label_terms`.

One program computes each sum, in an order that the labels decide, so results have the same bits from run to run.
Nothing is read back to the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import packed, rowwise, writable
from megatron_ext.numerics.launches import launch

# Tokens that one program adds up one after the other. A label of more tokens is summed in two passes: with 128k tokens
# of one label a program adds 256 tokens in the first pass, and 512 sums in the second.
_WINDOW = 256
# First tokens, whose dx has a buffer of its own while dx is written into the memory of the product.
_ASIDE = 64


@triton.jit
def _add_tokens(total, order_ptr, x_ptr, value_ptr, first, stop, columns, inside, x_stride, AHEAD: tl.constexpr):
    """Return `total` plus `value * x` of the tokens `order[first:stop]`, added in that order."""
    for start in range(first, stop, AHEAD):
        for ahead in tl.static_range(AHEAD):  # independent loads, on their way together
            there = start + ahead < stop
            token = tl.load(order_ptr + start + ahead, mask=there, other=0).to(tl.int64)
            value = tl.load(value_ptr + token, mask=there, other=0.0)
            x = tl.load(x_ptr + token * x_stride + columns, mask=inside & there, other=0.0)
            total += value * x.to(total.dtype)
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
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Sum a window's part of a run of equal labels that spans several windows. A window has two rows of `parts`: the
    first is for the run that began in an earlier window, the second for the run that begins here and goes on.

    Args:
        parts_ptr: `[2 N, D]`, written: N windows of WINDOW sorted `tokens`. x_ptr: `[T, D]`, D is `width`.
        sorted_ptr: `[T]`, int32, labels, rising. order_ptr: `[T]`, int64, their tokens. value_ptr: `[T]`, a factor of
            each token.
    """
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
    total = tl.zeros([BLOCK_D], value_ptr.dtype.element_ty)
    total = _add_tokens(total, order_ptr, x_ptr, value_ptr, first, first + count, columns, inside, x_stride, AHEAD)
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
    WINDOW: tl.constexpr,
    BLOCK_D: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Add to some columns of one row of `out`: the row of a run of equal labels, or with `common` each row of `out`.

    The tokens of a run inside one window are added one by one. Given `parts`, a run that spans several windows adds its
    sums of the windows. Arguments that are not here are as for `_label_parts_kernel`.

    Args:
        out_ptr: `[V, D]`, added to; its columns are `out_column_stride` apart. parts_ptr: `[2 N, D]`.
        bounds_ptr: `[T]`, the end of each run, or with `common` `[V + 1]`, where each row's tokens begin.
        common_ptr: `[D]`, added to each row times counted_ptr: `[V]`.
    """
    at = tl.program_id(0)
    if common_ptr is not None:
        row, first, stop = at, tl.load(bounds_ptr + at), tl.load(bounds_ptr + at + 1)
    else:
        row, first, stop = tl.load(sorted_ptr + at), at, tl.load(bounds_ptr + at)
        before = tl.load(sorted_ptr + tl.maximum(at - 1, 0))
        if (row < 0) | ((at > 0) & (before == row)):
            return
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < width
    out_ptr += row.to(tl.int64) * out_stride + columns.to(tl.int64) * out_column_stride  # 1 unless W is transposed
    total = tl.load(out_ptr, mask=inside, other=0.0).to(value_ptr.dtype.element_ty)
    if common_ptr is not None:
        common = tl.load(common_ptr + columns, mask=inside, other=0.0)
        total += tl.load(counted_ptr + at) * common
    if parts_ptr is not None:
        window, last = first // WINDOW, (stop - 1) // WINDOW
        several = window < last  # False also for a row without tokens: `last` may then lie before `window`
        for start in range(window, tl.where(several, last + 1, window), AHEAD):
            for ahead in tl.static_range(AHEAD):
                part = 2 * (start + ahead) + (start + ahead == window).to(tl.int32)
                there = inside & (start + ahead <= last)
                total += tl.load(parts_ptr + part.to(tl.int64) * width + columns, mask=there, other=0.0)
        stop = tl.where(several, first, stop)
    total = _add_tokens(total, order_ptr, x_ptr, value_ptr, first, stop, columns, inside, x_stride, AHEAD)
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
    BLOCK_D: tl.constexpr,
):
    """Write some of `width` columns of one token's `scale * product + value * W[target] + offset * common`.

    Args:
        out_ptr: `[T, D]`, written; its columns are `out_column_stride` apart. product_ptr: `[T, D]`. w_ptr: `[V, D]`.
        target_ptr: `[T]`, int64, the label's row of W, below 0: none. common_ptr: `[D]`.
        scale_ptr: `[T]`, value_ptr: `[T]`, offset_ptr: `[T]`, a factor of each token.
    """
    token = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = scale_ptr.dtype.element_ty
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    inside = columns < width
    target = tl.load(target_ptr + token)
    owned = target >= 0
    value = tl.load(value_ptr + token, mask=owned, other=0.0)
    w = tl.load(w_ptr + target * w_stride + columns, mask=inside & owned, other=0.0).to(DTYPE)
    product = tl.load(product_ptr + token * product_stride + columns, mask=inside, other=0.0).to(DTYPE)
    dx = value * w + tl.load(scale_ptr + token) * product
    if offset_ptr is not None:
        dx += tl.load(offset_ptr + token) * tl.load(common_ptr + columns, mask=inside, other=0.0)
    out_ptr += token * out_stride + columns.to(tl.int64) * out_column_stride
    tl.store(out_ptr, dx.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _scale_rows_kernel(out_ptr, x_ptr, scale_ptr, out_stride, x_stride, width, BLOCK_D: tl.constexpr):
    """Scale some of `width` columns of one token. out_ptr: `[T, D]`, written; x_ptr: `[T, D]`; scale_ptr: `[T]`."""
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
    """Add as `row_passes/label_terms.py` says. At most T rows are read and written, all rows only with `common_D`.

    A stable sort on the device brings the tokens of a row together, in their own order. A program adds up at most one
    window of tokens, or one sum of each window. Where windows begin depends on the other labels, so `in_order` takes
    no windows: a label of 10000 tokens then takes about 2 ms.
    """
    (tokens, width), rows = x_TD.shape, out_VD.shape[0]
    programs = tokens if common_D is None else rows
    if programs == 0 or width == 0:
        return
    sorted_T, order_T = torch.sort(target_T.int(), stable=True)
    asked = sorted_T if common_D is None else torch.arange(rows + 1, device=out_VD.device, dtype=torch.int32)
    bounds = torch.searchsorted(sorted_T, asked, right=common_D is None, out_int32=True)
    block_d, warps = blocks.sizes(blocks.LABEL_WIDTH, width, value_T.dtype == torch.float64)
    x_TD, value_T, windows = rowwise(x_TD), value_T.contiguous(), triton.cdiv(tokens, _WINDOW)
    sizes = {"WINDOW": _WINDOW, "BLOCK_D": block_d, "AHEAD": 4, "num_warps": warps}
    parts, across = None, triton.cdiv(width, block_d)
    if windows > 1 and not in_order:
        parts, given = value_T.new_empty(2 * windows, width), (x_TD, sorted_T, order_T, value_T)
        launch(_label_parts_kernel, (2 * windows, across), parts, *given, x_TD.stride(0), tokens, width, **sizes)
    launch(
        _label_rows_kernel,
        (programs, across),
        out_VD,
        x_TD,
        sorted_T,
        order_T,
        bounds,
        value_T,
        parts,
        packed(common_D),
        packed(counted_V),
        *out_VD.stride(),
        x_TD.stride(0),
        width,
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
    """Make dx from the product, in one launch, or a few of doubling size in place. See `row_passes/label_terms.py`."""
    scale_T, value_T, target_T, w_VD = scale_T.contiguous(), value_T.contiguous(), target_T.contiguous(), rowwise(w_VD)
    offset_T, common_D, width = packed(offset_T), packed(common_D), product_TD.shape[1]
    block_d, warps = blocks.sizes(blocks.WIDTH, width, scale_T.dtype == torch.float64)

    def run(out_TD: Tensor, rows: slice) -> None:
        launch(
            _finish_dx_kernel,
            (out_TD.shape[0], triton.cdiv(width, block_d)),
            out_TD,
            product_TD[rows],
            scale_T[rows],
            target_T[rows],
            value_T[rows],
            w_VD,
            None if offset_T is None else offset_T[rows],
            common_D,
            *out_TD.stride(),
            product_TD.stride(0),
            w_VD.stride(0),
            width,
            BLOCK_D=block_d,
            num_warps=warps,
        )

    if out_TD.dtype == product_TD.dtype or out_TD.data_ptr() != product_TD.data_ptr():
        run(out_TD, slice(0, out_TD.shape[0]))
        return
    # dx goes into the product's own memory, with half of its element size: a launch reads rows n to 2n and writes where
    # rows n/2 to n were, which earlier launches have read. The first rows go into a buffer, and are copied at the end.
    aside_TD = torch.empty_like(out_TD[:_ASIDE])
    run(aside_TD, slice(0, _ASIDE))
    start = _ASIDE
    while start < out_TD.shape[0]:
        rows = slice(start, min(2 * start, out_TD.shape[0]))
        run(out_TD[rows], rows)
        start = rows.stop
    out_TD[:_ASIDE] = aside_TD


def scale_rows(out_TD: Tensor, x_TD: Tensor, scale_T: Tensor) -> None:
    """Scale rows in one launch, bound by memory bandwidth. See `row_passes/label_terms.py`."""
    (tokens, width), x_TD = x_TD.shape, rowwise(x_TD)
    block_d, warps = blocks.sizes(blocks.WIDTH, width, scale_T.dtype == torch.float64)
    grid, strides = (tokens, triton.cdiv(width, block_d)), (out_TD.stride(0), x_TD.stride(0))
    given = writable(out_TD), x_TD, scale_T.contiguous()
    launch(_scale_rows_kernel, grid, *given, *strides, width, BLOCK_D=block_d, num_warps=warps)

"""Passes of a top-k in Triton, with the arguments and results of `megatron_ext.head.row_passes.selection`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import packed, rowwise, writable
from megatron_ext.head.kernels.nucleus import key as key_of
from megatron_ext.head.row_passes import selection as plain
from megatron_ext.numerics.launches import launch

_TILE = tl.constexpr(4096)
_NO_KEY, _LAST_KEY = tl.constexpr(-2147483648), tl.constexpr(2147483647)


@triton.jit
def _wide(x):
    """Return `x` in fp32, or an fp64 `x` as it is: Triton's interpreter has no bf16 arithmetic."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_maxima_kernel(z_ptr, out_ptr, z_stride, groups, WIDTH: tl.constexpr, TOGETHER: tl.constexpr):
    """Write maxima of TOGETHER groups of WIDTH columns of one row. z_ptr: `[T, V]`; out_ptr: `[T, groups]`, written."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    columns = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    z = tl.load(z_ptr + token * z_stride + columns, mask=group[:, None] < groups, other=float("-inf"))
    largest = tl.reduce(_wide(z), 1, _larger).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * groups + group, largest, mask=group < groups)


@triton.jit
def _key(z):
    """Return int32 keys that compare as the fp32 numbers do, NaN above all; no key is `_NO_KEY`."""
    return tl.where(z == z, key_of(z), _LAST_KEY)


@triton.jit
def _kth_largest(key, k):
    """Return the k-th largest of the keys, found by bisection between the least and the largest key."""
    low, high = tl.min(key, 0).to(tl.int64), tl.max(key, 0).to(tl.int64) + 1
    while high - low > 1:  # at least k keys are >= `low`, fewer are >= `high`
        middle = (low + high) >> 1
        enough = tl.sum((key >= middle.to(tl.int32)).to(tl.int32), 0) >= k
        low, high = tl.where(enough, middle, low), tl.where(enough, high, middle)
    return low.to(tl.int32)


@triton.jit
def first_columns_kernel(
    z_ptr,
    groups_ptr,
    keys_ptr,
    columns_ptr,
    out_ptr,
    z_stride,
    columns,
    groups,
    k,
    WIDTH: tl.constexpr,
    LANES: tl.constexpr,
    WIDEST: tl.constexpr,
):
    """Find a row's k largest logits among columns held in registers: first the k-th largest key; then, if more than k
    keys are at least that large, the last column to take. Each chosen column goes to the index that its rank gives.

    Args:
        z_ptr: `[T, V]`, logits, V is `columns`. groups_ptr: `[T, groups]`, int64: groups of WIDTH columns.
        keys_ptr: `[T, k]`, columns_ptr: `[T, k]`, int32, scratch memory. out_ptr: `[T, k]`, int64, written.
        WIDEST: k rounded up to a power of two.
    """
    token, lane = tl.program_id(0).to(tl.int64), tl.arange(0, LANES)
    column, inside = lane, lane < columns
    if groups_ptr is not None:
        in_groups = groups * WIDTH
        group = tl.load(groups_ptr + token * groups + lane // WIDTH, mask=lane < in_groups, other=0).to(tl.int32)
        behind = columns // WIDTH * WIDTH + lane - in_groups
        column = tl.where(lane < in_groups, group * WIDTH + lane % WIDTH, behind)
        inside = column < columns
    z = tl.load(z_ptr + token * z_stride + column, mask=inside, other=0.0).to(tl.float32)
    key = tl.where(inside, _key(z), _NO_KEY)
    kth = _kth_largest(key, k)
    chosen = inside & (key >= kth)
    if tl.sum(chosen.to(tl.int32), 0) > k:
        wanted = k - tl.sum((key > kth).to(tl.int32), 0)
        last = -_kth_largest(tl.where(inside & (key == kth), -column, _NO_KEY), wanted)
        chosen = inside & ((key > kth) | ((key == kth) & (column <= last)))

    keys_ptr, columns_ptr = keys_ptr + token * k, columns_ptr + token * k
    place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(keys_ptr + place, key, mask=chosen)
    tl.store(columns_ptr + place, column, mask=chosen)
    tl.debug_barrier()  # other threads read the keys and columns
    own = tl.arange(0, WIDEST)
    own_key = tl.load(keys_ptr + own, mask=own < k, other=_NO_KEY)[:, None]
    own_column = tl.load(columns_ptr + own, mask=own < k, other=0)
    before = tl.zeros([WIDEST], tl.int32)
    for start in range(0, k, _TILE // WIDEST):
        other = start + tl.arange(0, _TILE // WIDEST)
        other_key = tl.load(keys_ptr + other, mask=other < k, other=_NO_KEY)[None, :]
        other_column = tl.load(columns_ptr + other, mask=other < k, other=0)[None, :]
        lower = (other_key == own_key) & (other_column < own_column[:, None]) & (other[None, :] < k)
        before += tl.sum(((other_key > own_key) | lower).to(tl.int32), 1)
    tl.store(out_ptr + token * k + before, own_column.to(tl.int64), mask=own < k)


@triton.jit
def equal_counts_kernel(z_ptr, found_ptr, count_ptr, z_stride, columns, candidates, k, LANES: tl.constexpr):
    """Count a row's equals of its k-th largest logit. The whole row is read only if its last candidate is equal too.

    z_ptr: `[T, V]`, V is `columns`; found_ptr: `[T, candidates]`, logits, falling; count_ptr: `[T]`, int64, written.
    """
    token = tl.program_id(0).to(tl.int64)
    found_ptr += token * candidates
    kth, last = _wide(tl.load(found_ptr + k - 1)), _wide(tl.load(found_ptr + candidates - 1))
    row_ptr, length = found_ptr, candidates
    if last == kth:
        row_ptr, length = z_ptr + token * z_stride, columns
    lane, count = tl.arange(0, LANES), tl.zeros([LANES], tl.int32)
    for at in range(0, length, LANES):
        z = tl.load(row_ptr + at + lane, mask=at + lane < length, other=float("nan"))
        count += (_wide(z) == kth).to(tl.int32)
    tl.store(count_ptr + token, tl.sum(count, 0).to(tl.int64))


@triton.jit
def add_at_equals_kernel(
    out_ptr,
    z_ptr,
    kth_ptr,
    value_ptr,
    besides_ptr,
    out_stride,
    z_stride,
    columns,
    candidates,
    LANES: tl.constexpr,
):
    """Add a token's value in each column whose logit equals the token's k-th logit.

    out_ptr: `[T, V]`, added to, V is `columns`; z_ptr: `[T, V]`; kth_ptr: `[T]`; value_ptr: `[T]`; besides_ptr:
    `[T, candidates]`, int64, columns that are left out.
    """
    token = tl.program_id(0).to(tl.int64)
    value = _wide(tl.load(value_ptr + token))
    if value == 0:
        return
    kth, lane = _wide(tl.load(kth_ptr + token)), tl.arange(0, LANES)
    out_ptr, z_ptr = out_ptr + token * out_stride, z_ptr + token * z_stride
    besides_ptr += token * candidates
    for at in range(0, columns, LANES):
        here = at + lane
        z = tl.load(z_ptr + here, mask=here < columns, other=float("nan"))
        equal = (here < columns) & (_wide(z) == kth)
        if tl.max(equal.to(tl.int32), 0) > 0:
            for place in range(candidates):
                equal = equal & (here != tl.load(besides_ptr + place))
            out = _wide(tl.load(out_ptr + here, mask=equal, other=0.0)) + value
            tl.store(out_ptr + here, out.to(out_ptr.dtype.element_ty), mask=equal)


def group_maxima(z_TV: Tensor, groups: int, width: int) -> Tensor:
    """Return the maxima of groups in one launch, bound by memory bandwidth. See `row_passes/selection.py`."""
    z_TV, together = rowwise(z_TV), blocks.SELECTED // width
    largest_TN = z_TV.new_empty(z_TV.shape[0], groups)
    grid = z_TV.shape[0], triton.cdiv(groups, together)
    launch(group_maxima_kernel, grid, z_TV, largest_TN, z_TV.stride(0), groups, WIDTH=width, TOGETHER=together)
    return largest_TN


def first_columns(z_TV: Tensor, groups_TN: Tensor | None, width: int, k: int, any_equals: bool) -> Tensor:
    """Return the first columns in one launch; equal logits are always in order of columns. See
    `row_passes/selection.py`, whose function is called for fp64, and for rows or a k too large for registers.
    """
    tokens, columns = z_TV.shape
    among = columns if groups_TN is None else groups_TN.shape[1] * width + columns % width
    if z_TV.dtype == torch.float64 or among > blocks.CHOSEN_FROM or k > blocks.CHOSEN or k == 0:
        return plain.first_columns(z_TV, groups_TN, width, k, any_equals)
    z_TV = rowwise(z_TV)
    lanes = triton.next_power_of_2(among)
    out_TK = torch.empty(tokens, k, dtype=torch.int64, device=z_TV.device)
    launch(
        first_columns_kernel,
        (tokens,),
        z_TV,
        packed(groups_TN),
        *(out_TK.new_empty(tokens, k, dtype=torch.int32) for _ in range(2)),
        out_TK,
        z_TV.stride(0),
        columns,
        0 if groups_TN is None else groups_TN.shape[1],
        k,
        WIDTH=width,
        LANES=lanes,
        WIDEST=triton.next_power_of_2(k),
        num_warps=min(max(lanes // 512, 1), 16),
    )
    return out_TK


def equal_counts(z_TV: Tensor, z_TK: Tensor, k: int) -> Tensor:
    """Count equals; rows without equals beyond their candidates are not read. See `row_passes/selection.py`."""
    z_TV, z_TK = rowwise(z_TV), z_TK.contiguous()
    count_T = z_TK.new_empty(z_TK.shape[0], dtype=torch.int64)
    sizes = z_TV.stride(0), z_TV.shape[1], z_TK.shape[1], k
    launch(equal_counts_kernel, (len(count_T),), z_TV, z_TK, count_T, *sizes, LANES=blocks.SELECTED)
    return count_T


def add_at_equals(out_TV: Tensor, z_TV: Tensor, kth_T: Tensor, value_T: Tensor, besides_TK: Tensor) -> None:
    """Add at equals; rows whose value is 0 are not read. See `row_passes/selection.py`."""
    z_TV, (tokens, columns) = rowwise(z_TV), out_TV.shape
    given = writable(out_TV), z_TV, kth_T.contiguous(), value_T.contiguous(), besides_TK.contiguous()
    sizes = out_TV.stride(0), z_TV.stride(0), columns, besides_TK.shape[1]
    launch(add_at_equals_kernel, (tokens if columns else 0,), *given, *sizes, LANES=blocks.SELECTED)

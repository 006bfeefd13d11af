"""Passes of a top-k in Triton: arguments and results as in `megatron_ext.head.row_passes.selection`."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import rowwise, writable


@triton.jit
def _wide(x):
    """In fp32, or in fp64 what is in fp64: the interpreter knows no arithmetic of bf16."""
    return x if x.dtype == tl.float64 else x.to(tl.float32)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def group_maxima_kernel(z_ptr, out_ptr, z_stride, groups, WIDTH: tl.constexpr, TOGETHER: tl.constexpr):
    """TOGETHER groups of one row."""
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
    columns = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    z = tl.load(z_ptr + token * z_stride + columns, mask=group[:, None] < groups, other=float("-inf"))
    largest = tl.reduce(_wide(z), 1, _larger).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * groups + group, largest, mask=group < groups)


@triton.jit
def equal_counts_kernel(z_ptr, found_ptr, count_ptr, z_stride, columns, candidates, k, LANES: tl.constexpr):
    """The whole row is read where its last candidate equals the k-th largest: only then others may."""
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
    """In one launch, at the speed of memory. See `row_passes/selection.py`."""
    z_TV, together = rowwise(z_TV), blocks.SELECTED // width
    largest_TN = z_TV.new_empty(z_TV.shape[0], groups)
    if largest_TN.numel():
        grid = z_TV.shape[0], triton.cdiv(groups, together)
        with torch.cuda.device_of(z_TV):  # Triton launches on the current device, wherever the tensors are
            group_maxima_kernel[grid](z_TV, largest_TN, z_TV.stride(0), groups, WIDTH=width, TOGETHER=together)
    return largest_TN


def equal_counts(z_TV: Tensor, z_TK: Tensor, k: int) -> Tensor:
    """Rows without equals beyond their candidates are not read. See `row_passes/selection.py`."""
    z_TV, z_TK = rowwise(z_TV), z_TK.contiguous()
    count_T = z_TK.new_empty(z_TK.shape[0], dtype=torch.int64)
    if len(count_T):
        with torch.cuda.device_of(z_TV):
            equal_counts_kernel[(len(count_T),)](
                z_TV, z_TK, count_T, z_TV.stride(0), z_TV.shape[1], z_TK.shape[1], k, LANES=blocks.SELECTED
            )
    return count_T


def add_at_equals(out_TV: Tensor, z_TV: Tensor, kth_T: Tensor, value_T: Tensor, besides_TK: Tensor) -> None:
    """Rows whose value is 0 are not read. See `row_passes/selection.py`."""
    if out_TV.numel() == 0:
        return
    z_TV = rowwise(z_TV)
    with torch.cuda.device_of(out_TV):
        add_at_equals_kernel[(out_TV.shape[0],)](
            writable(out_TV),
            z_TV,
            kth_T.contiguous(),
            value_T.contiguous(),
            besides_TK.contiguous(),
            out_TV.stride(0),
            z_TV.stride(0),
            out_TV.shape[1],
            besides_TK.shape[1],
            LANES=blocks.SELECTED,
        )

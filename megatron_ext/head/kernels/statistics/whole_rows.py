"""The statistics kernel of rows that fit into a program's registers: each is read once."""

import triton
import triton.language as tl

from megatron_ext.head.kernels.logits import logits
from megatron_ext.head.kernels.statistics.row_sums import (
    NOWHERE,
    label_logit,
    lowest,
    put_label_out,
    sums,
    write_statistics,
)


@triton.jit
def whole_row_kernel(
    z_ptr,
    target_ptr,
    stats_ptr,
    exp_ptr,
    shift_ptr,
    bias_ptr,
    z_stride,
    target_stride,
    stats_stride_k,
    stats_stride_t,
    exp_stride,
    kept_columns,
    counted,
    softcap: tl.float64,
    temperature: tl.float64,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    WITH_MEAN: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_HITS: tl.constexpr,
    DTYPE: tl.constexpr,
    FIRST_WHOLE: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    FIRST_KEPT: tl.constexpr,
):
    """A row in registers, as FIRST columns (FIRST_WHOLE: they all count) and REST more, which may be none.

    Exponentials are kept of `kept_columns`, with FIRST_KEPT of all of the first ones.
    """
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + token * target_stride).to(tl.int32)
    z_ptr += token * z_stride
    if exp_ptr is not None:
        exp_ptr += token * exp_stride
    row = (z_ptr, bias_ptr, counted, tl.full([], softcap, DTYPE), tl.full([], temperature, DTYPE))
    at_target, slope = label_logit(row, target, HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE)
    columns = tl.arange(0, FIRST)
    z = logits(row, columns, not FIRST_WHOLE, HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE)
    peak = tl.max(z, 0)
    if REST:
        more_columns = FIRST + tl.arange(0, REST)
        more_z = logits(row, more_columns, True, HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE)
        peak = tl.maximum(peak, tl.max(more_z, 0))
    base = tl.maximum(peak, lowest(DTYPE))
    e, total, inner, mean_sum, finite_count = sums(z, base, 0, WITH_MEAN, WITH_ENTROPY, DTYPE)
    first = NOWHERE
    if WITH_HITS:
        first = tl.min(tl.where(z == peak, columns, NOWHERE), 0)
    if REST:
        more_e, more_total, more_inner, more_mean_sum, more_count = sums(
            more_z, base, 0, WITH_MEAN, WITH_ENTROPY, DTYPE
        )
        total, inner = total + more_total, inner + more_inner
        mean_sum, finite_count = mean_sum + more_mean_sum, finite_count + more_count
        if WITH_HITS:
            first = tl.minimum(first, tl.min(tl.where(more_z == peak, more_columns, NOWHERE), 0))
    found = (peak, total, at_target, mean_sum, finite_count, inner, first == target, slope)
    stats_ptr += token * stats_stride_t
    write_statistics(stats_ptr, stats_stride_k, found, WITH_MEAN, WITH_ENTROPY, WITH_HITS, HAS_SOFTCAP, DTYPE)
    if shift_ptr is not None:
        tl.store(shift_ptr + token, tl.where(peak > float("-inf"), peak, 0.0))
    if exp_ptr is not None:
        if FIRST_KEPT:
            tl.store(exp_ptr + columns, e.to(exp_ptr.dtype.element_ty))
        else:
            tl.store(exp_ptr + columns, e.to(exp_ptr.dtype.element_ty), mask=columns < kept_columns)
        if REST:
            tl.store(exp_ptr + more_columns, more_e.to(exp_ptr.dtype.element_ty), mask=more_columns < kept_columns)
        put_label_out(exp_ptr, target, kept_columns)

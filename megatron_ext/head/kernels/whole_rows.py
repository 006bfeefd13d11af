"""The statistics kernel of rows that fit into a program's registers: each is read once."""

import triton
import triton.language as tl

from megatron_ext.head.kernels.logits import logits
from megatron_ext.head.kernels.row_sums import NOWHERE, label_logit, lowest, sums, write_statistics


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
    HAS_EXP: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
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
    softcap, temperature = tl.full([], softcap, DTYPE), tl.full([], temperature, DTYPE)
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + token * target_stride).to(tl.int32)
    z_ptr += token * z_stride
    exp_ptr += token * exp_stride
    at_target, slope = label_logit(
        z_ptr, bias_ptr, target, softcap, temperature, HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE, DTYPE
    )
    columns = tl.arange(0, FIRST)
    z = logits(
        z_ptr,
        bias_ptr,
        columns,
        counted,
        softcap,
        temperature,
        not FIRST_WHOLE,
        HAS_BIAS,
        HAS_SOFTCAP,
        HAS_TEMPERATURE,
        DTYPE,
    )
    peak = tl.max(z, 0)
    if REST:
        more_columns = FIRST + tl.arange(0, REST)
        more_z = logits(
            z_ptr,
            bias_ptr,
            more_columns,
            counted,
            softcap,
            temperature,
            True,
            HAS_BIAS,
            HAS_SOFTCAP,
            HAS_TEMPERATURE,
            DTYPE,
        )
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
    write_statistics(
        stats_ptr + token * stats_stride_t,
        stats_stride_k,
        peak,
        total,
        at_target,
        mean_sum,
        finite_count,
        inner,
        first == target,
        slope,
        WITH_MEAN,
        WITH_ENTROPY,
        WITH_HITS,
        HAS_SOFTCAP,
        DTYPE,
    )
    if HAS_SHIFT:
        tl.store(shift_ptr + token, tl.where(peak > float("-inf"), peak, 0.0))
    if HAS_EXP:
        if FIRST_KEPT:
            tl.store(exp_ptr + columns, e.to(exp_ptr.dtype.element_ty))
        else:
            tl.store(exp_ptr + columns, e.to(exp_ptr.dtype.element_ty), mask=columns < kept_columns)
        if REST:
            tl.store(exp_ptr + more_columns, more_e.to(exp_ptr.dtype.element_ty), mask=more_columns < kept_columns)
        tl.debug_barrier()  # the label's 0 comes after all other threads' numbers
        tl.store(exp_ptr + target, tl.zeros([], exp_ptr.dtype.element_ty), mask=(target >= 0) & (target < kept_columns))

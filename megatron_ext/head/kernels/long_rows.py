"""The statistics kernel of rows that are too wide for a program's registers: each is read twice.

Each thread first keeps the maximum of what it sees and its sums relative to it, with nothing to exchange on the way.
The second time, the row's maximum is known and the exponentials are written.
"""

import triton
import triton.language as tl

from megatron_ext.head.kernels.logits import FAR, exp, logits
from megatron_ext.head.kernels.row_sums import NOWHERE, label_logit, lowest, sums, write_statistics


@triton.jit
def _seen(
    z,
    columns,
    peak,
    total,
    inner,
    mean_sum,
    finite_count,
    first,
    WITH_MEAN: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_HITS: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Each lane's statistics with `z` `[STEPS, LANES]` among what it has seen."""
    highest = tl.max(z, 0)
    new_peak = tl.maximum(peak, highest)
    if WITH_HITS:
        candidate = tl.min(tl.where(z == highest[None, :], columns, NOWHERE), 0)
        first = tl.where(highest > peak, candidate, first)
    _, more, more_inner, more_mean_sum, more_count = sums(z, new_peak[None, :], 0, WITH_MEAN, WITH_ENTROPY, DTYPE)
    moved = tl.maximum(peak - new_peak, FAR)  # how far the earlier sums lie off
    fade = exp(moved)
    if WITH_ENTROPY:
        inner = fade * (inner + moved * total) + more_inner
    total = fade * total + more
    if WITH_MEAN:
        mean_sum += tl.where(finite_count > 0, finite_count * (peak - new_peak), 0.0) + more_mean_sum
        finite_count += more_count
    return new_peak, total, inner, mean_sum, finite_count, first


@triton.jit
def long_row_kernel(
    z_ptr,
    target_ptr,
    stats_ptr,
    exp_ptr,
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
    WITH_MEAN: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_HITS: tl.constexpr,
    DTYPE: tl.constexpr,
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """A row by blocks of STEPS * LANES columns, the last of which may reach past its end."""
    softcap, temperature = tl.full([], softcap, DTYPE), tl.full([], temperature, DTYPE)
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + token * target_stride).to(tl.int32)
    z_ptr += token * z_stride
    exp_ptr += token * exp_stride
    at_target, slope = label_logit(
        z_ptr, bias_ptr, target, softcap, temperature, HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE, DTYPE
    )
    block = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = counted // (STEPS * LANES) * (STEPS * LANES)

    peak = tl.zeros([LANES], DTYPE) + lowest(DTYPE)
    total = tl.zeros([LANES], DTYPE)
    inner, mean_sum, finite_count = total, total, total
    first = tl.full([LANES], NOWHERE, tl.int32)
    for start in range(0, whole, STEPS * LANES):
        z = logits(
            z_ptr,
            bias_ptr,
            start + block,
            counted,
            softcap,
            temperature,
            False,
            HAS_BIAS,
            HAS_SOFTCAP,
            HAS_TEMPERATURE,
            DTYPE,
        )
        peak, total, inner, mean_sum, finite_count, first = _seen(
            z,
            start + block,
            peak,
            total,
            inner,
            mean_sum,
            finite_count,
            first,
            WITH_MEAN,
            WITH_ENTROPY,
            WITH_HITS,
            DTYPE,
        )
    if whole < counted:
        z = logits(
            z_ptr,
            bias_ptr,
            whole + block,
            counted,
            softcap,
            temperature,
            True,
            HAS_BIAS,
            HAS_SOFTCAP,
            HAS_TEMPERATURE,
            DTYPE,
        )
        peak, total, inner, mean_sum, finite_count, first = _seen(
            z,
            whole + block,
            peak,
            total,
            inner,
            mean_sum,
            finite_count,
            first,
            WITH_MEAN,
            WITH_ENTROPY,
            WITH_HITS,
            DTYPE,
        )

    base = tl.max(peak, 0)
    moved = tl.maximum(peak - base, FAR)
    fade = exp(moved)
    if WITH_ENTROPY:
        inner = fade * (inner + moved * total)
    if WITH_MEAN:
        mean_sum += tl.where(finite_count > 0, finite_count * (peak - base), 0.0)
    if WITH_HITS:
        first = tl.where(peak == base, first, NOWHERE)
    all_total = tl.sum(fade * total, 0)
    write_statistics(
        stats_ptr + token * stats_stride_t,
        stats_stride_k,
        tl.where(all_total == 0.0, float("-inf"), base),
        all_total,
        at_target,
        tl.sum(mean_sum, 0),
        tl.sum(finite_count, 0),
        tl.sum(inner, 0),
        tl.min(first, 0) == target,
        slope,
        WITH_MEAN,
        WITH_ENTROPY,
        WITH_HITS,
        HAS_SOFTCAP,
        DTYPE,
    )

    if HAS_EXP:
        kept = tl.minimum(whole, kept_columns // (STEPS * LANES) * (STEPS * LANES))
        for start in range(0, kept, STEPS * LANES):
            columns = start + block
            z = logits(
                z_ptr,
                bias_ptr,
                columns,
                counted,
                softcap,
                temperature,
                False,
                HAS_BIAS,
                HAS_SOFTCAP,
                HAS_TEMPERATURE,
                DTYPE,
            )
            tl.store(exp_ptr + columns, exp(z - base).to(exp_ptr.dtype.element_ty))
        for start in range(kept, kept_columns, STEPS * LANES):
            columns = start + block
            z = logits(
                z_ptr,
                bias_ptr,
                columns,
                counted,
                softcap,
                temperature,
                True,
                HAS_BIAS,
                HAS_SOFTCAP,
                HAS_TEMPERATURE,
                DTYPE,
            )
            tl.store(exp_ptr + columns, exp(z - base).to(exp_ptr.dtype.element_ty), mask=columns < kept_columns)
        tl.debug_barrier()  # the label's 0 comes after all other threads' numbers
        tl.store(exp_ptr + target, tl.zeros([], exp_ptr.dtype.element_ty), mask=(target >= 0) & (target < kept_columns))

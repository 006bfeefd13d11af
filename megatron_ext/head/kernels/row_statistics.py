"""`row_statistics` in Triton: the same arguments and results as in `megatron_ext.head.rows`.

One program has one token, `T` of them in all. A row that fits into a program's registers is read once. A wider one is
read twice: each thread first keeps the maximum of what it sees and its sums relative to it, with nothing to exchange on
the way; the second time, the row's maximum is known and the exponentials are written. Offsets are 64-bit: T * V/R may
pass 2^31. Nothing is read back to the host and nothing is allocated, so it can be captured in a CUDA graph.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import FAR, bend, exp, logits, raw, rowwise, transformed, writable

# The least finite number that each dtype holds: a reference that can be subtracted, and no logit's exponential is 0
# relative to a larger one.
_LOWEST, _LOWEST_DOUBLE = tl.constexpr(-3.4028234663852886e38), tl.constexpr(-1.7976931348623157e308)
_NOWHERE = tl.constexpr(2147483647)


@triton.jit
def _lowest(DTYPE: tl.constexpr):
    if tl.float64 == DTYPE:
        return tl.full([], _LOWEST_DOUBLE, DTYPE)
    return tl.full([], _LOWEST, DTYPE)


@triton.jit
def _at_target(
    z_ptr,
    bias_ptr,
    target,
    softcap,
    temperature,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The label's logit, -inf if another shard has it, and the softcap's slope there, 0 then."""
    owned = target >= 0
    z = raw(z_ptr, bias_ptr, target, owned, True, HAS_BIAS, DTYPE)
    slope = tl.full([], 0.0, DTYPE)
    if HAS_SOFTCAP:
        slope = tl.where(owned, bend(z / softcap), slope)
    z = transformed(z, softcap, temperature, HAS_SOFTCAP, HAS_TEMPERATURE)
    return tl.where(owned, z, float("-inf")), slope


@triton.jit
def _sums(z, reference, axis: tl.constexpr, WITH_MEAN: tl.constexpr, WITH_ENTROPY: tl.constexpr, DTYPE: tl.constexpr):
    """Exponentials relative to `reference`, and over `axis` their sum, sum e (z - reference), sum (z - reference) and
    count of the finite."""
    far = z - reference
    e = exp(far)
    total = tl.sum(e, axis)
    inner, mean_sum, finite_count = total, total, total
    if WITH_ENTROPY:
        inner = tl.sum(e * tl.maximum(far, FAR), axis)
    if WITH_MEAN:
        finite = far > float("-inf")
        mean_sum = tl.sum(tl.where(finite, far, 0.0), axis)
        finite_count = tl.sum(finite.to(DTYPE), axis)
    return e, total, inner, mean_sum, finite_count


@triton.jit
def _write_statistics(
    stats_ptr,
    stats_stride_k,
    peak,
    total,
    at_target,
    mean_sum,
    finite_count,
    inner,
    hit,
    slope,
    WITH_MEAN: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_HITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    tl.store(stats_ptr, peak)
    tl.store(stats_ptr + stats_stride_k, total)
    tl.store(stats_ptr + 2 * stats_stride_k, tl.minimum(at_target, peak))
    extra_ptr = stats_ptr + 3 * stats_stride_k
    if WITH_MEAN:
        tl.store(extra_ptr, mean_sum)
        tl.store(extra_ptr + stats_stride_k, finite_count)
        extra_ptr += 2 * stats_stride_k
    if WITH_ENTROPY:
        tl.store(extra_ptr, inner)
        extra_ptr += stats_stride_k
    if WITH_HITS:
        tl.store(extra_ptr, (hit & (peak > float("-inf"))).to(DTYPE))
        extra_ptr += stats_stride_k
    if HAS_SOFTCAP:
        tl.store(extra_ptr, slope)


@triton.jit
def _whole_row_kernel(
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
    at_target, slope = _at_target(
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
    base = tl.maximum(peak, _lowest(DTYPE))
    e, total, inner, mean_sum, finite_count = _sums(z, base, 0, WITH_MEAN, WITH_ENTROPY, DTYPE)
    first = _NOWHERE
    if WITH_HITS:
        first = tl.min(tl.where(z == peak, columns, _NOWHERE), 0)
    if REST:
        more_e, more_total, more_inner, more_mean_sum, more_count = _sums(
            more_z, base, 0, WITH_MEAN, WITH_ENTROPY, DTYPE
        )
        total, inner = total + more_total, inner + more_inner
        mean_sum, finite_count = mean_sum + more_mean_sum, finite_count + more_count
        if WITH_HITS:
            first = tl.minimum(first, tl.min(tl.where(more_z == peak, more_columns, _NOWHERE), 0))
    _write_statistics(
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
    if HAS_EXP:
        if FIRST_KEPT:
            tl.store(exp_ptr + columns, e.to(exp_ptr.dtype.element_ty))
        else:
            tl.store(exp_ptr + columns, e.to(exp_ptr.dtype.element_ty), mask=columns < kept_columns)
        if REST:
            tl.store(exp_ptr + more_columns, more_e.to(exp_ptr.dtype.element_ty), mask=more_columns < kept_columns)
        tl.debug_barrier()  # the label's 0 comes after all other threads' numbers
        tl.store(exp_ptr + target, tl.zeros([], exp_ptr.dtype.element_ty), mask=(target >= 0) & (target < kept_columns))


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
        candidate = tl.min(tl.where(z == highest[None, :], columns, _NOWHERE), 0)
        first = tl.where(highest > peak, candidate, first)
    _, more, more_inner, more_mean_sum, more_count = _sums(z, new_peak[None, :], 0, WITH_MEAN, WITH_ENTROPY, DTYPE)
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
def _long_row_kernel(
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
    at_target, slope = _at_target(
        z_ptr, bias_ptr, target, softcap, temperature, HAS_BIAS, HAS_SOFTCAP, HAS_TEMPERATURE, DTYPE
    )
    block = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = counted // (STEPS * LANES) * (STEPS * LANES)

    peak = tl.zeros([LANES], DTYPE) + _lowest(DTYPE)
    total = tl.zeros([LANES], DTYPE)
    inner, mean_sum, finite_count = total, total, total
    first = tl.full([LANES], _NOWHERE, tl.int32)
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
        first = tl.where(peak == base, first, _NOWHERE)
    all_total = tl.sum(fade * total, 0)
    _write_statistics(
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


def row_statistics(
    z_TV: Tensor,
    target_T: Tensor,
    stats_KT: Tensor,
    exp_TV: Tensor | None,
    bias_V: Tensor | None,
    counted: int,
    softcap: float | None,
    temperature: float,
    with_mean: bool,
    with_entropy: bool,
    with_hits: bool,
) -> None:
    """Each row's statistics and exponentials in one launch. See `megatron_ext.head.rows.row_statistics`."""
    tokens, columns = z_TV.shape
    if tokens == 0:
        return
    z_TV = rowwise(z_TV)
    more = bias_V is not None or softcap is not None or with_mean or with_entropy or with_hits
    double = stats_KT.dtype == torch.float64
    sizes = blocks.whole_row(columns, counted, more, double)
    kernel = _long_row_kernel if sizes is None else _whole_row_kernel
    constants, warps = blocks.long_row(more, double) if sizes is None else sizes
    kept = stats_KT if exp_TV is None else writable(exp_TV)
    kept_columns = 0 if exp_TV is None else exp_TV.shape[1]
    if sizes is not None:
        constants["FIRST_KEPT"] = constants["FIRST"] <= kept_columns
    with torch.cuda.device_of(z_TV):  # Triton launches on the current device, wherever the tensors are
        kernel[(tokens,)](
            z_TV,
            target_T,
            stats_KT,
            kept,
            stats_KT if bias_V is None else bias_V.contiguous(),
            z_TV.stride(0),
            target_T.stride(0),
            stats_KT.stride(0),
            stats_KT.stride(1),
            kept.stride(0),
            kept_columns,
            counted,
            1.0 if softcap is None else softcap,
            temperature,
            HAS_BIAS=bias_V is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_TEMPERATURE=temperature != 1.0,
            HAS_EXP=exp_TV is not None,
            WITH_MEAN=with_mean,
            WITH_ENTROPY=with_entropy,
            WITH_HITS=with_hits,
            DTYPE=tl.float64 if double else tl.float32,
            **constants,
            num_warps=warps,
        )

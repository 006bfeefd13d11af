"""Parts of both statistics kernels: the label's logit, sums relative to a reference, and what is written."""

import triton
import triton.language as tl

from megatron_ext.head.kernels.logits import FAR, bend, exp, raw, transformed

# The least finite number of each dtype: a reference that can be subtracted, and no logit's exponential is 0 relative to
# a larger one.
_LOWEST, _LOWEST_DOUBLE = tl.constexpr(-3.4028234663852886e38), tl.constexpr(-1.7976931348623157e308)
NOWHERE = tl.constexpr(2147483647)


@triton.jit
def lowest(DTYPE: tl.constexpr):
    if tl.float64 == DTYPE:
        return tl.full([], _LOWEST_DOUBLE, DTYPE)
    return tl.full([], _LOWEST, DTYPE)


@triton.jit
def label_logit(row, target, HAS_BIAS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_TEMPERATURE: tl.constexpr):
    """The label's logit, -inf if another shard has it, and the softcap's slope there, 0 then."""
    owned = target >= 0
    z = raw(row, target, owned, True, HAS_BIAS)
    slope = tl.full([], 0.0, z.dtype)
    if HAS_SOFTCAP:
        slope = tl.where(owned, bend(z / row[3]), slope)
    return tl.where(owned, transformed(row, z, HAS_SOFTCAP, HAS_TEMPERATURE), float("-inf")), slope


@triton.jit
def sums(z, reference, axis: tl.constexpr, WITH_MEAN: tl.constexpr, WITH_ENTROPY: tl.constexpr, DTYPE: tl.constexpr):
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
def write_statistics(
    stats_ptr,
    stats_stride_k,
    found,
    WITH_MEAN: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_HITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    peak, total, at_target, mean_sum, finite_count, inner, hit, slope = found
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
def put_label_out(exp_ptr, target, kept_columns):
    """The label's exponential becomes 0, after all other threads' numbers."""
    tl.debug_barrier()
    tl.store(exp_ptr + target, tl.zeros([], exp_ptr.dtype.element_ty), mask=(target >= 0) & (target < kept_columns))

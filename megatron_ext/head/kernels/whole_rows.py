"""The statistics kernel for rows that fit into a program's registers, so that each is read once; and the functions that
the kernel of longer rows shares: the label's logit, sums relative to a reference, and the writing of statistics."""

import triton
import triton.language as tl

from megatron_ext.head.kernels.logits import FAR, bend, exp, logits, lowest, raw, transformed

NOWHERE = tl.constexpr(2147483647)

# The tuple `wants` of these functions: WITH_MEAN, WITH_ENTROPY, WITH_HITS, HAS_SOFTCAP.


@triton.jit
def label_logit(row, target):
    """Return the label's logit and the softcap's slope there: -inf and 0 if another shard has the label."""
    owned = target >= 0
    z = raw(row, target, owned, True)
    slope = tl.full([], 0.0, z.dtype)
    if row[5]:
        slope = tl.where(owned, bend(z / row[3]), slope)
    return tl.where(owned, transformed(row, z), float("-inf")), slope


@triton.jit
def sums(z, reference, axis: tl.constexpr, wants):
    """Return e = exp(z - reference), and over `axis`: sum e, sum e (z - reference), and of the finite logits the sum of
    z - reference and the count. Sums that are not wanted are undefined."""
    WITH_MEAN, WITH_ENTROPY, _, _ = wants
    far = z - reference
    e = exp(far)
    total = tl.sum(e, axis)
    inner, mean_sum, finite_count = total, total, total
    if WITH_ENTROPY:
        inner = tl.sum(e * tl.maximum(far, FAR), axis)
    if WITH_MEAN:
        finite = far > float("-inf")
        mean_sum = tl.sum(tl.where(finite, far, 0.0), axis)
        finite_count = tl.sum(finite.to(far.dtype), axis)
    return e, total, inner, mean_sum, finite_count


@triton.jit
def write_statistics(stats_ptr, stats_stride, found, wants):
    WITH_MEAN, WITH_ENTROPY, WITH_HITS, HAS_SOFTCAP = wants
    peak, total, at_target, mean_sum, finite_count, inner, hit, slope = found
    tl.store(stats_ptr, peak)
    tl.store(stats_ptr + stats_stride, total)
    tl.store(stats_ptr + 2 * stats_stride, tl.minimum(at_target, peak))
    extra_ptr = stats_ptr + 3 * stats_stride
    if WITH_MEAN:
        tl.store(extra_ptr, mean_sum)
        tl.store(extra_ptr + stats_stride, finite_count)
        extra_ptr += 2 * stats_stride
    if WITH_ENTROPY:
        tl.store(extra_ptr, inner)
        extra_ptr += stats_stride
    if WITH_HITS:
        tl.store(extra_ptr, (hit & (peak > float("-inf"))).to(peak.dtype))
        extra_ptr += stats_stride
    if HAS_SOFTCAP:
        tl.store(extra_ptr, slope)


@triton.jit
def put_label_out(exp_ptr, target, kept_columns):
    """Overwrite the label's exponential by 0, after all threads have written theirs."""
    tl.debug_barrier()
    tl.store(exp_ptr + target, tl.zeros([], exp_ptr.dtype.element_ty), mask=(target >= 0) & (target < kept_columns))


@triton.jit
def whole_row_kernel(
    z_ptr,
    target_ptr,
    stats_ptr,
    exp_ptr,
    shift_ptr,
    z_stride,
    stats_stride,
    exp_stride,
    kept_columns,
    counted,
    softcap: tl.float64,
    temperature: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    FIRST_WHOLE: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    FIRST_KEPT: tl.constexpr,
    bias_V=None,
    with_mean: tl.constexpr = False,
    with_entropy: tl.constexpr = False,
    with_hits: tl.constexpr = False,
):
    """Write the statistics of a row in registers: FIRST columns (FIRST_WHOLE: all of them count) and REST more, or 0.

    Exponentials of the first `kept_columns` are written; FIRST_KEPT: these include all FIRST columns. Arguments are as
    for `long_row_kernel`.
    """
    token = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = stats_ptr.dtype.element_ty
    target = tl.load(target_ptr + token).to(tl.int32)
    z_ptr += token * z_stride
    if exp_ptr is not None:
        exp_ptr += token * exp_stride
    softcap, temperature = tl.full([], softcap, DTYPE), tl.full([], temperature, DTYPE)
    row = (z_ptr, bias_V, counted, softcap, temperature, HAS_SOFTCAP, HAS_TEMPERATURE)
    wants = (with_mean, with_entropy, with_hits, HAS_SOFTCAP)
    at_target, slope = label_logit(row, target)
    columns = tl.arange(0, FIRST)
    z = logits(row, columns, not FIRST_WHOLE)
    peak = tl.max(z, 0)
    if REST:
        more_columns = FIRST + tl.arange(0, REST)
        more_z = logits(row, more_columns, True)
        peak = tl.maximum(peak, tl.max(more_z, 0))
    base = tl.maximum(peak, lowest(DTYPE))
    e, total, inner, mean_sum, finite_count = sums(z, base, 0, wants)
    first = NOWHERE
    if with_hits:
        first = tl.min(tl.where(z == peak, columns, NOWHERE), 0)
    if REST:
        more_e, more_total, more_inner, more_mean_sum, more_count = sums(more_z, base, 0, wants)
        total, inner = total + more_total, inner + more_inner
        mean_sum, finite_count = mean_sum + more_mean_sum, finite_count + more_count
        if with_hits:
            first = tl.minimum(first, tl.min(tl.where(more_z == peak, more_columns, NOWHERE), 0))
    found = (peak, total, at_target, mean_sum, finite_count, inner, first == target, slope)
    write_statistics(stats_ptr + token, stats_stride, found, wants)
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

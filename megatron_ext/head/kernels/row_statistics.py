"""`row_statistics` in Triton, with the arguments and results of `megatron_ext.head.row_passes.passes`; and the kernel
for rows too wide for a program's registers. A program takes one token.

Each thread keeps the maximum of its columns, and its sums relative to this maximum; threads exchange nothing until the
end, when the row's maximum is known. The exponentials are written while the row is read a second time.

With SAMPLED they are written in the first reading, relative to the maximum of the row's first block, which in a
language model's vocabulary holds the common tokens. The row is read twice only if its maximum is more than `_REACH`
above that sample. bf16 has fp32's exponents, so exponentials up to e^20 are as precise as those below 1, and so are
factors scaled down by e^-20. SAMPLED is for fp32 logits whose exponentials are kept in bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import FAR, bends, exp, logits, lowest, packed, rowwise, writable
from megatron_ext.head.kernels.whole_rows import (
    NOWHERE,
    label_logit,
    put_label_out,
    sums,
    whole_row_kernel,
    write_statistics,
)
from megatron_ext.numerics.launches import launch

_REACH = tl.constexpr(20.0)


@triton.jit
def _seen(z, columns, found, wants):
    """Return each lane's statistics `found`, updated by the logits `z` `[STEPS, LANES]`."""
    WITH_MEAN, WITH_ENTROPY, WITH_HITS, _ = wants
    peak, total, inner, mean_sum, finite_count, first = found
    highest = tl.max(z, 0)
    new_peak = tl.maximum(peak, highest)
    if WITH_HITS:
        candidate = tl.min(tl.where(z == highest[None, :], columns, NOWHERE), 0)
        first = tl.where(highest > peak, candidate, first)
    _, more, more_inner, more_mean_sum, more_count = sums(z, new_peak[None, :], 0, wants)
    moved = tl.maximum(peak - new_peak, FAR)  # the earlier sums are relative to a maximum lower by this
    fade = exp(moved)
    if WITH_ENTROPY:
        inner = fade * (inner + moved * total) + more_inner
    total = fade * total + more
    if WITH_MEAN:
        mean_sum += tl.where(finite_count > 0, finite_count * (peak - new_peak), 0.0) + more_mean_sum
        finite_count += more_count
    return new_peak, total, inner, mean_sum, finite_count, first


@triton.jit
def _keep(far, columns, kept_columns, exp_ptr, ALL: tl.constexpr):
    """Write the exponentials of the kept columns; ALL: all are kept, and without a mask 16 bytes go at a time."""
    e = exp(far).to(exp_ptr.dtype.element_ty)
    if ALL:
        tl.store(exp_ptr + columns, e)
    else:
        tl.store(exp_ptr + columns, e, mask=columns < kept_columns)


@triton.jit
def long_row_kernel(
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
    STEPS: tl.constexpr,
    LANES: tl.constexpr,
    SAMPLED: tl.constexpr,
    bias_V=None,
    with_mean: tl.constexpr = False,
    with_entropy: tl.constexpr = False,
    with_hits: tl.constexpr = False,
):
    """Write the statistics of a row that is read by blocks of STEPS * LANES columns; the last may be partial.

    Args:
        z_ptr: `[T, V]`, logits. bias_V: `[V]`.
        target_ptr: `[T]`, int64, the label's column, -1 where another shard has it.
        stats_ptr: `[K, T]`, written: rows of `row_passes/passes.py`, by `with_mean`, `with_entropy`, `with_hits`.
        exp_ptr: `[T, kept_columns]`, written: `exp(z - shift)`. shift_ptr: `[T]`, written: the shift.
        counted: columns that count; softcap, temperature: of all logits.
    """
    token = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = stats_ptr.dtype.element_ty
    target = tl.load(target_ptr + token).to(tl.int32)
    z_ptr += token * z_stride
    softcap, temperature = tl.full([], softcap, DTYPE), tl.full([], temperature, DTYPE)
    row = (z_ptr, bias_V, counted, softcap, temperature, HAS_SOFTCAP, HAS_TEMPERATURE)
    wants = (with_mean, with_entropy, with_hits, HAS_SOFTCAP)
    if exp_ptr is not None:
        exp_ptr += token * exp_stride
    at_target, slope = label_logit(row, target)
    block = tl.arange(0, STEPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    whole = counted // (STEPS * LANES) * (STEPS * LANES)
    if SAMPLED:
        whole = tl.minimum(whole, kept_columns // (STEPS * LANES) * (STEPS * LANES))

    sample = tl.full([], 0.0, DTYPE)
    if SAMPLED:
        sample = tl.maximum(tl.max(tl.max(logits(row, block, True), 0), 0), lowest(DTYPE))

    peak = tl.zeros([LANES], DTYPE) + lowest(DTYPE)
    total = tl.zeros([LANES], DTYPE)
    found = (peak, total, total, total, total, tl.full([LANES], NOWHERE, tl.int32))
    for PAST_END in tl.static_range(2):
        for start in range(whole if PAST_END else 0, counted if PAST_END else whole, STEPS * LANES):
            z = logits(row, start + block, PAST_END)
            if SAMPLED:
                _keep(z - sample, start + block, kept_columns, exp_ptr, not PAST_END)
            found = _seen(z, start + block, found, wants)
    peak, total, inner, mean_sum, finite_count, first = found

    base = tl.max(peak, 0)
    moved = tl.maximum(peak - base, FAR)
    fade = exp(moved)
    if with_entropy:
        inner = fade * (inner + moved * total)
    if with_mean:
        mean_sum += tl.where(finite_count > 0, finite_count * (peak - base), 0.0)
    if with_hits:
        first = tl.where(peak == base, first, NOWHERE)
    all_total = tl.sum(fade * total, 0)
    mean_sum, finite_count, inner = tl.sum(mean_sum, 0), tl.sum(finite_count, 0), tl.sum(inner, 0)
    highest = tl.where(all_total == 0.0, float("-inf"), base)
    statistics = (highest, all_total, at_target, mean_sum, finite_count, inner, tl.min(first, 0) == target, slope)
    write_statistics(stats_ptr + token, stats_stride, statistics, wants)

    shift = tl.where(all_total == 0.0, 0.0, base)
    if exp_ptr is not None:
        width = kept_columns
        if SAMPLED:  # done, unless the sample was too low, or kept columns lie past the blocks that were read
            done = (base - sample <= _REACH) & (kept_columns <= tl.cdiv(counted, STEPS * LANES) * (STEPS * LANES))
            shift = tl.where(done & (all_total > 0.0), sample, shift)
            kept_columns = tl.where(done, 0, kept_columns)
        kept = tl.minimum(whole, kept_columns // (STEPS * LANES) * (STEPS * LANES))
        for PAST_END in tl.static_range(2):
            for start in range(kept if PAST_END else 0, kept_columns if PAST_END else kept, STEPS * LANES):
                z = logits(row, start + block, PAST_END)
                _keep(z - base, start + block, kept_columns, exp_ptr, not PAST_END)
        put_label_out(exp_ptr, target, width)
    if shift_ptr is not None:
        tl.store(shift_ptr + token, shift)


def row_statistics(
    z_TV: Tensor,
    target_T: Tensor,
    stats_KT: Tensor,
    exp_TV: Tensor | None = None,
    shift_T: Tensor | None = None,
    bias_V: Tensor | None = None,
    *,
    counted: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    with_mean: bool = False,
    with_entropy: bool = False,
    with_hits: bool = False,
    labelled: bool = False,
) -> None:
    """Write each row's statistics and exponentials in one launch. See `row_passes/passes.py`."""
    (tokens, columns), z_TV = z_TV.shape, rowwise(z_TV)
    more = bias_V is not None or softcap is not None or with_mean or with_entropy or with_hits
    double, kept = stats_KT.dtype == torch.float64, None if exp_TV is None else writable(exp_TV)
    kept_columns = 0 if kept is None else kept.shape[1]
    sizes = blocks.whole_row(columns, counted, more, double)
    constants, warps = blocks.long_row(more, double) if sizes is None else sizes
    if sizes is None:
        constants["SAMPLED"] = kept is not None and (z_TV.dtype, kept.dtype) == (torch.float32, torch.bfloat16)
    else:
        constants["FIRST_KEPT"] = constants["FIRST"] <= kept_columns
    launch(
        long_row_kernel if sizes is None else whole_row_kernel,
        (tokens,),
        z_TV,
        target_T.contiguous(),
        writable(stats_KT),
        kept,
        shift_T,
        z_TV.stride(0),
        stats_KT.stride(0),
        0 if kept is None else kept.stride(0),
        kept_columns,
        num_warps=warps,
        bias_V=packed(bias_V),
        counted=counted,
        with_mean=with_mean,
        with_entropy=with_entropy,
        with_hits=with_hits,
        **constants,
        **bends(softcap, temperature),
    )

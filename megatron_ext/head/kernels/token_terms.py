"""`combined` and `token_gradient` in Triton, one launch each, with the arguments and results of `statistics.combine`
and `logit_gradient.token_gradient`. All arithmetic is fp64; results are rounded when they are stored."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.call.logit_gradient import Basis, GradientParts, PassCoefficients
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import START, Statistics, own_rows
from megatron_ext.head.kernels.logits import packed
from megatron_ext.numerics.launches import launch

_TOKENS, _WARPS = 128, 4  # of a program: 8192 tokens are 64 programs
_START = tl.constexpr(START)


@triton.jit
def _combined_kernel(
    stats_ptr,
    facts_ptr,
    hits_ptr,
    tokens,
    ranks,
    stats_stride_r,
    stats_stride_k,
    stats_stride_t,
    WITH_MEAN: tl.constexpr,
    WITH_EXPECTED: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Combine the statistics of `ranks` shards, for some of `tokens`.

    Args:
        stats_ptr: `[R, K, T + 1]`, every rank's, as `row_statistics` writes them; signed in the last column.
        facts_ptr: `[F, T]`, fp64, written: largest, log_sum, target; WITH_MEAN: mean, columns; WITH_EXPECTED: expected.
        hits_ptr: `[T]`, int8, written.
    """
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = at < tokens
    nothing = tl.zeros([BLOCK_T], tl.float64)
    infinity = nothing + float("inf")

    largest = -infinity
    for rank in range(ranks):
        peak = tl.load(stats_ptr + rank * stats_stride_r + at * stats_stride_t, mask=inside, other=0.0).to(tl.float64)
        largest = tl.where((peak > largest) | (peak != peak), peak, largest)
    reference = tl.where(largest > -infinity, largest, 0.0)

    total, mean_sum, columns, expected = nothing, nothing, nothing, nothing
    target, first, hit = -infinity, infinity, nothing
    for rank in range(ranks):
        row_ptr = stats_ptr + rank * stats_stride_r + at * stats_stride_t
        peak = tl.load(row_ptr, mask=inside, other=0.0).to(tl.float64)
        more = tl.load(row_ptr + stats_stride_k, mask=inside, other=0.0).to(tl.float64)
        label = tl.load(row_ptr + 2 * stats_stride_k, mask=inside, other=0.0).to(tl.float64)
        target = tl.where((label > target) | (label != label), label, target)
        row_ptr += 3 * stats_stride_k
        # `below`: the shard's maximum less that of all. A shard without a finite column has weight 0.
        finite = peak > -infinity
        below = tl.where(finite, peak - reference, 0.0)
        weight = tl.where(finite, tl.exp(below), 0.0)
        total += more * weight
        if WITH_MEAN:
            count = tl.load(row_ptr + stats_stride_k, mask=inside, other=1.0).to(tl.float64)
            mean_sum += tl.load(row_ptr, mask=inside, other=0.0).to(tl.float64) + count * below
            columns += count
            row_ptr += 2 * stats_stride_k
        if WITH_EXPECTED:
            inner = tl.load(row_ptr, mask=inside, other=0.0).to(tl.float64)
            expected += weight * (inner + more * below)
            row_ptr += stats_stride_k
        if hits_ptr is not None:
            start_ptr = stats_ptr + rank * stats_stride_r + _START * stats_stride_k + tokens * stats_stride_t
            start = tl.load(start_ptr).to(tl.float64)
            better = (peak == largest) & ((start < first) | (rank == 0))  # a single rank writes no start
            first = tl.where(better, start, first)
            hit = tl.where(better, tl.load(row_ptr, mask=inside, other=0.0).to(tl.float64), hit)
    total = tl.where(total == 0.0, 1.0, total)  # a row of -inf: its label has -inf, and no NaN arises
    log_sum = tl.log(total)
    target -= reference

    facts_ptr += at
    tl.store(facts_ptr, largest, mask=inside)
    tl.store(facts_ptr + tokens, log_sum, mask=inside)
    tl.store(facts_ptr + 2 * tokens, target, mask=inside)
    facts_ptr += 3 * tokens
    if WITH_MEAN:
        tl.store(facts_ptr, mean_sum / columns, mask=inside)
        tl.store(facts_ptr + tokens, columns, mask=inside)
        facts_ptr += 2 * tokens
    if WITH_EXPECTED:
        tl.store(facts_ptr, expected / total, mask=inside)
    if hits_ptr is not None:
        tl.store(hits_ptr + at, (hit > 0.0).to(tl.int8), mask=inside)


@triton.jit
def _expm1(x):
    """Return e^x - 1 for x <= 0 without cancellation (Kahan's quotient)."""
    u = tl.exp(x)
    inexact = (u != 1.0) & (u > 0.0)
    quotient = (u - 1.0) * x / tl.log(tl.where(inexact, u, 2.0))
    return tl.where(inexact, quotient, tl.where(u > 0.0, x, -1.0))


@triton.jit
def _pulled(grad_ptr, inside, kept, factor):
    return tl.where(kept, tl.load(grad_ptr, mask=inside, other=0.0).to(tl.float64) * factor, 0.0)


@triton.jit
def _token_gradient_kernel(
    largest_ptr,
    log_sum_ptr,
    target_logit_ptr,
    columns_ptr,
    expected_ptr,
    shift_ptr,
    bend_ptr,
    kept_ptr,
    target_ptr,
    grad_log_prob_ptr,
    grad_lse_ptr,
    grad_mean_ptr,
    grad_entropy_ptr,
    out_ptr,
    tokens,
    grad_log_prob_stride,
    grad_lse_stride,
    grad_mean_stride,
    grad_entropy_stride,
    temperature: tl.float64,
    BLOCK_T: tl.constexpr,
):
    """Write the rows of `GradientParts` to `out`: scale; target; the offset, without a softcap; and with an entropy's
    gradient or a softcap the `inside`: scale, slope (entropy), offset (softcap). `logit_gradient.py` defines a, c, d.

    Args:
        largest_ptr: `[T]`, log_sum_ptr: `[T]`, target_logit_ptr: `[T]`, columns_ptr: `[T]`, expected_ptr: `[T]`,
            fp64, of `Statistics`; shift_ptr: `[T]` and bend_ptr: `[T]`, of this shard.
        kept_ptr: `[T]`, int8, which tokens have a gradient. target_ptr: `[T]`, int64, below 0: another shard's label.
        grad_log_prob_ptr: `[T]`, grad_lse_ptr: `[T]`, grad_mean_ptr: `[T]`, grad_entropy_ptr: `[T]`, of `Basis`.
        out_ptr: `[rows, T]`, written. tokens: T. temperature: of all logits.
    """
    at = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    inside = at < tokens
    kept = tl.load(kept_ptr + at, mask=inside, other=0) != 0
    factor = 1.0 / tl.full([], temperature, tl.float64)
    nothing = tl.zeros([BLOCK_T], tl.float64)
    largest = tl.load(largest_ptr + at, mask=inside, other=0.0)
    log_sum = tl.load(log_sum_ptr + at, mask=inside, other=0.0)
    at_label = tl.load(target_logit_ptr + at, mask=inside, other=0.0)
    shift = tl.load(shift_ptr + at, mask=inside, other=0.0).to(tl.float64)

    log_p = tl.where(kept, at_label - log_sum, 0.0)
    p_y = tl.exp(log_p)
    a, d, target = nothing, nothing, nothing
    if grad_log_prob_ptr is not None:
        g = _pulled(grad_log_prob_ptr + at * grad_log_prob_stride, inside, kept, factor)
        a, target = -g, -g * _expm1(log_p)
    if grad_lse_ptr is not None:
        g = _pulled(grad_lse_ptr + at * grad_lse_stride, inside, kept, factor)
        a, target = a + g, target + g * p_y
    if grad_mean_ptr is not None:
        g = _pulled(grad_mean_ptr + at * grad_mean_stride, inside, kept, factor)
        d = g / tl.maximum(tl.load(columns_ptr + at, mask=inside, other=1.0), 1.0)
    alpha = tl.where(kept, tl.exp(tl.minimum(shift - largest - log_sum, 0.0)), 0.0)
    c, away = nothing, nothing
    if grad_entropy_ptr is not None:
        expected = tl.load(expected_ptr + at, mask=inside, other=0.0)
        c = -_pulled(grad_entropy_ptr + at * grad_entropy_stride, inside, kept, factor)
        target += c * p_y * tl.where(kept, tl.maximum(at_label - expected, -1e4), 0.0)  # p_y is 0 further away
        away = tl.where(alpha > 0.0, shift - largest - expected, 0.0)

    out_ptr += at
    dtype = out_ptr.dtype.element_ty
    BENT: tl.constexpr = bend_ptr is not None or grad_entropy_ptr is not None
    scale = a * alpha
    if BENT:
        scale = tl.abs(a)
        if grad_entropy_ptr is not None:
            scale = tl.maximum(scale, tl.abs(c) / 256)
        if bend_ptr is not None and grad_mean_ptr is not None:
            scale = tl.maximum(scale, tl.abs(d) / 256)
    if bend_ptr is not None:
        target = (target + d) * tl.load(bend_ptr + at, mask=inside, other=0.0).to(tl.float64)
    owned = tl.load(target_ptr + at, mask=inside, other=-1) >= 0
    tl.store(out_ptr, scale.to(dtype), mask=inside)
    tl.store(out_ptr + tokens, tl.where(owned, target, 0.0).to(dtype), mask=inside)
    out_ptr += 2 * tokens
    if bend_ptr is None and grad_mean_ptr is not None:
        tl.store(out_ptr, d.to(dtype), mask=inside)
        out_ptr += tokens
    if BENT:
        unit = tl.where(scale > 0.0, scale, 1.0)
        tl.store(out_ptr, (alpha * (a / unit + c / unit * away)).to(dtype), mask=inside)
        out_ptr += tokens
        if grad_entropy_ptr is not None:
            tl.store(out_ptr, (alpha * (c / unit)).to(dtype), mask=inside)
            out_ptr += tokens
        if bend_ptr is not None and grad_mean_ptr is not None:
            tl.store(out_ptr, (d / unit).to(dtype), mask=inside)


def combined(stats_RKT: Tensor, own_KT: Tensor, shift_T: Tensor, call: ResolvedHead) -> Statistics:
    """Combine the statistics of all shards. See `megatron_ext.head.call.statistics.combine`."""
    tokens = shift_T.shape[0]
    facts_FT = shift_T.new_empty(3 + 2 * call.mean + call.expected, tokens, dtype=torch.float64)
    hits_T = torch.empty(tokens, dtype=torch.bool, device=shift_T.device) if call.hits else None
    launch(
        _combined_kernel,
        (triton.cdiv(tokens, _TOKENS),),
        stats_RKT,
        facts_FT,
        None if hits_T is None else hits_T.view(torch.int8),
        tokens,
        stats_RKT.shape[0],
        *stats_RKT.stride(),
        WITH_MEAN=call.mean,
        WITH_EXPECTED=call.expected,
        BLOCK_T=_TOKENS,
        num_warps=_WARPS,
    )
    largest, log_sum, target, *facts = facts_FT.unbind()
    mean, columns = (facts.pop(0), facts.pop(0)) if call.mean else (None, None)
    expected = facts.pop() if call.expected else None
    bend = own_KT[own_rows(call) - 1, :-1] if call.softcap is not None else None
    return Statistics(largest, log_sum, target, shift_T, mean, columns, expected, hits_T, bend)


def token_gradient(
    stats: Statistics, kept_T: Tensor | None, target_T: Tensor, basis: Basis, call: ResolvedHead, labelled: bool = False
) -> GradientParts:
    """Return each token's coefficients. See `megatron_ext.head.call.logit_gradient.token_gradient`."""
    tokens, shift_T = target_T.shape[0], stats.shift
    kept_T = torch.ones_like(target_T, dtype=torch.bool) if kept_T is None else kept_T
    smoothed, capped, inner = basis.mean is not None, call.softcap is not None, basis.entropy is not None
    bent = capped or inner
    rows = 2 + smoothed + (1 + inner if bent else 0)
    out_NT = shift_T.new_empty(rows, tokens)

    launch(
        _token_gradient_kernel,
        (triton.cdiv(tokens, _TOKENS),),
        stats.largest.contiguous(),
        stats.log_sum.contiguous(),
        stats.target.contiguous(),
        packed(stats.columns),
        packed(stats.expected),
        shift_T.contiguous(),
        packed(stats.bend),
        kept_T.contiguous().view(torch.int8),
        target_T.contiguous(),
        *basis,
        out_NT,
        tokens,
        *(0 if grad_T is None else grad_T.stride(0) for grad_T in basis),
        call.temperature,
        BLOCK_T=_TOKENS,
        num_warps=_WARPS,
    )
    scale, target, *rest = out_NT.unbind()
    offset = rest.pop(0) if smoothed and not capped else None
    inside = None
    if bent:
        inside_scale, slope = rest.pop(0), rest.pop(0) if inner else None
        inside = PassCoefficients(inside_scale, slope, rest.pop() if smoothed and capped else None)
    return GradientParts(inside, scale, shift_T, target, offset)

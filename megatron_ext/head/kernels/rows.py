"""`row_statistics` and `row_gradient` in Triton: the same arguments and results as in `megatron_ext.head.rows`.

One program has one token, `T` of them in all. Offsets are 64-bit: T * V/R may pass 2^31. Nothing is read back to the
host and nothing is allocated, so both can be captured in a CUDA graph. A number without a type would arrive in fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels import blocks


@triton.jit
def _tanh(x):
    """tanh, a series near 0, where the quotient cancels: to fp32's precision, and in fp64 to an absolute 1e-16."""
    e = tl.exp(-2.0 * tl.abs(x))
    quotient = (1.0 - e) / (1.0 + e)
    s = x * x
    series = -1382.0 / 155925 + s * (21844.0 / 6081075 + s * (-929569.0 / 638512875))
    series = 1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835 + s * series))))
    return tl.where(tl.abs(x) < 0.15, x * series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def _bend(x):
    """1 - tanh^2, to fp32's precision where tanh is near 1."""
    e = tl.exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


@triton.jit
def _raw(z_ptr, bias_ptr, columns, inside, HAS_BIAS: tl.constexpr, DTYPE: tl.constexpr):
    """The logits of some columns of one token with their bias; -inf where not `inside`."""
    z = tl.load(z_ptr + columns, mask=inside, other=float("-inf")).to(DTYPE)
    if HAS_BIAS:
        z += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(DTYPE)
    return z


@triton.jit
def _logits(
    z_ptr,
    bias_ptr,
    columns,
    counted,
    softcap,
    temperature,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """The logits of some columns of one token, transformed; -inf where they do not count."""
    inside = columns < counted
    z = _raw(z_ptr, bias_ptr, columns, inside, HAS_BIAS, DTYPE)
    if HAS_SOFTCAP:
        z = softcap * _tanh(z / softcap)
    z = z / temperature
    return tl.where(inside, z, float("-inf"))


@triton.jit
def _statistics_kernel(
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
    columns_all,
    counted,
    softcap: tl.float64,
    temperature: tl.float64,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_EXP: tl.constexpr,
    WITH_MEAN: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    WITH_HITS: tl.constexpr,
    WHOLE_ROW: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    softcap, temperature = tl.full([], softcap, DTYPE), tl.full([], temperature, DTYPE)
    token = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + token * target_stride)
    z_ptr += token * z_stride
    exp_ptr += token * exp_stride
    stats_ptr += token * stats_stride_t
    lanes = tl.arange(0, BLOCK_V)
    minus_inf = tl.full([], float("-inf"), DTYPE)
    zero = tl.full([], 0.0, DTYPE)

    peak, total, inner, mean_sum, finite_count, at_target = minus_inf, zero, zero, zero, zero, minus_inf
    first = tl.full([], 2147483647, tl.int32)
    z = tl.full([BLOCK_V], float("-inf"), DTYPE)
    for start in range(0, counted, BLOCK_V):
        columns = start + lanes
        z = _logits(z_ptr, bias_ptr, columns, counted, softcap, temperature, HAS_BIAS, HAS_SOFTCAP, DTYPE)
        highest = tl.max(z, 0)
        new_peak = tl.maximum(peak, highest)
        base = tl.where(new_peak == float("-inf"), zero, new_peak)  # a reference that can be subtracted
        moved = tl.where(peak == float("-inf"), zero, peak - base)  # how far the earlier sums lie off
        if WITH_HITS:
            candidate = tl.min(tl.where(z == highest, columns, 2147483647), 0)
            first = tl.where(highest > peak, candidate, first)
        at_target = tl.maximum(at_target, tl.max(tl.where(columns == target, z, float("-inf")), 0))
        far = z - base
        e = tl.exp(far)
        fade = tl.exp(moved)
        finite = far > float("-inf")
        if WITH_ENTROPY:
            inner = fade * (inner + moved * total) + tl.sum(tl.where(finite, e * far, 0.0), 0)
        total = total * fade + tl.sum(e, 0)
        if WITH_MEAN:
            mean_sum += finite_count * moved + tl.sum(tl.where(finite, far, 0.0), 0)
            finite_count += tl.sum(finite.to(DTYPE), 0)
        peak = new_peak

    tl.store(stats_ptr, peak)
    tl.store(stats_ptr + stats_stride_k, total)
    tl.store(stats_ptr + 2 * stats_stride_k, at_target)
    extra_ptr = stats_ptr + 3 * stats_stride_k
    if WITH_MEAN:
        tl.store(extra_ptr, mean_sum)
        tl.store(extra_ptr + stats_stride_k, finite_count)
        extra_ptr += 2 * stats_stride_k
    if WITH_ENTROPY:
        tl.store(extra_ptr, inner)
        extra_ptr += stats_stride_k
    if WITH_HITS:
        tl.store(extra_ptr, ((first == target) & (peak > float("-inf"))).to(DTYPE))
        extra_ptr += stats_stride_k
    if HAS_SOFTCAP:
        owned = target >= 0
        bend = _bend(_raw(z_ptr, bias_ptr, target, owned, HAS_BIAS, DTYPE) / softcap)
        tl.store(extra_ptr, tl.where(owned, bend, zero))

    if HAS_EXP:
        base = tl.where(peak == float("-inf"), zero, peak)
        for start in range(0, columns_all, BLOCK_V):
            columns = start + lanes
            if not WHOLE_ROW:
                z = _logits(z_ptr, bias_ptr, columns, counted, softcap, temperature, HAS_BIAS, HAS_SOFTCAP, DTYPE)
            e = tl.where(columns == target, 0.0, tl.exp(z - base))
            tl.store(exp_ptr + columns, e.to(exp_ptr.dtype.element_ty), mask=columns < columns_all)


@triton.jit
def _gradient_kernel(
    source_ptr,
    target_ptr,
    shift_ptr,
    scale_ptr,
    slope_ptr,
    offset_ptr,
    value_ptr,
    out_ptr,
    bias_ptr,
    source_stride,
    target_stride,
    out_stride,
    columns_all,
    counted,
    softcap: tl.float64,
    temperature: tl.float64,
    tiny: tl.float64,
    SOURCE_IS_EXP: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    HAS_OFFSET: tl.constexpr,
    HAS_VALUE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    softcap, temperature = tl.full([], softcap, DTYPE), tl.full([], temperature, DTYPE)
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = columns < counted
    target = tl.load(target_ptr + token * target_stride)
    shift = tl.load(shift_ptr + token)
    source_ptr += token * source_stride
    if SOURCE_IS_EXP:
        exp = tl.load(source_ptr + columns, mask=inside, other=0.0).to(DTYPE)
        u = exp
        if HAS_SLOPE or HAS_SOFTCAP:
            u = tl.log(tl.maximum(exp, tl.full([], tiny, DTYPE)))
        if HAS_SOFTCAP:
            tanh = (u + shift) * (temperature / softcap)
            bend = 1.0 - tanh * tanh
    else:
        z = _logits(source_ptr, bias_ptr, columns, counted, softcap, temperature, HAS_BIAS, HAS_SOFTCAP, DTYPE)
        u = z - shift
        exp = tl.exp(u)
        if HAS_SOFTCAP:
            bend = _bend(_raw(source_ptr, bias_ptr, columns, inside, HAS_BIAS, DTYPE) / softcap)
    grad = exp
    if HAS_SLOPE:
        near = tl.maximum(u, -1e4)  # exp(-1e4) is 0, and 0 * -inf would be NaN
        grad = exp * (tl.load(scale_ptr + token) + tl.load(slope_ptr + token) * near)
    elif HAS_SCALE:
        grad = exp * tl.load(scale_ptr + token)
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + token)
        if SOURCE_IS_EXP:
            grad += offset
        else:
            grad += tl.where(u > float("-inf"), offset, 0.0)
    if HAS_SOFTCAP:
        grad = tl.where(u > float("-inf"), grad * bend, 0.0)
    value = tl.zeros([], DTYPE)
    if HAS_VALUE:
        value = tl.load(value_ptr + token)
    grad = tl.where(columns == target, value, grad)
    grad = tl.where(inside, grad, 0.0)
    tl.store(out_ptr + token * out_stride + columns, grad.to(out_ptr.dtype.element_ty), mask=columns < columns_all)


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
    z_TV = _rowwise(z_TV)
    double = stats_KT.dtype == torch.float64
    more = bias_V is not None or softcap is not None or with_mean or with_entropy or with_hits
    block_v, warps = blocks.sizes(blocks.STATISTICS_AND_MORE if more else blocks.STATISTICS, columns, double)
    kept = stats_KT if exp_TV is None else _writable(exp_TV)
    with torch.cuda.device_of(z_TV):  # Triton launches on the current device, wherever the tensors are
        _statistics_kernel[(tokens,)](
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
            columns if exp_TV is None else exp_TV.shape[1],
            counted,
            1.0 if softcap is None else softcap,
            temperature,
            HAS_BIAS=bias_V is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_EXP=exp_TV is not None,
            WITH_MEAN=with_mean,
            WITH_ENTROPY=with_entropy,
            WITH_HITS=with_hits,
            WHOLE_ROW=columns <= block_v,
            DTYPE=tl.float64 if double else tl.float32,
            BLOCK_V=block_v,
            num_warps=warps,
        )


def row_gradient(
    source_TV: Tensor,
    source_is_exp: bool,
    target_T: Tensor,
    shift_T: Tensor,
    scale_T: Tensor | None,
    slope_T: Tensor | None,
    offset_T: Tensor | None,
    value_T: Tensor | None,
    out_TV: Tensor,
    bias_V: Tensor | None,
    counted: int,
    softcap: float | None,
    temperature: float,
) -> None:
    """The gradient of each logit, in one launch. See `megatron_ext.head.rows.row_gradient`."""
    tokens, columns = source_TV.shape
    if tokens == 0 or columns == 0:
        return
    source_TV = _rowwise(source_TV)
    double = shift_T.dtype == torch.float64
    block_v, warps = blocks.sizes(blocks.GRADIENT, columns, double)
    _writable(out_TV)

    def or_shift(x_T: Tensor | None) -> Tensor:
        return shift_T.contiguous() if x_T is None else x_T.contiguous()

    with torch.cuda.device_of(source_TV):  # Triton launches on the current device, wherever the tensors are
        _gradient_kernel[(tokens, triton.cdiv(columns, block_v))](
            source_TV,
            target_T,
            shift_T.contiguous(),
            or_shift(scale_T),
            or_shift(slope_T),
            or_shift(offset_T),
            or_shift(value_T),
            out_TV,
            shift_T if bias_V is None else bias_V.contiguous(),
            source_TV.stride(0),
            target_T.stride(0),
            out_TV.stride(0),
            columns,
            counted,
            1.0 if softcap is None else softcap,
            temperature,
            torch.finfo(shift_T.dtype).tiny,
            SOURCE_IS_EXP=source_is_exp,
            HAS_SCALE=scale_T is not None,
            HAS_SLOPE=slope_T is not None,
            HAS_OFFSET=offset_T is not None,
            HAS_VALUE=value_T is not None,
            HAS_BIAS=bias_V is not None,
            HAS_SOFTCAP=softcap is not None,
            DTYPE=tl.float64 if double else tl.float32,
            BLOCK_V=block_v,
            num_warps=warps,
        )


def _rowwise(x_TV: Tensor) -> Tensor:
    """`x_TV` with neighbouring columns next to each other in memory."""
    return x_TV if x_TV.stride(1) == 1 else x_TV.contiguous()


def _writable(out_TV: Tensor) -> Tensor:
    assert out_TV.shape[1] <= 1 or out_TV.stride(1) == 1, "outputs are made by the head, columns next to each other"
    return out_TV

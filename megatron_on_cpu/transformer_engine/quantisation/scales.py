"""Scales of FP8: from largest numbers, and their update in delayed scaling."""

from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.transformer_engine.enums import TORCH_DTYPES

_LARGEST = torch.finfo(torch.float32).max


def amax_of(x: Tensor, *dims: int) -> Tensor:
    """The largest absolute value over these dims, by default over all; NaN does not count, as in the kernels."""
    if not (dims or x.numel()):
        return x.new_zeros(())
    magnitude = x.abs()
    return magnitude.where(~magnitude.isnan(), 0).amax(dims)


def scale_of_amax(
    amax: Tensor, largest: float, power_of_two: bool, epsilon: float, highest: float = _LARGEST
) -> Tensor:
    """The factor that brings numbers up to `amax` into the range up to `largest`; 1 where amax is 0 or not finite.

    `power_of_two` rounds the factor down to one; `epsilon` is the least amax, `highest` the largest factor.
    """
    amax = amax.clamp(min=epsilon) if epsilon > 0 else amax
    scale = _quotient(largest, amax, highest)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))


def _quotient(largest: float, amax: Tensor, highest: float = _LARGEST) -> Tensor:
    """`largest / amax`, rounded once: a Python number over a tensor is in torch a reciprocal times the number."""
    return torch.full_like(amax, largest).div(amax).clamp(max=highest)


def exponent_of_amax(amax: Tensor, largest: float) -> Tensor:
    """The biased exponent, uint8, of the least power of two that brings numbers up to `amax` into the format."""
    bits = (amax * (1 / largest)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    rounded_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = exponent + rounded_up.to(torch.int32)
    exponent = torch.where(torch.isnan(amax), 0xFF, torch.where(torch.isinf(amax), 0xFE, exponent))
    return torch.where(amax == 0, 0, exponent).to(torch.uint8)


def power_of_exponent(exponent: Tensor) -> Tensor:
    """2 to the power of a biased exponent, in fp32."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent.to(torch.int32) - 127).float()


def cast_to_fp8(scaled: Tensor, number: torch.dtype) -> Tensor:
    """The bytes of the nearest numbers of the format; what is too large becomes the largest."""
    largest = torch.finfo(number).max
    return scaled.clamp(-largest, largest).to(number).view(torch.uint8)


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """The largest absolute value, into `amax`."""
    amax.fill_(amax_of(input.detach().float()))


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Delayed scaling between two steps: amaxes of the step, in one buffer, go to the histories and make new scales.

    A history is `[length, tensors]`, the amaxes of the running step in its first row, which the buffer's replace unless
    they are 0. The other rows move up by one. Where the amax of the step is 0, as of an expert without tokens, history
    and scale stay; so does a scale whose amax is not finite.
    """
    largest = torch.finfo(TORCH_DTYPES[fp8_dtype]).max * 2.0**-margin
    widths = [history.shape[1] for history in amax_histories]
    parts = amax_reduction_buffer.split(widths)
    for reduced, history, scale in zip(parts, amax_histories, scales, strict=True):
        amax = torch.where(reduced != 0, reduced, history[0])
        moved = torch.cat([history[1:], amax[None]])
        used = amax if amax_compute_algo == "most_recent" else amax_of(moved, 0)
        found = _quotient(largest, used)
        scale.copy_(torch.where((amax != 0) & (used > 0) & torch.isfinite(used), found, scale))
        moved[0] = 0
        history.copy_(torch.where(amax != 0, moved, history))


def multi_tensor_compute_scale_and_scale_inv(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: list[list[Tensor]],
    max_fp8: float,
    force_pow_2_scales: bool,
    epsilon: float,
) -> None:
    """Scales of [amaxes, scales, inverse scales]: the latter two from the first."""
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        scale.copy_(scale_of_amax(amax, max_fp8, force_pow_2_scales, epsilon))
        scale_inv.copy_(1 / scale)


def multi_tensor_compute_scale_inv_e8m0(chunk_size: int, dummy: Any, tensor_lists: list[list[Tensor]]) -> None:
    """Exponents of [amaxes, exponents]: the exponents of E4M3 from the amaxes."""
    for amax, exponent in zip(*tensor_lists, strict=True):
        exponent.copy_(exponent_of_amax(amax.float(), torch.finfo(torch.float8_e4m3fn).max))

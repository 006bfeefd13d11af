"""Scales of FP8, computed from amaxes (largest absolute values), and their update in delayed scaling."""

from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.transformer_engine.enums import TORCH_DTYPES

_LARGEST = torch.finfo(torch.float32).max


def amax_of(x: Tensor, *dims: int) -> Tensor:
    """Return the largest absolute value over `dims`, by default over all; NaN does not count, as in the kernels."""
    if not (dims or x.numel()):
        return x.new_zeros(())
    magnitude = x.abs()
    return magnitude.where(~magnitude.isnan(), 0).amax(dims)


def scale_of_amax(
    amax: Tensor, largest: float, power_of_two: bool, epsilon: float, highest: float = _LARGEST
) -> Tensor:
    """Return the factor that brings numbers up to `amax` into the range up to `largest`; 1 if amax is 0 or not finite.

    `power_of_two` rounds the factor down to a power of two; `epsilon` is the least amax, `highest` the largest factor.
    """
    amax = amax.clamp(min=epsilon) if epsilon > 0 else amax
    scale = _quotient(largest, amax, highest)
    if power_of_two:
        scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)
    return torch.where((amax > 0) & torch.isfinite(amax), scale, torch.ones_like(scale))


def _quotient(largest: float, amax: Tensor, highest: float = _LARGEST) -> Tensor:
    """Return `largest / amax`, rounded once: torch computes number / tensor as the number times a reciprocal."""
    return torch.full_like(amax, largest).div(amax).clamp(max=highest)


def exponent_of_amax(amax: Tensor, largest: float) -> Tensor:
    """Return the biased exponent, uint8, of the least power of two p with `amax` / p <= `largest`."""
    bits = (amax * (1 / largest)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    rounded_up = (mantissa > 0) & (exponent != 0xFE) & ~((exponent == 0) & (mantissa <= 0x400000))
    exponent = exponent + rounded_up.to(torch.int32)
    exponent = torch.where(torch.isnan(amax), 0xFF, torch.where(torch.isinf(amax), 0xFE, exponent))
    return torch.where(amax == 0, 0, exponent).to(torch.uint8)


def power_of_exponent(exponent: Tensor) -> Tensor:
    """Return 2 to the power of a biased exponent, in fp32."""
    return torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent.to(torch.int32) - 127).float()


def cast_to_fp8(scaled: Tensor, number: torch.dtype) -> Tensor:
    """Return the bytes of the nearest numbers of the format; larger numbers become its largest."""
    largest = torch.finfo(number).max
    return scaled.clamp(-largest, largest).to(number).view(torch.uint8)


def compute_amax(input: Tensor, amax: Tensor) -> None:
    """Write the largest absolute value of `input` into `amax`."""
    amax.fill_(amax_of(input.detach().float()))


def fused_amax_and_scale_update_after_reduction(
    amax_reduction_buffer: Tensor,
    amax_histories: list[Tensor],
    scales: list[Tensor],
    amax_compute_algo: str,
    fp8_dtype: Any,
    margin: float,
) -> None:
    """Update delayed scaling between two steps: the step's amaxes, in one buffer, enter the histories and the scales.

    A history is `[length, tensors]`; its row 0 has the amaxes of the running step, which those in the buffer replace
    unless they are 0. These amaxes go to the last row, the other rows move up by one, and row 0 becomes 0. Where the
    step's amax is 0, as for an expert without tokens, history and scale stay; so does a scale whose amax is not finite.
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
    """Compute scales and inverse scales from amaxes, in the lists [amaxes, scales, inverse scales]."""
    for amax, scale, scale_inv in zip(*tensor_lists, strict=True):
        scale.copy_(scale_of_amax(amax, max_fp8, force_pow_2_scales, epsilon))
        scale_inv.copy_(1 / scale)


def multi_tensor_compute_scale_inv_e8m0(chunk_size: int, dummy: Any, tensor_lists: list[list[Tensor]]) -> None:
    """Compute the exponents of MXFP8's scales for E4M3 from amaxes, in the lists [amaxes, exponents]."""
    for amax, exponent in zip(*tensor_lists, strict=True):
        exponent.copy_(exponent_of_amax(amax.float(), torch.finfo(torch.float8_e4m3fn).max))

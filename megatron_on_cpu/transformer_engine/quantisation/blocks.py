"""Bytes and scales of tensors that are quantised in blocks: 1 x 128 and 128 x 128 with fp32 scales, and MXFP8.

A tensor is taken as M rows, all leading dims together, of K columns. Scales are laid out as cuBLASLt takes them: those
of 1 x 128 blocks as `[blocks, M]`, padded to multiples of 4; those of MXFP8 padded to multiples of 128 and 4.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_on_cpu.transformer_engine.enums import TORCH_DTYPES, Float8BlockScaleTensorFormat
from megatron_on_cpu.transformer_engine.quantisation.scales import (
    amax_of,
    cast_to_fp8,
    exponent_of_amax,
    power_of_exponent,
    scale_of_amax,
)

_BLOCK, _MX = 128, 32


def compact(tensor: Any) -> bool:
    """Tell whether scales and columns are laid out for an all-gather of rows, not for a product; never in 2.20."""
    return getattr(tensor, "_data_format", None) == Float8BlockScaleTensorFormat.COMPACT


def blocks_of(tensor: Tensor, quantizer: Any, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Return bytes and inverse scales; `columnwise`: of the transpose, whose blocks lie along its last dim too."""
    x = tensor.float().reshape(-1, tensor.shape[-1])
    x = x.t() if columnwise else x
    number = TORCH_DTYPES[quantizer.dtype]
    height = _BLOCK if quantizer.block_scaling_dim == 2 else 1
    amax = amax_of(_in_blocks(x, height, _BLOCK), 1, 3)
    limits = torch.finfo(number).max, quantizer.force_pow_2_scales, quantizer.amax_epsilon
    scale = scale_of_amax(amax, *limits, highest=torch.finfo(tensor.dtype).max)
    data = cast_to_fp8(x * _spread(scale, height, _BLOCK, x.shape), number)
    scale_inv = 1 / scale
    small = quantizer.block_scaling_dim == 1 and getattr(quantizer, "all_gather_usage", False)
    if columnwise and small:
        data = data.t()
    shape = (x.shape[0], *tensor.shape[:-1]) if columnwise and not small else tensor.shape
    if quantizer.block_scaling_dim == 1 and (columnwise or not small):
        scale_inv = scale_inv.t()
    return data.contiguous().view(shape), scale_inv.contiguous() if small else _padded(scale_inv, 1, 4)


def blocks_back(values: Tensor, scale_inv: Tensor, columnwise: bool, two_dims: bool, compact: bool) -> Tensor:
    """Return the numbers that `values` and `scale_inv` stand for, in fp32, with the dims in the tensor's order."""
    turned = columnwise and not (compact and not two_dims)
    x = values.reshape(values.shape[0], -1) if turned else values.reshape(-1, values.shape[-1])
    x = x.t() if columnwise and not turned else x
    height = _BLOCK if two_dims else 1
    scales = scale_inv.t() if not two_dims and (columnwise or not compact) else scale_inv
    x = x * _spread(scales, height, _BLOCK, x.shape)
    if not columnwise:
        return x.view(values.shape)
    x = x.t().contiguous()
    return x.view(*values.shape[1:], values.shape[0]) if turned else x.view(values.shape)


def mx_blocks_of(tensor: Tensor, quantizer: Any, columnwise: bool) -> tuple[Tensor, Tensor]:
    """Return bytes in the shape of `tensor`, and exponents of the scales of blocks along the rows or the columns."""
    number = TORCH_DTYPES[quantizer.dtype]
    x = tensor.float().reshape(-1, tensor.shape[-1])
    height, width = (_MX, 1) if columnwise else (1, _MX)
    amax = amax_of(_in_blocks(x, height, width), 1, 3)
    exponent = exponent_of_amax(amax, torch.finfo(number).max)
    inverse = 1 / power_of_exponent(exponent)
    data = cast_to_fp8(x * _spread(inverse, height, width, x.shape), number)
    exponent = _padded(exponent, 4, 128) if columnwise else _padded(exponent, 128, 4)
    return data.view(tensor.shape), exponent


def mx_back(values: Tensor, exponent: Tensor, columnwise: bool) -> Tensor:
    """Return the numbers that `values` and the scales' exponents stand for, in fp32."""
    x = values.reshape(-1, values.shape[-1])
    height, width = (_MX, 1) if columnwise else (1, _MX)
    return (x * _spread(power_of_exponent(exponent), height, width, x.shape)).view(values.shape)


def _in_blocks(x: Tensor, height: int, width: int) -> Tensor:
    """Return `x` as [blocks down, height, blocks across, width], padded with zeros."""
    full = _padded(x, height, width)
    return full.unflatten(1, (-1, width)).unflatten(0, (-1, height))


def _spread(scale: Tensor, height: int, width: int, shape: torch.Size) -> Tensor:
    """Repeat the scales of blocks so that each number of `shape` has its own."""
    wide = scale.repeat_interleave(height, 0)[: shape[0]]
    return wide.repeat_interleave(width, 1)[:, : shape[1]]


def _padded(x: Tensor, rows: int, columns: int) -> Tensor:
    """Pad `x` with zeros to multiples of `rows` and `columns`."""
    return F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows)).contiguous()

"""FP8 tensors: quantisation with the scales of TE's recipes, and dequantisation.

The bytes and scales are those of the formats, so a product of two FP8 tensors has the error of FP8; the product itself
is computed in fp32. A tensor may hold its rows, its columns, or both: forward reads rows, the gradients read columns,
which blockwise recipes scale differently.

| quantiser | scale |
|---|---|
| Float8Quantizer | given, from the amaxes of earlier steps (delayed scaling) |
| Float8CurrentScalingQuantizer | largest number of the format / amax of the tensor, over a group where asked for |
| Float8BlockQuantizer | the same for each 1 x 128 or 128 x 128 block, as a power of two if so set |
| MXFP8Quantizer | a power of two, stored as the byte of its exponent, for each 32 numbers of a row or column |
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_on_cpu.transformer_engine.enums import TORCH_DTYPES, Float8BlockScaleTensorFormat
from megatron_on_cpu.transformer_engine.quantisation.blocks import (
    blocks_back,
    blocks_of,
    compact,
    mx_back,
    mx_blocks_of,
)
from megatron_on_cpu.transformer_engine.quantisation.scales import amax_of, cast_to_fp8, scale_of_amax

_TENSORS = "transformer_engine.pytorch.tensor"


def quantized(tensor: Any) -> bool:
    """Tell whether `tensor` is one of TE's quantised tensors, or a storage of one's data."""
    return hasattr(tensor, "_fp8_dtype")


def nominal_dtype(tensor: Any) -> torch.dtype:
    """Return the dtype that the tensor stands for; fp32 for a storage without a dtype."""
    found: torch.dtype = getattr(tensor, "dtype", torch.float32)
    return found


def quantize(tensor: Tensor, quantizer: Any, output: Any = None, noop: Tensor | None = None) -> Any:
    """Quantise `tensor` into `output` or a new tensor. Where `noop` is set, `output` and the quantiser's own amax and
    scale keep their values; the host does not read `noop`, so a replayed CUDA graph may find another value."""
    name = type(quantizer).__name__
    if name not in _KINDS:
        raise NotImplementedError(
            f"quantizer is a {name}: the CPU emulation of Transformer Engine has {', '.join(_KINDS)}; choose an FP8 "
            "recipe of these"
        )
    if output is None:
        return _new(tensor, quantizer, _KINDS[name][0](tensor.detach(), quantizer))
    own = [x for x in (getattr(quantizer, kept, None) for kept in ("amax", "scale")) if isinstance(x, Tensor)]
    before = [x.clone() for x in own]
    held = _KINDS[name][0](tensor.detach(), quantizer)
    for now, old in zip(own, before, strict=True):
        _overwrite(now, now.clone(), noop, old)
    for attribute, value in held.items():
        was = getattr(output, "_" + attribute, None)
        if (
            isinstance(was, Tensor)
            and isinstance(value, Tensor)
            and (was.shape, was.dtype) == (value.shape, value.dtype)
        ):
            _overwrite(was, value, noop, was)
        else:
            setattr(output, "_" + attribute, value)
    return output


def _overwrite(target: Tensor, value: Tensor, noop: Tensor | None, kept: Tensor) -> None:
    """Write `value` into `target`, or `kept` where `noop` is set."""
    target.copy_(value if noop is None else torch.where(noop.view(()) != 0, kept, value))


def quantize_into(tensor: Tensor, output: Any, quantizer: Any) -> Any:
    """Return `tensor`, quantised unless `quantizer` is None, in `output` unless that is None."""
    if quantizer is not None:
        return quantize(tensor, quantizer, output)
    return tensor if output is None else output.copy_(tensor)


def dequantize(input: Any, otype: Any) -> Tensor:
    """Return the numbers that an FP8 tensor stands for, in the dtype `otype`."""
    return high_precision(input).to(TORCH_DTYPES[otype])


def high_precision(tensor: Any, columnwise: bool = False) -> Tensor:
    """Return the numbers in fp32; a quantised tensor is read by rows or `columnwise`, or the way it holds them."""
    if not quantized(tensor):
        return tensor.detach().float()
    number = TORCH_DTYPES[tensor._fp8_dtype]
    if hasattr(tensor, "_scale_inv"):
        return _per_tensor(tensor, number, columnwise)
    columnwise = tensor._rowwise_data is None or (columnwise and tensor._columnwise_data is not None)
    data = tensor._columnwise_data if columnwise else tensor._rowwise_data
    scale_inv = tensor._columnwise_scale_inv if columnwise else tensor._rowwise_scale_inv
    values = data.view(number).float()
    if hasattr(tensor, "_is_2D_scaled"):
        return blocks_back(values, scale_inv, columnwise, tensor._is_2D_scaled, compact(tensor))
    return mx_back(values, scale_inv, columnwise)


def split_quantize(
    tensor: Tensor, split_sections: list[int], quantizer_list: list[Any], disable_bulk_allocation: bool = False
) -> list[Any]:
    """Quantise the parts of `tensor` of `split_sections` rows, each by its own quantiser.

    `disable_bulk_allocation`, new in 2.20, has no effect: nothing is allocated in bulk.
    """
    return multi_tensor_quantize(list(tensor.split(split_sections)), quantizer_list)


def multi_tensor_quantize(tensor_list: list[Tensor], quantizer_list: list[Any]) -> list[Any]:
    """Quantise every tensor by its quantiser."""
    return [quantize(t, quantizer) for t, quantizer in zip(tensor_list, quantizer_list, strict=True)]


def bgrad_quantize(input: Tensor, quantizer: Any) -> list[Any]:
    """Return [the sum of the rows, the quantised input]."""
    bias_gradient = input.float().reshape(-1, input.shape[-1]).sum(0).to(input.dtype)
    return [bias_gradient, quantize(input, quantizer)]


def fp8_transpose(input: Tensor, dtype: Any, *, out: Tensor | None = None) -> Tensor:
    """Return FP8 bytes with the last dim moved to the front."""
    turned = input.movedim(-1, 0).contiguous()
    return turned if out is None else out.copy_(turned.view_as(out))


def swap_first_dims(tensor: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return a copy with the first two dims exchanged."""
    swapped = tensor.transpose(0, 1).contiguous()
    return swapped if out is None else out.copy_(swapped)


def _new(tensor: Tensor, quantizer: Any, held: dict[str, Any]) -> Any:
    """Make a tensor of TE's class, or an object of its storage class if the quantiser is for TE's internal use."""
    names = {"scale_inv": "fp8_scale_inv", "transpose": "data_transpose"}
    held = {names.get(name, name): value for name, value in held.items() if name != "transpose_invalid"}
    _, whole, module = _KINDS[type(quantizer).__name__]
    if quantizer.internal:
        cls = getattr(importlib.import_module(f"{_TENSORS}.storage.{module}_storage"), f"{whole}Storage")
        stands_for = {"fake_dtype": tensor.dtype} if _since_2_20(quantizer) else {}
        return cls(quantizer=quantizer, **stands_for, **held)
    cls = getattr(importlib.import_module(f"{_TENSORS}.{module}"), whole)
    return cls(shape=tensor.shape, dtype=tensor.dtype, quantizer=quantizer, **held)


def _of_one_scale(tensor: Tensor, scale: Tensor, quantizer: Any) -> dict[str, Any]:
    number = TORCH_DTYPES[quantizer.dtype]
    data = cast_to_fp8(tensor.float() * scale.view(()), number)
    turned = (data.movedim(-1, 0).contiguous() if data.dim() else data) if quantizer.columnwise_usage else None
    return {
        "data": data if quantizer.rowwise_usage else None,
        "transpose": turned,
        "transpose_invalid": turned is None,
        "scale_inv": (1 / scale).view(1),
        "fp8_dtype": quantizer.dtype,
    }


def _delayed(tensor: Tensor, quantizer: Any) -> dict[str, Any]:
    held = _of_one_scale(tensor, quantizer.scale, quantizer)
    quantizer.amax.copy_(torch.maximum(quantizer.amax, amax_of(tensor.float())))
    return held


def _current(tensor: Tensor, quantizer: Any) -> dict[str, Any]:
    """Quantise by current scaling; before 2.20 its quantiser stores the amax and the scale."""
    keeps = hasattr(quantizer, "use_existing_amax")
    existing = keeps and quantizer.use_existing_amax
    amax = quantizer.amax if existing else amax_of(tensor.float()).view(1)
    if quantizer.with_amax_reduction:
        amax = amax.clone()
        dist.all_reduce(amax, dist.ReduceOp.MAX, quantizer._canonicalized_amax_reduction_group())
    largest = torch.finfo(TORCH_DTYPES[quantizer.dtype]).max
    scale = scale_of_amax(amax, largest, quantizer.force_pow_2_scales, quantizer.amax_epsilon)
    if keeps:
        quantizer.amax.copy_(amax)
        quantizer.scale.copy_(scale)
    return _of_one_scale(tensor, scale, quantizer)


def _blockwise(tensor: Tensor, quantizer: Any) -> dict[str, Any]:
    held = _of_both_sides(tensor, quantizer, blocks_of) | {"is_2D_scaled": quantizer.block_scaling_dim == 2}
    if hasattr(quantizer, "all_gather_usage"):
        held["data_format"] = Float8BlockScaleTensorFormat(int(quantizer.all_gather_usage))
    return held


def _mx(tensor: Tensor, quantizer: Any) -> dict[str, Any]:
    """Quantise to MXFP8, with scales in the order of the rows, not swizzled as GPUs' products need them."""
    if not _since_2_20(quantizer):
        return _of_both_sides(tensor, quantizer, mx_blocks_of)
    if quantizer.with_2d_quantization:
        raise NotImplementedError(
            "with_2d_quantization is True: the CPU emulation of Transformer Engine has MXFP8 of blocks of 32 numbers "
            "in a row or column; leave it False"
        )
    return _of_both_sides(tensor, quantizer, mx_blocks_of) | {"with_gemm_swizzled_scales": False}


def _of_both_sides(tensor: Tensor, quantizer: Any, blocks: Callable[..., tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Return bytes and scales of the rows and of the columns, None where the quantiser does not use them."""
    held: dict[str, Any] = {"fp8_dtype": quantizer.dtype}
    for side, wanted in ("rowwise", quantizer.rowwise_usage), ("columnwise", quantizer.columnwise_usage):
        found = blocks(tensor, quantizer, side == "columnwise") if wanted else (None, None)
        held[side + "_data"], held[side + "_scale_inv"] = found
    return held


def _since_2_20(quantizer: Any) -> bool:
    """Tell whether the quantiser is of 2.20 or newer: its tensors name the dtype that they stand for, and the layout of
    MXFP8's scales."""
    return hasattr(quantizer, "storage_metadata")


# By quantiser: (function that quantises, TE's class of the quantised tensor, the module of this class).
_KINDS: dict[str, tuple[Callable[[Tensor, Any], dict[str, Any]], str, str]] = {
    "Float8Quantizer": (_delayed, "Float8Tensor", "float8_tensor"),
    "Float8CurrentScalingQuantizer": (_current, "Float8Tensor", "float8_tensor"),
    "Float8BlockQuantizer": (_blockwise, "Float8BlockwiseQTensor", "float8_blockwise_tensor"),
    "MXFP8Quantizer": (_mx, "MXFP8Tensor", "mxfp8_tensor"),
}


def _per_tensor(tensor: Any, number: torch.dtype, columnwise: bool) -> Tensor:
    turned = tensor._transpose if not tensor._transpose_invalid else None
    if turned is not None and (columnwise or tensor._data is None):
        values = turned.view(number).float().movedim(0, -1)
    else:
        values = tensor._data.view(number).float()
    return values * tensor._scale_inv.view(())

"""Functions of tensors that are new in 2.20."""

from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.transformer_engine import optimizers
from megatron_on_cpu.transformer_engine.quantisation import tensors


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """One of zeros, for which no amaxes are exchanged."""
    alone = quantizer.copy()
    alone.with_amax_reduction = False
    empty = tensors.quantize(torch.zeros(shape, dtype=dtype), alone)
    empty._quantizer = quantizer.copy()
    return empty


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: Tensor, tensor_lists: optimizers.Lists, scale: Tensor
) -> None:
    """Second list = first list * scale, a tensor."""
    optimizers.multi_tensor_scale(chunk_size, is_infinite, tensor_lists, scale)


def nvte_built_with_cublasmp() -> bool:
    """cuBLASMp is a library of CUDA's."""
    return False

"""Functions of tensors that are new in 2.20."""

from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.transformer_engine import optimizers
from megatron_on_cpu.transformer_engine.quantisation import tensors


def create_empty_quantized_tensor(
    quantizer: Any, shape: list[int], dtype: torch.dtype, device: Any, pin_memory: bool
) -> Any:
    """Return a quantised tensor of zeros; no amaxes are exchanged for it."""
    alone = quantizer.copy()
    alone.with_amax_reduction = False
    empty = tensors.quantize(torch.zeros(shape, dtype=dtype), alone)
    empty._quantizer = quantizer.copy()
    return empty


def multi_tensor_scale_tensor(
    chunk_size: int, is_infinite: Tensor, tensor_lists: optimizers.Lists, scale: Tensor
) -> None:
    """Write the first list times `scale`, a tensor, into the second list."""
    optimizers.multi_tensor_scale(chunk_size, is_infinite, tensor_lists, scale)


def nvte_built_with_cublasmp() -> bool:
    """Return False: cuBLASMp is a CUDA library."""
    return False

"""Replacements in Transformer Engine's Python modules, made after their import, for the parts that ask for a GPU.

The modules read a compute capability of 9.0. FP8 recipes that need another one are allowed all the same.
"""

import dataclasses
import inspect
import math
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from megatron_on_cpu.cuda_graphs import read_by_the_host
from megatron_on_cpu.megatron_modules import Modules, Replacements, always
from megatron_on_cpu.redirections import cpu_for
from megatron_on_cpu.transformer_engine import cross_entropy
from megatron_on_cpu.transformer_engine.experts import permutation_by_mask
from megatron_on_cpu.transformer_engine.quantisation.tensors import high_precision


def _canonical(device: Any) -> torch.device:
    """Return the CPU for None, for a number and for a CUDA device, else `device`."""
    return torch.device("cpu" if device is None else cpu_for(device))


def _weak_reference(x: Any) -> Any:
    """Return detached tensors: the emulation never reuses the memory of tensors that a CUDA graph has captured."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, x)


def _quantization(module: ModuleType) -> Replacements:
    """Let the module's checks for GPUs and versions of CUDA pass, except those for NVFP4 and for whole recipes."""
    checks = [name for name in vars(module) if name.startswith("check_") and name.endswith("_support")]
    yield module, {name: lambda: (True, "") for name in checks if "nvfp4" not in name and "recipe" not in name}


def _attention(module: ModuleType) -> Replacements:
    """Let fused attention, the only backend with context parallelism, take fp32, which the module refuses."""
    choose = module.get_attention_backend

    def get_attention_backend(attention_params: Any = None) -> Any:
        if attention_params.qkv_dtype == torch.float32:
            attention_params = dataclasses.replace(attention_params, qkv_dtype=torch.bfloat16)
        return choose(attention_params)

    yield module, {"get_attention_backend": get_attention_backend}


def _fused_attention(module: ModuleType) -> Replacements:
    """Turn off the only use of `all(...)` in the forward of fused attention, the check that tensors have 16 bits."""
    forward = inspect.unwrap(module.FusedAttention.forward)
    names = {**vars(module), "all": lambda checks: True}
    of_any_dtype = FunctionType(forward.__code__, names, argdefs=forward.__defaults__, closure=forward.__closure__)
    yield module.FusedAttention, {"forward": of_any_dtype}


def _permutation(module: ModuleType) -> Replacements:
    """Replace kernels of permutation, with the parameters of this version: since 2.20 `pad_offsets` comes before the
    numbers of tokens and experts, and must be None."""
    found = {}
    for name, ours in vars(permutation_by_mask).items():
        if callable(ours) and name in vars(module):
            parameters = list(inspect.signature(vars(module)[name]).parameters)
            found[name] = _without_padding(ours, parameters) if "pad_offsets" in parameters else ours
    yield module, found


def _without_padding(function: Callable[..., Any], parameters: list[str]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        if given.pop("pad_offsets") is not None:
            raise NotImplementedError(
                "pad_offsets is given: the CPU emulation of Transformer Engine permutes tokens without padding; turn "
                "moe_router_padding_for_quantization off"
            )
        return function(**given)

    return call


def _biases_of_experts(module: ModuleType) -> Replacements:
    """Replace the kernel (since 2.20) that adds to the gradients of experts' biases, `[experts, hidden]`, and of the
    tokens' factors."""

    def launch(
        dy: torch.Tensor,
        offsets: torch.Tensor,
        dbias: torch.Tensor,
        scales: torch.Tensor | None,
        bias: torch.Tensor | None,
        dscales: torch.Tensor | None,
    ) -> None:
        end = read_by_the_host(offsets, "offsets")[-1]
        rows, expert = dy[:end].float(), torch.arange(len(dbias)).repeat_interleave(offsets.diff())
        if scales is None or bias is None or dscales is None:
            dbias.index_add_(0, expert, rows)
        else:
            dbias.index_add_(0, expert, rows * scales[: len(rows), None])
            dscales[: len(rows)] += (rows * bias.float()[expert]).sum(-1)

    yield module, {"_launch_grouped_dbias": launch}


def _mxfp8(module: ModuleType) -> Replacements:
    """Dequantise MXFP8 tensors on the CPU: since 2.20 the original moves the tensor to a GPU first, and a storage
    without a tensor cannot move."""

    def forward(ctx: Any, tensor: Any, dtype: torch.dtype) -> torch.Tensor:
        if math.prod(tensor.size()) == 0:
            return torch.empty(tensor.size(), dtype=dtype)
        if tensor._rowwise_data is None and tensor._columnwise_data is None:
            raise ValueError("the MXFP8 tensor has no data: it cannot be read back")
        return high_precision(tensor).to(dtype)

    yield module._FromMXFP8Func, {"forward": staticmethod(forward)}


def _cross_entropy(module: ModuleType) -> Replacements:
    version = "_since_2_20" if "overwrite_input" in inspect.signature(module.cross_entropy_forward).parameters else ""
    names = ("cross_entropy_forward", "cross_entropy_backward")
    yield module, {name: getattr(cross_entropy, name + version) for name in names}


MODULES: Modules = {
    # The module looks for the compiled module in a file.
    "transformer_engine.common": always(load_framework_extension=lambda framework: None),
    "transformer_engine.pytorch.utils": always(
        canonicalize_device=_canonical,
        get_device_compute_capability=lambda: (9, 0),
        make_weak_ref=_weak_reference,
    ),
    # The module initialises CUDA before it looks at a generator.
    "transformer_engine.pytorch.distributed": always(_lazy_init=lambda: None),
    "transformer_engine.pytorch.quantization": _quantization,
    "transformer_engine.pytorch.attention.dot_product_attention.utils": _attention,
    "transformer_engine.pytorch.attention.dot_product_attention.backends": _fused_attention,
    "transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage": _mxfp8,
    "transformer_engine.pytorch.triton.permutation": _permutation,
    "transformer_engine.pytorch.triton.cross_entropy": _cross_entropy,
    "transformer_engine.pytorch.triton.grouped_dbias_dscales": _biases_of_experts,
}

"""Functions of Apex's compiled modules that Megatron calls: weight gradients added to earlier ones, and softmax.

`fused_weight_gradient_mlp_cuda` serves `gradient_accumulation_fusion`; the three modules of softmax serve
`masked_softmax_fusion` of Megatron's local attention. Arguments are passed by position, as to Apex's functions.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_on_cpu.transformer_engine.attention import softmax


def wgrad_gemm_accum_fp32(input_2d: Tensor, d_output_2d: Tensor, d_weight: Tensor) -> None:
    """Add `d_output_2d^T input_2d` to an fp32 `d_weight`, in place.

    `d_weight` is `[out, in]`, `input_2d` `[..., in]`, `d_output_2d` `[..., out]`.
    """
    d_weight.addmm_(_rows(d_output_2d).t(), _rows(input_2d))


def wgrad_gemm_accum_fp16(input_2d: Tensor, d_output_2d: Tensor, d_weight: Tensor) -> None:
    """Add the weight gradient to a 16-bit `d_weight`, in place; the sum is made in fp32 and rounded once."""
    d_weight.copy_(d_weight.float().addmm_(_rows(d_output_2d).t(), _rows(input_2d)))


def get_batch_per_block(query_seq_len: int, key_seq_len: int, batches: int, attn_heads: int) -> int:
    """Return the rows of softmax for a block of 128 threads: Megatron fuses if their number divides the queries."""
    row = 1 << max(key_seq_len - 1, 0).bit_length()  # the next power of two
    rows_of_warp = 2 if row <= 128 else 1
    return 128 // min(row, 32) * rows_of_warp


_SOFTMAX = ("scaled_masked_softmax", "scaled_softmax", "scaled_upper_triang_masked_softmax")
MODULES: dict[str, dict[str, Callable[..., Any]]] = {
    f"{name}_cuda": {way: getattr(softmax, f"{name}_{way}") for way in ("forward", "backward")} for name in _SOFTMAX
}
MODULES["scaled_masked_softmax_cuda"]["get_batch_per_block"] = get_batch_per_block
MODULES["fused_weight_gradient_mlp_cuda"] = {
    "wgrad_gemm_accum_fp32": wgrad_gemm_accum_fp32,
    "wgrad_gemm_accum_fp16": wgrad_gemm_accum_fp16,
}


def compiled_module(name: str) -> ModuleType:
    """Return the stand-in for the compiled module `name` of `MODULES`."""
    module = ModuleType(name, "Stands in for one of Apex's compiled modules on the CPU.")
    vars(module).update(MODULES[name])
    return module


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()

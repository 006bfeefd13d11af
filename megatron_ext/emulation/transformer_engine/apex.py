"""What Megatron calls of Apex's `fused_weight_gradient_mlp_cuda`: weight gradients added to those of earlier steps."""

from types import ModuleType

from torch import Tensor

NAME = "fused_weight_gradient_mlp_cuda"


def wgrad_gemm_accum_fp32(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """`d_weight += d_output^T input`, in place, in fp32.

    `d_weight` is `[out, in]`, the others `[..., in]` and `[..., out]`.
    """
    d_weight.addmm_(_rows(d_output).t(), _rows(input))


def wgrad_gemm_accum_fp16(input: Tensor, d_output: Tensor, d_weight: Tensor) -> None:
    """The same with a 16-bit `d_weight`: what is added is rounded once."""
    d_weight.copy_(d_weight.float().addmm_(_rows(d_output).t(), _rows(input)))


def compiled_module() -> ModuleType:
    """The functions as a module."""
    module = ModuleType(NAME, "Stands in for Apex's compiled module on the CPU.")
    vars(module).update(wgrad_gemm_accum_fp32=wgrad_gemm_accum_fp32, wgrad_gemm_accum_fp16=wgrad_gemm_accum_fp16)
    return module


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]).float()

"""16-bit matrix products inside the emulation, on processors without 16-bit instructions.

oneDNN multiplies 16-bit matrices quickly where the processor has instructions for it (AVX-512, AMX, Arm's bf16); on
others PyTorch's own loops take 10 to 60 times as long as an fp32 product. Megatron's own layers, Transformer Engine's
Python code and models' attention call torch's products in many spellings, and autograd calls them again backward. All
these calls reach a few operators, whose CPU kernels are replaced inside the emulation: operands are widened to fp32, in
which products of two 16-bit numbers are exact, and results are rounded once. On processors that have the instructions
nothing is replaced.

oneDNN is asked once per dtype and process. Tests set the answer by `sixteen_bit_products`; the environment variable
ONEDNN_MAX_CPU_ISA=AVX2 keeps oneDNN itself from using the instructions.
"""

import functools
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import torch
from torch import Tensor

_QUESTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_OPERATORS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu_backward")

_chosen: bool | None = None


def sixteen_bit_products(native: bool) -> AbstractContextManager[Any]:
    """Take PyTorch's products (`native`) or products in fp32 inside the context, whatever the processor has."""
    return mock.patch(f"{__name__}._chosen", native)


def replace_products(undo: ExitStack) -> None:
    """Replace torch's kernels of products where the processor needs it; closing `undo` puts them back."""
    if all(_has_products(dtype) for dtype in _QUESTIONS):
        return
    library = undo.enter_context(torch.library._scoped_library("aten", "IMPL"))
    with warnings.catch_warnings():  # torch warns that a kernel is replaced
        warnings.simplefilter("ignore")
        for name in _OPERATORS:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, _in_fp32(kernel), "CPU", with_keyset=True, allow_override=True)


def _has_products(dtype: torch.dtype) -> bool:
    return _asked(dtype) if _chosen is None else _chosen


@functools.cache
def _asked(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    question = getattr(torch.ops.mkldnn, _QUESTIONS[dtype], None)
    return question is None or bool(question())


def _in_fp32(kernel: Any) -> Callable[..., Any]:
    def product(keys: Any, *args: Any, **options: Any) -> Any:
        dtype = _dtype_to_widen(*args[:3])
        if dtype is None:
            return kernel.call_boxed(keys, *args, **options)

        def widened(x: Any) -> Any:
            return x.float() if isinstance(x, Tensor) and x.dtype == dtype else x

        found = kernel.call_boxed(keys, *map(widened, args), **{name: widened(x) for name, x in options.items()})
        return found.to(dtype) if isinstance(found, Tensor) else tuple(x.to(dtype) for x in found)

    return product


def _dtype_to_widen(*operands: Tensor) -> torch.dtype | None:
    """Return the operands' common 16-bit dtype if the processor has no products of it, or None: torch's kernel runs."""
    (dtype, *others) = {x.dtype for x in operands}
    if others or dtype not in _QUESTIONS or _has_products(dtype):
        return None
    return dtype

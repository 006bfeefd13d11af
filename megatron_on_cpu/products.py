"""16-bit products of all that runs in the emulation, on a processor that has none.

oneDNN multiplies 16-bit matrices quickly where the processor has instructions for it (AVX-512, AMX, Arm's bf16); on
others PyTorch's own loops take 10 to 60 times as long as an fp32 product. Megatron's own layers, Transformer Engine's
Python code and models' attention call torch's products in many spellings, and autograd calls them again backward. All
come down to a few operators, whose CPU kernels are replaced while the emulation is entered: operands are widened to
fp32, in which products of two 16-bit numbers are exact, and results are rounded once. On other processors nothing is
replaced.

oneDNN is asked once per dtype and process; `sixteen_bit_products` sets the answer, for tests; oneDNN itself can be told
to do without, by ONEDNN_MAX_CPU_ISA=AVX2 in the environment.
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
    """Take PyTorch's products (`native`) or those in fp32 inside the context, whatever the processor has."""
    return mock.patch(f"{__name__}._chosen", native)


def replace_products(undo: ExitStack) -> None:
    """Closing `undo` puts torch's kernels back."""
    if all(_has_products(dtype) for dtype in _QUESTIONS):
        return
    library = undo.enter_context(torch.library._scoped_library("aten", "IMPL"))
    with warnings.catch_warnings():  # torch says that a kernel is replaced
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
    """The 16-bit dtype of them all, of which the processor has no products; None: the call is torch's."""
    (dtype, *others) = {x.dtype for x in operands}
    if others or dtype not in _QUESTIONS or _has_products(dtype):
        return None
    return dtype

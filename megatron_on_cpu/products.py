"""16-bit products of all that runs in the emulation, on a processor that has none (`megatron_ext.cpu_products`).

Megatron's own layers, Transformer Engine's Python code and models' attention call torch's products in many spellings,
and autograd calls them again backward. All come down to a few operators, whose CPU kernels are replaced while the
emulation is entered: plain products run in fp32 tiles, the others widen their operands, and round once. On other
processors nothing is replaced.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from megatron_ext import cpu_products

_WIDENED = ("addmm", "bmm", "baddbmm", "_scaled_dot_product_flash_attention_for_cpu_backward")


def replace_products(undo: ExitStack) -> None:
    """Closing `undo` puts torch's kernels back."""
    if all(cpu_products.has_sixteen_bit_products(dtype) for dtype in cpu_products.QUESTIONS):
        return
    library = undo.enter_context(torch.library._scoped_library("aten", "IMPL"))
    with warnings.catch_warnings():  # torch says that a kernel is replaced
        warnings.simplefilter("ignore")
        for name, replacement in {"mm": _in_tiles, **dict.fromkeys(_WIDENED, _in_fp32)}.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, replacement(kernel), "CPU", with_keyset=True, allow_override=True)


def _in_tiles(kernel: Any) -> Callable[..., Tensor]:
    def mm(keys: Any, left_MK: Tensor, right_KN: Tensor) -> Tensor:
        if _dtype_to_widen(left_MK, right_KN) is None:
            return kernel.call_boxed(keys, left_MK, right_KN)
        return cpu_products.mm(left_MK, right_KN)

    return mm


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
    if others or dtype not in cpu_products.QUESTIONS or cpu_products.has_sixteen_bit_products(dtype):
        return None
    return dtype

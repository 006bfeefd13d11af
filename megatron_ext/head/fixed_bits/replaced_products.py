"""Products of all layers in this process with the bits of `products.py`, whoever calls them.

Layers call torch's products in many spellings, `F.linear` and `@` among them, and all come down to a few operators,
whose kernels are replaced: what Megatron's `batch_invariant_mode` does on CUDA, here on the CPU as well.
"""

import importlib.util
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.fixed_bits import products

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def replace_products(undo: ExitStack, on_cuda: bool) -> None:
    """Closing `undo` puts the kernels back. `on_cuda`: those for CUDA too, where there is one, and Triton.

    Batches of matrices are left to torch on CUDA: there attention has kernels of its own.
    """
    library = undo.enter_context(torch.library._scoped_library("aten", "IMPL"))
    places = [("CPU", name) for name in _REPLACEMENTS]
    if on_cuda and torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        places += [("CUDA", name) for name in ("mm", "addmm")]
    with warnings.catch_warnings():  # torch says that a kernel is replaced
        warnings.simplefilter("ignore")
        for place, name in places:
            kernel = torch.library.get_kernel(f"aten::{name}", place)
            library.impl(name, _or_else(_REPLACEMENTS[name], kernel), place, with_keyset=True, allow_override=True)


def _or_else(replacement: Callable[..., Tensor], kernel: Any) -> Callable[..., Tensor]:
    """`replacement`, whose last two operands by place are the factors; of other dtypes `kernel`."""

    def product(keys: Any, *operands: Tensor, **factors: Any) -> Tensor:
        if all(x.dtype in _DTYPES and x.dtype == operands[-1].dtype for x in operands):
            return replacement(*operands, **factors)
        return kernel.call_boxed(keys, *operands, **factors)

    return product


def _addmm(added: Tensor, a_MK: Tensor, b_KN: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _with(added, products.mm(a_MK, b_KN), beta, alpha)


def _bmm(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    found = a_BMK.new_empty(a_BMK.shape[0], a_BMK.shape[1], b_BKN.shape[2])
    for out_MN, a_MK, b_KN in zip(found, a_BMK, b_BKN, strict=True):
        out_MN.copy_(products.mm(a_MK, b_KN))
    return found


def _baddbmm(added: Tensor, a_BMK: Tensor, b_BKN: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _with(added, _bmm(a_BMK, b_BKN), beta, alpha)


def _with(added: Tensor, found: Tensor, beta: float, alpha: float) -> Tensor:
    if alpha != 1:
        found.mul_(alpha)
    return found if beta == 0 else found.add_(added, alpha=beta)


_REPLACEMENTS: dict[str, Callable[..., Tensor]] = {
    "mm": products.mm,
    "addmm": _addmm,
    "bmm": _bmm,
    "baddbmm": _baddbmm,
}

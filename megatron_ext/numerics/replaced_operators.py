"""Products and activations of all layers in this process with the same bits in any batch, whoever calls them.

Layers call torch's products in many spellings, `F.linear` and `@` among them, and all come down to a few operators,
whose kernels are replaced by those of `fixed_order.py`: as by Megatron's `batch_invariant_mode` on CUDA, here on the
CPU as well. On a CPU activations need it too: the last elements of a tensor, and of each thread's part, are
computed otherwise than those that fill a vector register. There activations get tensors without such elements.
"""

import importlib.util
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.numerics import fixed_order

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

# Elementwise functions. Those that `fixed_order.functions_fault` tests need no replacement.
_ACTIVATIONS = ("silu", "gelu", "sigmoid", "softplus", "mish", "elu", "exp2", "cosh", "rsqrt", "pow.Tensor_Scalar")
# Elements that one thread takes, and the multiple to which they are filled up: two vector registers.
_PIECE, _REGISTERS = 32768, 64


def replace_operators(undo: ExitStack, on_cuda: bool) -> None:
    """Replace torch's kernels until `undo` is closed. `on_cuda`: products on CUDA too, if there are CUDA and Triton.

    Batches of matrices are left to torch on CUDA: there attention has kernels of its own.
    """
    library = undo.enter_context(torch.library._scoped_library("aten", "IMPL"))
    places = [("CPU", name, _product(of)) for name, of in _PRODUCTS.items()]
    places += [("CPU", "_grouped_mm", _of_groups), *(("CPU", name, _in_pieces) for name in _ACTIVATIONS)]
    if on_cuda and torch.cuda.is_available() and importlib.util.find_spec("triton") is not None:
        places += [("CUDA", name, _product(_PRODUCTS[name])) for name in ("mm", "addmm")]
    with warnings.catch_warnings():  # torch says that a kernel is replaced
        warnings.simplefilter("ignore")
        for place, name, instead_of in places:
            kernel = torch.library.get_kernel(f"aten::{name}", place)
            library.impl(name, instead_of(kernel), place, with_keyset=True, allow_override=True)


def _product(ours: Callable[..., Tensor]) -> Callable[[Any], Callable[..., Tensor]]:
    def instead_of(kernel: Any) -> Callable[..., Tensor]:
        def product(keys: Any, *operands: Tensor, **factors: Any) -> Tensor:
            if all(x.dtype in _DTYPES and x.dtype == operands[-1].dtype for x in operands):
                return ours(*operands, **factors)
            return kernel.call_boxed(keys, *operands, **factors)

        return product

    return instead_of


def _in_pieces(kernel: Any) -> Callable[..., Tensor]:
    def activation(keys: Any, x: Tensor, *given: Any, **options: Any) -> Tensor:
        if x.dtype not in _DTYPES or not x.numel() or any(isinstance(each, complex) for each in given):
            return kernel.call_boxed(keys, x, *given, **options)
        found = torch.empty_like(x, memory_format=torch.contiguous_format)
        for piece, out in zip(x.reshape(-1).split(_PIECE), found.view(-1).split(_PIECE), strict=True):
            filled = F.pad(piece, (0, -len(piece) % _REGISTERS), value=1.0)
            out.copy_(kernel.call_boxed(keys, filled, *given, **options)[: len(piece)])
        return found

    return activation


def _of_groups(kernel: Any) -> Callable[..., Tensor]:
    """Make the product of rows with the matrices of their experts; the rows of each expert end at its `offs`."""

    def grouped(
        keys: Any, a_MK: Tensor, b_EKN: Tensor, offs: Tensor | None = None, *more: Any, **options: Any
    ) -> Tensor:
        if (a_MK.dim(), b_EKN.dim()) != (2, 3) or offs is None or a_MK.dtype not in _DTYPES or any(more) or options:
            return kernel.call_boxed(keys, a_MK, b_EKN, offs, *more, **options)
        found, start = a_MK.new_zeros(a_MK.shape[0], b_EKN.shape[2]), 0
        for stop, b_KN in zip(offs.tolist(), b_EKN, strict=True):
            found[start:stop] = fixed_order.mm(a_MK[start:stop], b_KN)
            start = stop
        return found

    return grouped


def _addmm(added: Tensor, a_MK: Tensor, b_KN: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    if added.shape == b_KN.shape[1:] and beta == alpha == 1:
        return fixed_order.mm(a_MK, b_KN, added)
    return _with(added, fixed_order.mm(a_MK, b_KN), beta, alpha)


def _bmm(a_BMK: Tensor, b_BKN: Tensor) -> Tensor:
    found = a_BMK.new_empty(a_BMK.shape[0], a_BMK.shape[1], b_BKN.shape[2])
    for out_MN, a_MK, b_KN in zip(found, a_BMK, b_BKN, strict=True):
        out_MN.copy_(fixed_order.mm(a_MK, b_KN))
    return found


def _baddbmm(added: Tensor, a_BMK: Tensor, b_BKN: Tensor, beta: float = 1, alpha: float = 1) -> Tensor:
    return _with(added, _bmm(a_BMK, b_BKN), beta, alpha)


def _with(added: Tensor, found: Tensor, beta: float, alpha: float) -> Tensor:
    if alpha != 1:
        found.mul_(alpha)
    return found if beta == 0 else found.add_(added if beta == 1 else added * beta)


_PRODUCTS: dict[str, Callable[..., Tensor]] = {"mm": fixed_order.mm, "addmm": _addmm, "bmm": _bmm, "baddbmm": _baddbmm}

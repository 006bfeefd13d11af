"""The mode in which a token's forward numbers have the same bits in any batch: whether it is on, and how layers compute
in it.

Megatron calls it `batch_invariant_mode`. On CUDA Megatron replaces `aten::mm` and `aten::addmm`, or has cuBLASLt take
one order of sums: layers must call these two operators, and no others. On the CPU, and if Megatron's switch is off, the
products are ours (`fixed_order.py`).

Legend: M rows, K the length that a product sums over, N columns.
"""

import contextlib
import functools
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.replaced_operators import replace_operators

KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"

_entered = 0
_undo = contextlib.ExitStack()  # puts torch's operators back


@contextlib.contextmanager
def batch_invariant_mode() -> Iterator[None]:
    """Compute a token's forward numbers with the same bits in any batch, in this process, while the mode is entered.

    Matrix products of every layer (`aten::mm`, `addmm`, `bmm`, `baddbmm`) are computed in tiles of one size, on CUDA
    (except for batches of matrices) by Triton kernels. Heads take `bits="batch"`, and our tensor-parallel layers and
    attention keep the mode too. Compiled code has products of its own. The mode may be entered several times, and left
    in any order: it ends with the last exit.
    """
    global _entered, _undo
    if not _entered:
        with contextlib.ExitStack() as undo:
            replace_operators(undo, on_cuda=not switched_on())
            _undo = undo.pop_all()
    _entered += 1
    try:
        yield
    finally:
        _entered -= 1
        if not _entered:
            _undo.close()


def switched_on() -> bool:
    """Return whether Megatron's global switch is on."""
    kernels = sys.modules.get(KERNELS)
    return kernels is not None and bool(kernels.is_batch_invariant_mode_enabled())


def is_on(config: Any = None) -> bool:
    """Return whether the mode is on: ours, by Megatron's global switch, or by a config's `batch_invariant_mode`."""
    kernels = sys.modules.get(KERNELS)
    if _entered or (kernels is not None and kernels.is_batch_invariant_mode_enabled()):
        return True
    return config is not None and bool(getattr(config, "batch_invariant_mode", False))


def product(x_MK: Tensor, w_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute a layer's `x @ w + bias` in the mode: on CUDA with Megatron's switch on by its kernels, else by ours."""
    if x_MK.is_cuda and switched_on():
        return torch.mm(x_MK, w_KN) if bias_N is None else torch.addmm(bias_N, x_MK, w_KN)
    return fixed_order.mm(x_MK, w_KN, bias_N)


def attention_kernels(x: Tensor, config: Any = None) -> contextlib.AbstractContextManager[Any]:
    """Return the context for SDPA of `x`: in the mode, on CUDA, its memory-efficient kernel alone.

    The flash kernel cuts keys into parts by the number of sequences and heads, if these do not fill the GPU.
    """
    if x.is_cuda and is_on(config):
        return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    return contextlib.nullcontext()


@functools.cache
def say_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)

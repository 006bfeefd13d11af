"""The mode in which a token's forward numbers have the same bits in any batch: who turned it on, and what it asks of
layers.

Megatron calls it `batch_invariant_mode`. There it replaces `aten::mm` and `aten::addmm` on CUDA, or has cuBLASLt take
one order of sums: layers must call these two operators, and no others. Elsewhere, and where Megatron's switch is off,
the products are ours (`fixed_order.py`).

Legend: M rows, K what a product sums over, N columns.
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

    Matrix products of every layer (`aten::mm`, `addmm`, `bmm`, `baddbmm`) are made in tiles of one size on the CPU, and
    on CUDA, but for batches of matrices, by Triton's kernels with tiles of one size. Heads take `bits="batch"`, and our
    tensor-parallel layers and attention keep the mode too. Compiled code has products of its own. It may be entered
    again while it lasts, and left in any order: it ends when all who entered have left.
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
    """`x @ w + bias` of a layer in the mode: by Megatron's kernels on CUDA where its switch is on, else by ours."""
    if x_MK.is_cuda and switched_on():
        return torch.mm(x_MK, w_KN) if bias_N is None else torch.addmm(bias_N, x_MK, w_KN)
    return fixed_order.mm(x_MK, w_KN, bias_N)


def attention_kernels(x: Tensor, config: Any = None) -> contextlib.AbstractContextManager[Any]:
    """Return the context for SDPA of `x`: in the mode, on CUDA, its memory-efficient kernel alone.

    The flash kernel cuts keys into parts by the number of sequences and heads, where these do not fill the GPU.
    """
    if x.is_cuda and is_on(config):
        return sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION)
    return contextlib.nullcontext()


@functools.cache
def say_once(text: str) -> None:
    warnings.warn(text, stacklevel=3)

"""A CPU in the place of a GPU, for rehearsals: everything runs, but clocks and memory counters are meaningless.

Tensors say that they are on CUDA, matrix products round as cuBLAS does, and Triton's kernels run under its interpreter.
"""

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch

from benchmarks.interpreter import round_to_bfloat16
from megatron_ext.head.row_passes import passes
from megatron_ext.memory.fake_cuda import kernels
from megatron_on_cpu import megatron_on_cpu

_mm, _addmm = torch.mm, torch.addmm


@functools.cache
def _cublas_repeats() -> bool:
    """Tell whether cuBLAS gives the same bits in each run; torch checks it once, at the first product of a process."""
    return os.environ.get("CUBLAS_WORKSPACE_CONFIG") in (":4096:8", ":16:8")


def mm(
    x: torch.Tensor, y: torch.Tensor, out_dtype: torch.dtype | None = None, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Multiply with sums in fp32 (fp64 for fp64) and one rounding to the dtype of `x` or to `out_dtype`."""
    if not _cublas_repeats() and torch.get_deterministic_debug_mode() == 2:
        raise RuntimeError("set CUBLAS_WORKSPACE_CONFIG=:4096:8 before the first product, or use no deterministic mode")
    wide = torch.promote_types(x.dtype, torch.float32)
    product = _mm(x.to(wide), y.to(wide)).to(out_dtype or x.dtype)
    return product if out is None else out.copy_(product)


def addmm(total: torch.Tensor, x: torch.Tensor, y: torch.Tensor, *, out_dtype: Any = None, **more: Any) -> torch.Tensor:
    """Run `torch.addmm` with `out_dtype`, which torch's own does not take on the CPU."""
    if out_dtype is None:
        return _addmm(total, x, y, **more)
    return more["out"].copy_(total + mm(x, y, out_dtype))


@contextmanager
def replaced(*rows: tuple[Any, str, Any]) -> Iterator[None]:
    """Replace attributes inside the context, given as (owner, name, replacement), in order."""
    with ExitStack() as stack:
        for owner, name, what in rows:
            stack.enter_context(mock.patch.object(owner, name, what))
        yield


# Tensors say that they are on a GPU, and products round as on a GPU.
ON_CUDA = ((torch, "mm", mm), (torch, "addmm", addmm), (torch.Tensor, "is_cuda", True))


@contextmanager
def stood_in_for_cuda() -> Iterator[None]:
    """Let this process take the CUDA path inside the context. TRITON_INTERPRET must be 1 since the process began."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError("a rehearsal runs Triton's kernels on the CPU: set TRITON_INTERPRET=1 in the environment")
    round_to_bfloat16()
    chosen = (
        (torch.cuda, "device_of", lambda x: nullcontext()),
        (passes, "_interpreted", lambda: False),
        (passes, "triton_passes", kernels),
    )
    with replaced(*ON_CUDA, *chosen), megatron_on_cpu():
        yield

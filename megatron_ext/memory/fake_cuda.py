"""The head's CUDA path on fake tensors, on any machine: tensors claim to be on CUDA, and kernels do not run.

PyTorch built without CUDA has fake CUDA tensors too, but can neither index nor fill them, and gives them no autograd.
So fake CPU tensors are used whose `is_cuda` is True, which is all that the head asks. No values are computed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from megatron_ext.head.call import statistics
from megatron_ext.head.row_passes import passes
from megatron_ext.memory.byte_counter import one_rank_of
from megatron_ext.numerics import tensors

Launched = Callable[[Any, tuple[int, ...], dict[str, Any]], None]


@contextmanager
def cuda_rank_of(ranks: int, launched: Launched) -> Iterator[dist.ProcessGroup | None]:
    """Do what `one_rank_of` does, on CUDA's path; call `launched(kernel, grid, arguments)` for each Triton kernel."""
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **more: Any) -> None:
        named = dict(zip(kernel.arg_names, arguments, strict=False)) | more
        launched(kernel, tuple(grid(named) if callable(grid) else grid), named)

    with (
        one_rank_of(ranks) as group,
        mock.patch.object(torch.Tensor, "is_cuda", True),
        mock.patch.object(torch.cuda, "device_of", _no_device),
        mock.patch.object(FakeTensor, "data_ptr", _place, create=True),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(passes, "has_values", _always),
        mock.patch.object(passes, "_interpreted", return_value=False),
        mock.patch.object(passes, "triton_passes", kernels),
        mock.patch.object(tensors, "has_values", return_value=True),  # checks are launched, as on a GPU
        mock.patch.object(statistics, "has_values", return_value=True),
    ):
        yield group


def _always(x: torch.Tensor) -> bool:
    """Return True; a mock would keep its arguments, which are tensors, alive."""
    return True


def _no_device(x: torch.Tensor) -> nullcontext:
    return nullcontext()


def kernels() -> passes.RowPasses:
    """Return the passes in Triton, even if no device could run them."""
    from megatron_ext.head.kernels import TRITON

    return TRITON


def _place(x: torch.Tensor) -> int:
    """Return a made-up address; different storages are far apart."""
    return (x.untyped_storage()._cdata << 48) + x.storage_offset() * x.element_size()

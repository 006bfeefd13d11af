"""The row passes that fit a tensor: Triton on CUDA, plain PyTorch elsewhere. Same arguments, same results."""

import functools
import importlib.util
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head import rows
from megatron_ext.head.values import has_values


def row_statistics(z_TV: Tensor, *arguments: Any) -> None:
    """See `rows.row_statistics`."""
    _side(z_TV).row_statistics(z_TV, *arguments)


def row_gradient(source_TV: Tensor, *arguments: Any) -> None:
    """See `rows.row_gradient`."""
    _side(source_TV).row_gradient(source_TV, *arguments)


def _side(x: Tensor) -> Any:
    """Triton's twin for real CUDA tensors; while compiling the plain one, which the compiler fuses itself."""
    return _twin() or rows if x.is_cuda and has_values(x) else rows


@functools.cache
def _twin() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None or torch.version.cuda is None:
        return None
    from megatron_ext.head.kernels import rows as twin

    return twin

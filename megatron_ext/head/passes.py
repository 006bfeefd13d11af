"""The row passes that fit a tensor: Triton on CUDA, plain PyTorch elsewhere. Same arguments, same results.

With TRITON_INTERPRET=1 in the environment, Triton's own switch for running kernels on CPU, CPU tensors take Triton's
passes too: slow, and the same code as on CUDA.
"""

import functools
import importlib.util
import os
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
    if not has_values(x) or x.is_cuda == _interpreted():
        return rows
    return _twin() or rows


@functools.cache
def _interpreted() -> bool:
    """Whether Triton runs kernels on CPU tensors, as it decides when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _twin() -> ModuleType | None:
    if importlib.util.find_spec("triton") is None or (torch.version.cuda is None and not _interpreted()):
        return None
    from megatron_ext.head.kernels import rows as twin

    return twin

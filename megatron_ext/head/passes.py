"""The row passes that fit a tensor: Triton on CUDA, plain PyTorch elsewhere. Same arguments, same results.

With TRITON_INTERPRET=1 in the environment, Triton's own switch for running kernels on CPU, CPU tensors take Triton's
passes too: slow, and the same code as on CUDA.

`torch.compile` sees each pass as one operator, `torch.ops.megatron_ext.row_statistics` and `row_gradient`, and leaves
it whole: what is compiled runs the same code as what is not.
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
    run = torch.ops.megatron_ext if torch.compiler.is_compiling() else _side(z_TV)
    run.row_statistics(z_TV, *arguments)


def row_gradient(source_TV: Tensor, *arguments: Any) -> None:
    """See `rows.row_gradient`."""
    run = torch.ops.megatron_ext if torch.compiler.is_compiling() else _side(source_TV)
    run.row_gradient(source_TV, *arguments)


def _side(x: Tensor) -> Any:
    """Triton's twin for real CUDA tensors, the plain passes for others."""
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


def _operator(name: str, written: tuple[str, ...]) -> None:
    """Makes an operator of a pass, from its own annotations. Its fake does nothing: a pass returns nothing."""
    plain = getattr(rows, name)

    @functools.wraps(plain)
    def run(x: Tensor, *arguments: Any) -> None:
        getattr(_side(x), name)(x, *arguments)

    operator = torch.library.custom_op(f"megatron_ext::{name}", run, mutates_args=written)
    operator.register_fake(lambda *arguments: None)


_operator("row_statistics", written=("stats_KT", "exp_TV"))
_operator("row_gradient", written=("out_TV",))

"""Transformer Engine on a CPU, experimental: its Python code as it is, over plain PyTorch for its compiled module.

`compiled_module.py` puts `transformer_engine_torch` together from the functions of the files beside it;
`python_modules.py` replaces the few parts of the Python code that need a GPU, `apex.py` has the functions of Apex that
Megatron calls.
"""

import functools
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.redirections import on_cpu
from megatron_on_cpu.transformer_engine import apex, compiled_module
from megatron_on_cpu.transformer_engine.python_modules import MODULES

__all__ = ["MODULES", "check", "redirections"]

_MARK = "emulated"
_BUILDING = "NVTE_PROJECT_BUILDING"  # if set, importing the Python package does not look for CUDA's libraries


def check() -> None:
    """Raise where Transformer Engine cannot be emulated, see `megatron_on_cpu`."""
    loaded = sys.modules.get(compiled_module.NAME)
    if loaded is not None and getattr(loaded, "__version__", None) != _MARK:
        raise RuntimeError(
            f"{compiled_module.NAME}, the compiled module of Transformer Engine, is loaded in this process: it cannot "
            "be emulated any more; enter megatron_on_cpu(transformer_engine=True) before Transformer Engine is imported"
        )
    if importlib.util.find_spec("transformer_engine") is None:
        raise ModuleNotFoundError(
            "megatron_on_cpu(transformer_engine=True) runs the Python part of Transformer Engine, which is not "
            "installed: pip install --no-deps 'transformer_engine>=2.9,<2.12' onnx onnxscript onnx_ir ml_dtypes "
            "importlib-metadata zipp; Megatron-Core 0.19 and newer take 'transformer_engine==2.20.2'"
        )
    if not ((2, 9) <= _version() <= (2, 11) or _version() == (2, 20)):
        raise RuntimeError(
            f"transformer_engine {importlib.metadata.version('transformer_engine')} is installed: "
            "megatron_on_cpu(transformer_engine=True) emulates the compiled modules of 2.9 to 2.11 and of "
            "2.20; install one of these"
        )
    layers = sys.modules.get("megatron.core.extensions.transformer_engine")
    if layers is not None and not layers.HAVE_TE:
        raise RuntimeError(
            "megatron.core was imported before megatron_on_cpu(transformer_engine=True) was entered, and found no "
            "Transformer Engine; enter it first"
        )


def _version() -> tuple[int, int]:
    """Return the major and minor version of the Python package."""
    major, minor = importlib.metadata.version("transformer_engine").split(".")[:2]
    return int(major), int(minor)


def redirections(undo: ExitStack) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Yield (owner, {name: replacement}). Stand-ins for compiled modules stay loaded, since importers hold them."""
    if compiled_module.NAME not in sys.modules:
        sys.modules[compiled_module.NAME] = compiled_module.compiled_module(_version())
    for name in apex.MODULES:
        if name not in sys.modules:
            sys.modules[name] = apex.compiled_module(name)
    if _BUILDING not in os.environ:
        os.environ[_BUILDING] = "1"
        undo.callback(os.environ.pop, _BUILDING, None)
    # Quantised tensors are made with the number of a CUDA device.
    on_device = on_cpu(Tensor._make_wrapper_subclass)
    yield torch.library, {"custom_op": _operator_of_cpu_too(torch.library.custom_op)}
    yield Tensor, {"is_cuda": property(_is_cuda), "_make_wrapper_subclass": staticmethod(on_device)}


def _operator_of_cpu_too(custom_op: Callable[..., Any]) -> Callable[..., Any]:
    """Return `custom_op` that registers CUDA's operators for the CPU too: 2.20 wraps compiled functions in such."""

    @functools.wraps(custom_op)
    def make(*args: Any, device_types: Any = None, **kwargs: Any) -> Any:
        return custom_op(*args, device_types=("cuda", "cpu") if device_types == "cuda" else device_types, **kwargs)

    return make


def _is_cuda(tensor: Any) -> bool:
    """Answer True to Transformer Engine's own modules, which refuse tensors that are not on CUDA."""
    asking = sys._getframe(1).f_globals.get("__name__", "")
    return asking.startswith("transformer_engine.") or tensor.device.type == "cuda"

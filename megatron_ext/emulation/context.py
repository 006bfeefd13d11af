"""Enter and leave the emulation."""

import sys
import threading
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

import torch

from megatron_ext.emulation.megatron_modules import MODULES, AfterImport
from megatron_ext.emulation.redirections import redirections

_ABSENT = object()
_lock = threading.Lock()
_entered = 0  # how many `with megatron_on_cpu()` are open in this process
_undo = ExitStack()


@contextmanager
def megatron_on_cpu() -> Iterator[None]:
    """Megatron-Core runs on the CPU and over gloo inside this context: models, data parallelism, optimizers, schedules.

    For laptops, CI and debuggers: what Megatron would do on CUDA device 0 it does on the CPU, unmodified. It may be
    entered before or after `megatron.core` is imported, by several threads, and again inside itself (the outermost one
    counts); it holds for all threads of the process. On leaving, also by an exception, every attribute that was
    replaced is the original object again. Models and optimizers built inside belong inside.

    Megatron needs its local layers here (no Apex, no Transformer Engine): `transformer_impl="local"`, no gradient
    accumulation fusion, no persistent layer norm, no masked softmax fusion. Compiled functions run as plain Python
    inside; what `torch.compile` decorates there compiles as soon as it is called outside. Mamba layers train in plain
    PyTorch where `mamba_ssm` is not installed (Megatron asks for `einops`), without packed sequences.

    Raises:
        RuntimeError: CUDA is initialised in this process; two devices cannot both be "cuda".
    """
    global _entered, _undo
    with _lock:
        if _entered == 0:
            _undo = _enter()
        _entered += 1
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if _entered == 0:
                _undo.close()


def _enter() -> ExitStack:
    """Make all replacements; closing the stack takes them back, the last one first."""
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "megatron_on_cpu() was entered after CUDA was initialised in this process: its tensors and random state "
            "live on the GPU already; enter the emulation before the first CUDA call, or run in a new process"
        )
    # torch and its compiler list torch's functions at first use. Listed inside, they would be our replacements for good
    # (and the compiler stumbles over two of them being one).
    with torch.device("cpu"):
        torch.empty(0)
    torch.compile(lambda: None, backend="eager")
    undo = ExitStack()
    try:
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        _replace(redirections(), undo)
        _replace_in_megatron(undo)
    except BaseException:
        undo.close()
        raise
    return undo


def _replace(rows: Iterable[tuple[Any, dict[str, Any]]], undo: ExitStack) -> None:
    for owner, replacements in rows:
        for name, new in replacements.items():
            entries = owner if isinstance(owner, MutableMapping) else vars(owner)
            undo.callback(_put, owner, name, entries.get(name, _ABSENT))
            _put(owner, name, new)


def _replace_in_megatron(undo: ExitStack) -> None:
    """In its modules that are imported, and in each of the others as soon as it is."""

    def replace(module: ModuleType) -> None:
        _replace(MODULES[module.__name__](module), undo)

    for name in [name for name in MODULES if name in sys.modules]:
        replace(sys.modules[name])
    finder = AfterImport(MODULES, then=replace)
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)


def _put(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, MutableMapping):
        if value is _ABSENT:
            owner.pop(name, None)
        else:
            owner[name] = value
    elif value is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, value)

"""Enter and leave the emulation."""

import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch

from megatron_on_cpu import transformer_engine as engine
from megatron_on_cpu.megatron_modules import MODULES, AfterImport, Modules
from megatron_on_cpu.nccl_rules import NcclRules
from megatron_on_cpu.products import replace_products
from megatron_on_cpu.random_numbers import two_generators
from megatron_on_cpu.redirections import redirections

_lock = threading.Lock()
_entered = 0  # how many `with megatron_on_cpu()` are open in this process
_undo = ExitStack()
_with_engine = False  # whether the outermost context emulates Transformer Engine
_rules: NcclRules | None = None  # of the outermost context


@contextmanager
def megatron_on_cpu(transformer_engine: bool = False, nccl_rules: NcclRules | None = None) -> Iterator[None]:
    """Run Megatron-Core on the CPU and over gloo inside this context: models, data parallelism, optimizers, schedules.

    For laptops, CI and debuggers: unmodified Megatron computes on the CPU where it would use CUDA device 0. The context
    may be entered before or after `megatron.core` is imported, by several threads, and inside itself, where the
    outermost context counts; it holds for all threads of the process. On leaving, also by an exception, every attribute
    that was replaced is the original object again. Use models and optimizers only inside if they were built inside.

    Without `transformer_engine` Megatron needs its local layers (no Apex, no Transformer Engine):
    `transformer_impl="local"`, no gradient accumulation fusion, no persistent layer norm, no masked softmax fusion.
    Compiled functions run as plain Python inside; a function that `torch.compile` decorates inside is compiled at its
    first call outside. Mamba layers train in plain PyTorch where `mamba_ssm` is not installed (Megatron asks for
    `einops`), without packed sequences.

    16-bit matrices are multiplied in fp32 and the result is rounded once where the processor has no 16-bit products:
    torch's own kernels would take 10 to 60 times as long (`megatron_on_cpu.products`).

    The emulated device draws random numbers from a generator of its own, as a GPU does; a data loader, for example,
    draws from the host's generator and leaves the device's unchanged. After leaving, the host's state continues.

    Args:
        transformer_engine: run Transformer Engine's own Python code too, over plain PyTorch in the place of its
            compiled module: `transformer_impl="transformer_engine"`, and gradient accumulation fusion. Its Python
            package has to be installed. Once imported, it and Megatron keep their state until the process ends.
        nccl_rules: replace NCCL by a backend that hangs and refuses where NCCL does, and says why. None: gloo, which
            accepts programs that NCCL does not. `docs/nccl_rules.md` has the rules.

    Raises:
        RuntimeError: CUDA is initialised in this process; two devices cannot both be "cuda". With `transformer_engine`:
            Megatron was imported before and found no Transformer Engine, the compiled module is loaded, the version is
            not supported, or an open emulation lacks it. With `nccl_rules`: an open emulation has none or others.
        ModuleNotFoundError: `transformer_engine` is asked for, and its Python package is not installed.
    """
    global _entered, _undo, _with_engine, _rules
    with _lock:
        if _entered == 0:
            _undo, _with_engine, _rules = _enter(transformer_engine, nccl_rules), transformer_engine, nccl_rules
        elif transformer_engine and not _with_engine:
            raise RuntimeError(
                "megatron_on_cpu(transformer_engine=True) was entered inside of megatron_on_cpu() without it; ask for "
                "Transformer Engine in the outermost one"
            )
        elif nccl_rules not in (None, _rules):
            raise RuntimeError(
                f"megatron_on_cpu(nccl_rules={nccl_rules}) was entered inside of megatron_on_cpu(nccl_rules={_rules}), "
                f"whose groups go on: give the rules to the outermost one"
            )
        _entered += 1
    try:
        yield
    finally:
        with _lock:
            _entered -= 1
            if _entered == 0:
                _undo.close()


def _enter(transformer_engine: bool, nccl_rules: NcclRules | None) -> ExitStack:
    """Make all replacements; closing the returned stack undoes them, the last one first."""
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "megatron_on_cpu() was entered after CUDA was initialised in this process: its tensors and random state "
            "live on the GPU already; enter the emulation before the first CUDA call, or run in a new process"
        )
    if transformer_engine:
        engine.check()
    # torch and its compiler list torch's functions at first use. A list made inside would hold our replacements until
    # the process ends (and the compiler fails where one replacement stands for two functions).
    with torch.device("cpu"):
        torch.empty(0)
    torch.compile(lambda: None, backend="eager")
    undo, replaced = ExitStack(), Replaced()
    undo.callback(_replace_copies, replaced)  # runs last on leaving
    try:
        undo.enter_context(torch.compiler.set_stance("force_eager"))
        replace_products(undo)
        _replace(redirections(*undo.enter_context(two_generators()), nccl_rules), undo, replaced)
        modules = MODULES
        if transformer_engine:
            _replace(engine.redirections(undo), undo, replaced)
            modules = MODULES | engine.MODULES
        _replace_in(modules, undo, replaced)
    except BaseException:
        undo.close()
        raise
    return undo


Replaced = dict[int, list[tuple[Any, str, Any]]]  # by the replacement's id: (replacement, attribute name, original)


def _replace_copies(replaced: Replaced) -> None:
    """Put originals back into modules of Megatron that were imported inside and hold copies of replacements. Where one
    replacement stands for several originals, a copy gets the original of its own name."""
    for module in [module for name, module in sys.modules.items() if name.startswith("megatron.")]:
        for name, value in list(vars(module).items()):
            found = replaced.get(id(value), [])
            originals = {id(row[2]): row[2] for row in found if len(found) == 1 or row[1] == name}
            if len(originals) == 1:
                setattr(module, name, *originals.values())


def _replace(rows: Iterable[tuple[Any, dict[str, Any]]], undo: ExitStack, replaced: Replaced) -> None:
    for owner, replacements in rows:
        for name, new in replacements.items():
            if isinstance(new, (FunctionType, type)) and hasattr(owner, name):
                replaced.setdefault(id(new), []).append((new, name, getattr(owner, name)))
            undo.enter_context(patch.object(owner, name, new, create=True))


def _replace_in(modules: Modules, undo: ExitStack, replaced: Replaced) -> None:
    """Replace attributes of the modules that are imported, and of each other module as soon as it is imported."""

    def replace(module: ModuleType) -> None:
        _replace(modules[module.__name__](module), undo, replaced)

    for name in [name for name in modules if name in sys.modules]:
        replace(sys.modules[name])
    finder = AfterImport(modules, then=replace)
    sys.meta_path.insert(0, finder)
    undo.callback(sys.meta_path.remove, finder)

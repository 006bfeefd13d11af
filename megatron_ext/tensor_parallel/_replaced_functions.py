"""Functions that users put in the place of Megatron's or ours: which one a linear layer has to call.

Quantizers replace `linear_with_grad_accumulation_and_async_allreduce` in `megatron.core.tensor_parallel.layers` while a
layer runs, and count on the layer to look the function up there. A name says nothing about a function, since decorators
copy names: here the code object decides.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch.amp.autocast_mode

from megatron_ext.tensor_parallel._layers import megatron_linear_functions

_HOMES = ("megatron_ext.tensor_parallel.layers", "megatron.core.tensor_parallel.layers")
# Functions of a trainable and of a frozen weight, each with the autograd class that Megatron's looks up.
_LINEAR = "linear_with_grad_accumulation_and_async_allreduce", "LinearWithGradAccumulationAndAsyncCommunication"
_FROZEN = "linear_with_frozen_weight", "LinearWithFrozenWeight"
HONOURED = _LINEAR[0], _FROZEN[0]
_TORCH = str(Path(torch.__file__).parent)
_DECORATORS = (torch.amp.autocast_mode.__file__, contextlib.__file__)  # Megatron uses them itself
_originals: dict[bool, list[Any]] = {}


def users_linear_function(frozen: bool) -> Callable[..., Any] | None:
    """The function to call, by Megatron's arguments, in the place of our matmul; None where nobody replaced any.

    Raises:
        RuntimeError: an autograd class was replaced whose function is ours, which does not call that class.
    """
    name, autograd = _FROZEN if frozen else _LINEAR
    found = []
    for home in _HOMES:
        if home in sys.modules:
            module = vars(sys.modules[home])
            methods = vars(module[autograd])
            found.append((home, module[name], module[autograd], methods.get("forward"), methods.get("backward")))
    if found == _originals.get(frozen):
        return None
    ours = vars(megatron_linear_functions)
    for home, function, kind, forward, _ in found:
        if function is not ours[name] and not is_megatrons_own(function):
            return function
        if is_megatrons_own(kind) if kind is not ours[autograd] else forward is None:
            continue
        if function is not ours[name]:
            return function  # Megatron's, which calls the class that was replaced
        raise RuntimeError(
            f"{home}.{autograd} was replaced, and megatron_ext's {name} does not call that class: replace "
            f"{home}.{name} instead, which the layers look up, or take Megatron's own layers"
        )
    _originals[frozen] = found
    return None


# What `torch.compiler.assume_constant_result` does, which imports torch._dynamo, and that Triton.
users_linear_function._dynamo_marked_constant = True  # type: ignore[attr-defined]


def is_megatrons_own(value: Any) -> bool:
    """True if all code of a function or class is Megatron-Core's, or torch's where Megatron has torch make it.

    What can be called and has no Python code is asked for its module.
    """
    codes = list(_codes(value))
    if not codes:
        return not callable(value) or str(getattr(value, "__module__", "")).startswith("megatron.core")
    folder = str(Path(str(sys.modules["megatron.core"].__file__)).parent)
    return all(code.co_filename.startswith((folder, _TORCH, "<")) for code in codes)  # "<": methods of dataclasses


def _codes(value: Any) -> Iterator[CodeType]:
    if isinstance(value, type):
        for member in vars(value).values():
            if not isinstance(member, type):
                yield from _codes(member)
        return
    value = getattr(value, "__func__", value)
    code = getattr(value, "__code__", None)
    while isinstance(code, CodeType) and code.co_filename in _DECORATORS and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
        code = getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        yield code

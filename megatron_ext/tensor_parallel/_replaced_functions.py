"""Functions by which users replace Megatron's or ours: the one that a linear layer has to call, and those that raise an
error, since our layers do not call them.

Quantizers replace `linear_with_grad_accumulation_and_async_allreduce` in `megatron.core.tensor_parallel.layers` while a
layer runs, and count on the layer to look the function up there. A name says nothing about a function, since decorators
copy names: here the code object decides.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.amp.autocast_mode

from megatron_ext.tensor_parallel._layers import megatron_linear_functions

_HOMES = ("megatron_ext.tensor_parallel.layers", "megatron.core.tensor_parallel.layers")
# Functions for a trainable and for a frozen weight, each with the autograd class that Megatron's function looks up.
_LINEAR = "linear_with_grad_accumulation_and_async_allreduce", "LinearWithGradAccumulationAndAsyncCommunication"
_FROZEN = "linear_with_frozen_weight", "LinearWithFrozenWeight"
HONOURED = _LINEAR[0], _FROZEN[0]
_LAYERS, _EMBEDDING, _OF_LOGITS = "linear layers", "embeddings", "losses of logits"
_MAPPINGS, _CROSS_ENTROPY = "megatron.core.tensor_parallel.mappings", "megatron.core.tensor_parallel.cross_entropy"
# By layer and module, functions and classes that Megatron's layers look up (linear ones beside those above), ours not.
_NOT_CALLED: dict[str, dict[str, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    _LAYERS: {
        _HOMES[1]: (
            (
                *("copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"),
                *("gather_from_tensor_model_parallel_region", "scatter_to_tensor_model_parallel_region"),
                *("gather_from_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region"),
            ),
            (),
        ),
        _MAPPINGS: (("_reduce",), ("_CopyToModelParallelRegion", "_ReduceFromModelParallelRegion")),
    },
    _EMBEDDING: {
        _HOMES[1]: (("reduce_from_tensor_model_parallel_region", "reduce_scatter_to_sequence_parallel_region"), ()),
        _MAPPINGS: (("_reduce",), ("_ReduceFromModelParallelRegion", "_ReduceScatterToSequenceParallelRegion")),
    },
    _OF_LOGITS: {
        _CROSS_ENTROPY: ((), ("VocabParallelCrossEntropy", "_VocabParallelCrossEntropy", "VocabUtility")),
    },
}
_INSTEAD = {
    _LAYERS: f"replace {_HOMES[1]}.{_LINEAR[0]} or {_FROZEN[0]} instead, which the layers look up, or use "
    f"Megatron's own layers",
    _EMBEDDING: "take Megatron's own embedding, or give the model's spec one of your own",
    _OF_LOGITS: f"replace {_CROSS_ENTROPY}.vocab_parallel_cross_entropy instead, after the substitution",
}
_TORCH = str(Path(torch.__file__).parent)
_DECORATORS = (torch.amp.autocast_mode.__file__, contextlib.__file__)  # Megatron uses them itself
_NOTHING: dict[str, Any] = {}
_originals: dict[bool | str, list[Any]] = {}


def users_linear_function(frozen: bool) -> Callable[..., Any] | None:
    """Return the function to call, by Megatron's arguments, in place of our matmul; None if no function was replaced.

    Raises:
        RuntimeError: an autograd class was replaced whose function is ours, which does not call that class; or another
            function or class that Megatron's layers look up, and ours do not call.
    """
    name, autograd = _FROZEN if frozen else _LINEAR
    refuse_replaced(_LAYERS)
    found: list[Any] = []
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
            f"{home}.{name} instead, which the layers look up, or use Megatron's own layers"
        )
    _originals[frozen] = found
    return None


def refuse_replaced(by: str) -> None:
    """Raise RuntimeError if a function, a class or a method that Megatron's `by` look up was replaced."""
    found: list[Any] = []
    for home, (functions, classes) in _NOT_CALLED[by].items():
        if home in sys.modules:
            look_up = sys.modules[home].__dict__.get
            found += map(look_up, functions)
            for kind in map(look_up, classes):
                found += (kind, *getattr(kind, "__dict__", _NOTHING).values())
    if found == _originals.get(by):
        return
    if by == _OF_LOGITS and not _is_ours(
        getattr(sys.modules.get(_CROSS_ENTROPY), "vocab_parallel_cross_entropy", None)
    ):
        return  # ours was called by its own name
    for home, (functions, classes) in _NOT_CALLED[by].items():
        module = vars(sys.modules[home]) if home in sys.modules else {}
        for name in (*functions, *classes):
            for place, part in parts_of(name, module.get(name)):
                if not _is_ours(part) and not is_megatrons_own(part):
                    raise RuntimeError(
                        f"{home}.{place} was replaced, and megatron_ext's {by} do not call it: {_INSTEAD[by]}"
                    )
    _originals[by] = found


def parts_of(name: str, value: Any) -> list[tuple[str, Any]]:
    """List the value under a name, and all that a class holds but classes, each by its name."""
    inside = vars(value).items() if isinstance(value, type) else ()
    return [(name, value), *((f"{name}.{key}", part) for key, part in inside if not isinstance(part, type))]


# As `torch.compiler.assume_constant_result` does, without its import of torch._dynamo, which imports Triton.
users_linear_function._dynamo_marked_constant = True  # type: ignore[attr-defined]
refuse_replaced._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _is_ours(value: Any) -> bool:
    value = getattr(value, "__func__", value)
    home = value.__module__ if isinstance(value, type) else getattr(value, "__globals__", {}).get("__name__", "")
    return str(home).startswith("megatron_ext.")


def is_megatrons_own(value: Any) -> bool:
    """True if all code of a function or class is Megatron-Core's, or torch's where Megatron has torch make it.

    A callable without Python code is judged by its class: its attributes may be those of another object.
    """
    if isinstance(value, type):
        return all(is_megatrons_own(one) for one in vars(value).values() if not isinstance(one, type)) and (
            value.__module__.startswith("megatron.core")
        )
    value = getattr(value, "__func__", value)
    while type(value) is FunctionType and value.__code__.co_filename in _DECORATORS and hasattr(value, "__wrapped__"):
        value = value.__wrapped__
    if type(value) is not FunctionType:
        return not callable(value) or type(value).__module__ == "builtins"
    file, home = value.__code__.co_filename, str(value.__globals__.get("__name__"))
    megatron = sys.modules.get("megatron.core")  # ours can be replaced where there is none
    folder = _TORCH if megatron is None else str(Path(str(megatron.__file__)).parent)
    # Methods of dataclasses have no file, and neither has code that a user types.
    return file.startswith((folder, _TORCH)) or (file.startswith("<") and home.startswith("megatron.core"))

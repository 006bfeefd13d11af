"""The code between hidden states and loss that is known: Megatron's own and ours, by identity and not by names.

A decorator with `functools.wraps` has every name of the function that it wraps, and its `__module__`. It does not have
its globals: those are of the file that defines it. An object of wrapt's has even these, and `isinstance` believes it.
"""

import operator
import sys
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_ext.megatron.fused_loss import patch_points
from megatron_ext.megatron.output_layer import OutputLayer
from megatron_ext.megatron.substitute import megatrons_own_layer
from megatron_ext.tensor_parallel import layers as our_layers

_HOMES = ("megatron.core.", "megatron_ext.")
_TORCH = ("torch._dynamo", "torch.amp.")  # what is compiled, or told of autocast, is the same function still
# What Megatron's own output layer and loss look up where it stands, and others replace there; some versions lack some.
_PLACES = {
    "megatron.core.tensor_parallel": ("vocab_parallel_cross_entropy",),
    "megatron.core.tensor_parallel.cross_entropy": (
        *("vocab_parallel_cross_entropy", "_VocabParallelCrossEntropy", "VocabParallelCrossEntropy", "VocabUtility"),
    ),
    "megatron.core.fusions.fused_cross_entropy": (
        *("_VocabParallelCrossEntropy", "VocabParallelCrossEntropy", "VocabUtility"),
        *("calculate_logits_max", "calculate_predicted_logits", "calculate_cross_entropy_loss", "calculate_gradients"),
    ),
    "megatron.core.tensor_parallel.layers": (
        *("linear_with_grad_accumulation_and_async_allreduce", "LinearWithGradAccumulationAndAsyncCommunication"),
        *("linear_with_frozen_weight", "LinearWithFrozenWeight", "copy_to_tensor_model_parallel_region"),
    ),
    "megatron.core.tensor_parallel.mappings": ("_CopyToModelParallelRegion", "_reduce"),
    LanguageModule.__module__: ("fused_vocab_parallel_cross_entropy", "te_parallel_cross_entropy"),
}


def in_places() -> dict[str, Any]:
    """Collect what stands in the places that Megatron's output layer and loss look up, by its full name."""
    found: dict[str, Any] = {}
    for home, names in _PLACES.items():
        module = sys.modules.get(home)
        for name in names:
            if (value := getattr(module, name, None)) is not None:
                found[f"{home}.{name}"] = value
                if isinstance(value, type):
                    for method, inner in vars(value).items():
                        if isinstance(inner, staticmethod | classmethod | FunctionType):
                            found[f"{home}.{name}.{method}"] = getattr(inner, "__func__", inner)
    return found


def function_of(value: Any) -> Any:
    """The function of a method, also as a partial of its model alone; itself where it is none.

    Any other partial is another function.
    """
    bound = value.args if type(value) is partial and not value.keywords else ()
    if len(bound) == 1 and isinstance(bound[0], torch.nn.Module):
        return value.func
    return value.__func__ if type(value) is MethodType else value


def is_own(value: Any) -> bool:
    """Tell whether a function or class is defined in Megatron or here, and all that it wraps too."""
    while value is not None:
        function = function_of(value)
        home = function.__module__ if issubclass(type(function), type) else _home(function)
        inner = getattr(function, "__wrapped__", None)
        if not home.startswith(_HOMES) and not (home.startswith(_TORCH) and inner is not None):
            return False
        value = inner
    return True


def what_is_not_known(model: Any) -> str | None:
    """Say what of a model's output layer and loss is not Megatron's own or ours; None if all is."""
    if (reason := why_not_known(patch_points.output_layer(model))) is not None:
        return reason
    loss = function_of(patch_points.own_loss(model))
    if loss is not _LOSS:
        return f"it has a {patch_points.LOSS} of its own{_where(loss)}"
    global _seen_as_own
    found = in_places()
    values = list(found.values())
    if len(values) != len(_seen_as_own) or not all(map(operator.is_, values, _seen_as_own)):
        for name, value in found.items():
            if not is_own(value):
                return f"{name} is not Megatron's own{_where(value)}"
        _seen_as_own = values
    return None


def why_not_known(layer: Any) -> str | None:
    """Return why an output layer is not known to be linear, with a bias and a softcap or without; None if it is."""
    kind = type(layer)
    if patch_points.FORWARD in vars(layer):
        return "its output layer has a forward of its own, put there by somebody else"
    if (inner := getattr(layer, "_forward_impl", None)) is not None and not is_own(inner):
        return f"its output layer has a _forward_impl of its own{_where(inner)}"
    forwards = [vars(one)["forward"] for one in kind.__mro__ if "forward" in vars(one) and one is not torch.nn.Module]
    if kind.forward in _FORWARDS and all(map(is_own, forwards)):
        return None
    said_by_user = hasattr(layer, "softcap") and not isinstance(layer, OutputLayer)
    if said_by_user and not hasattr(kind.forward, "__wrapped__"):
        return None
    if hasattr(layer, "to_wrap"):
        return (
            f"its output layer is a {kind.__name__}, which adds an adapter to another layer's logits; leave "
            f"output_layer out of the adapter's target modules, or merge the adapter into the weight"
        )
    return (
        f"its output layer is a {kind.__name__} with a forward of its own{_where(kind.forward)}; if that is a linear "
        f"layer, with a softcap or without, give it an attribute `softcap` (a number, or None)"
    )


def why_not_linear(layer: Any) -> str | None:
    """Return why the logits of an output layer are not known without a proof; None if they are."""
    return patch_points.why_not_promised(layer) or why_not_known(layer)


def _home(function: Any) -> str:
    return str(function.__globals__.get("__name__")) if type(function) is FunctionType else ""


def _where(value: Any) -> str:
    """The file and line that define a function, where it has some."""
    code = getattr(function_of(value), "__code__", None)
    return "" if code is None else f" ({code.co_filename}:{code.co_firstlineno})"


# What others have put in these places before this module was imported is not known.
_LOSS = LanguageModule.compute_language_model_loss if is_own(LanguageModule.compute_language_model_loss) else None
_OURS = our_layers.ColumnParallelLinear
_LINEAR: list[Any] = [megatrons_own_layer(_OURS), _OURS, OutputLayer]
_FORWARDS = [kind.forward for kind in _LINEAR if is_own(kind.forward)]
_seen_as_own: list[Any] = []

"""Which Megatron-Core this is, and where the fused head goes into it. The one file that knows versions.

0.14 to 0.16 differ in what GPTModel's `forward` and `_postprocess` take and in what lies between; where the fused head
goes in they agree. So we look at what is there, and ask for the version only to say that nobody has tried it.
"""

import functools
import inspect
import warnings
from typing import Any

import megatron.core
from megatron.core.pipeline_parallel import schedules

# `make test-versions` runs these.
TESTED = ("0.14.0", "0.15.3", "0.16.1")

FORWARD = "forward"
POSTPROCESS = "_postprocess"
LOSS = "compute_language_model_loss"
OUTPUT_PROCESSOR = "output_processor"

# What computes the output layer's weight gradients where a pipeline deferred them: (owner, name).
DRAIN = (schedules, "drain_embedding_wgrad_compute")


def megatron_version() -> str:
    return megatron.core.__version__


def is_tested(version: str) -> bool:
    """Whether a version lies in the tested range: from the first to the last minor version of `TESTED`."""
    return _minor(TESTED[0]) <= _minor(version) <= _minor(TESTED[-1])


@functools.cache
def warn_if_untested() -> None:
    """Say it once a process when this Megatron-Core is older or newer than what the tests run."""
    version = megatron_version()
    if not is_tested(version):
        warnings.warn(
            f"megatron_ext is tested with Megatron-Core {TESTED[0]} to {TESTED[-1]}, this is {version}: the fused head "
            f"goes in where it finds GPTModel's {POSTPROCESS} and {LOSS}",
            stacklevel=4,
        )


def _minor(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check_layout(model_class: type) -> None:
    """Find what the fused head needs of a GPTModel class.

    Raises:
        ValueError: something is missing; the message says what.
    """
    missing = [f"a method {name}()" for name in (FORWARD, POSTPROCESS, LOSS) if not callable(_find(model_class, name))]
    missing += [
        f"an argument `labels` of {name}()"
        for name in (FORWARD, POSTPROCESS)
        if callable(_find(model_class, name)) and not accepts(_find(model_class, name), "labels")
    ]
    if missing:
        raise ValueError(
            f"{model_class.__name__} of Megatron-Core {megatron_version()} lacks {', '.join(missing)}: the fused head "
            f"goes in there; pass a GPTModel of Megatron-Core {TESTED[0]} to {TESTED[-1]}"
        )


def accepts(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def has_output_processor(model_class: type) -> bool:
    """Whether a caller may bring its own way from hidden states to outputs (Megatron-Core 0.18 and newer)."""
    return OUTPUT_PROCESSOR in inspect.signature(_find(model_class, FORWARD)).parameters


def why_not_fused(model: Any) -> str | None:
    """Why the logits of this model cannot be promised, or None if they can.

    Only what is known to be a product of hidden states and weight, plus bias, with a softcap or without, can be; and
    only Megatron's own loss is known to be a cross entropy.
    """
    layer = model.output_layer
    forward = type(layer).forward
    plain = forward.__qualname__ == "ColumnParallelLinear.forward" and forward.__module__.startswith(
        ("megatron.core.tensor_parallel.", "megatron_ext.tensor_parallel.")
    )
    if FORWARD in vars(layer):
        return "its output layer has a forward of its own, put there by somebody else"
    if not plain and not hasattr(layer, "softcap"):
        return (
            f"its output layer is a {type(layer).__name__} with a forward of its own; if that is a linear layer, with "
            f"a softcap or without, give it an attribute `softcap` (a number, or None)"
        )
    if layer._backward_hooks or layer._backward_pre_hooks:
        return "its output layer has backward hooks, which need real logits"
    if LOSS in vars(model) or not _find(type(model), LOSS).__module__.startswith("megatron.core."):
        return f"it has a {LOSS} of its own"
    return None


def _find(owner: type, name: str) -> Any:
    """The attribute as it stands in the class or the first base that has it, None if there is none."""
    return next((vars(base)[name] for base in owner.__mro__ if name in vars(base)), None)

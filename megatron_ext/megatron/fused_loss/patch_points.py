"""Places of a Megatron model at which the fused head enters, and the reasons why a model is left alone.

Models differ in names and versions, and agree in this: an output layer makes logits, and
`compute_language_model_loss` takes a loss from them, both within one method that is given labels. That method is
`_postprocess` where a model has it (GPTModel, whose combined 1F1B schedule calls it alone), else `forward`
(HybridModel, MambaModel, BertModel, T5Model). So models are found by what they have, not by their names.
"""

import functools
import inspect
import weakref
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import megatron.core
import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import multi_token_prediction
from torch.nn.modules import module as torch_module

from megatron_ext.megatron.fused_loss.module_calls import standing
from megatron_ext.proof import why_fusion_is_off

FORWARD = "forward"
POSTPROCESS = "_postprocess"
LOSS = "compute_language_model_loss"
OUTPUT_PROCESSOR = "output_processor"
MXFP8_HEAD = "TELMHeadColumnParallelLinear"  # Megatron's output layer for `fp8_output_proj`, since 0.20
LABELS = ("labels", "lm_labels")
CALL = "_call_impl"  # the method of a module that runs its forward with its hooks
_ATTRIBUTES = ("weight", "bias", "sequence_parallel", "gather_output", "skip_bias_add", "gradient_accumulation_fusion")


def language_models() -> Iterator[type]:
    """Megatron's classes that have the loss, and all that are derived from them, as far as they are imported."""
    found: list[type] = [LanguageModule]
    for kind in found:  # which grows meanwhile
        found.extend(type.__subclasses__(kind))
    return iter(dict.fromkeys(found))


def methods(kind: type) -> Iterator[str]:
    """The methods that the class itself defines and that are given labels: those to be wrapped."""
    for name in (FORWARD, POSTPROCESS):
        method = vars(kind).get(name)
        if inspect.isfunction(method) and label_argument(method) is not None:
            yield name


def region(kind: type) -> str:
    """The method of a class within which logits are made and a loss is taken from them."""
    method = inspect.getattr_static(kind, POSTPROCESS, None)
    return POSTPROCESS if callable(method) and label_argument(method) is not None else FORWARD


_labels_of: "weakref.WeakKeyDictionary[Any, str | None]" = weakref.WeakKeyDictionary()  # by function


def label_argument(method: Any) -> str | None:
    """The name under which a method takes labels; None where it takes none."""
    if type(method) is not FunctionType:
        return _label_argument(method)
    if method not in _labels_of:
        _labels_of[method] = _label_argument(method)
    return _labels_of[method]


def _label_argument(method: Any) -> str | None:
    parameters = inspect.signature(method).parameters
    named = [name for name in LABELS if name in parameters]
    catches = inspect.Parameter.VAR_KEYWORD in [each.kind for each in parameters.values()]
    return named[0] if named else LABELS[0] if catches else None


def output_layer(model: Any) -> Any:
    """The layer that makes logits: the model's own, or that of its `lm_head` (T5Model); None on another stage."""
    if not getattr(model, "post_process", True):
        return None
    layer = getattr(model, "output_layer", None)
    return getattr(getattr(model, "lm_head", None), "output_layer", None) if layer is None else layer


def multi_token_layers(model: Any) -> int:
    """Count a model's layers of multi-token prediction."""
    return getattr(getattr(model, "config", None), "mtp_num_layers", None) or 0


def takes_losses_without_labels(model: Any) -> bool:
    """Return whether Megatron trains the model's layers of multi-token prediction without labels too, from the
    tokens."""
    function = getattr(multi_token_prediction, "process_mtp_loss", None)
    if function is None or not multi_token_layers(model):
        return False
    return model.training and "input_ids" in inspect.signature(function).parameters


def models_inside(model: Any) -> list[Any]:
    """The language models in a model: itself, or those it wraps (data parallelism, 16-bit, LLaVA, MIMO).

    Raises:
        ValueError: there is none, although this is the stage of a pipeline that has the labels.
    """
    inside = model.modules() if isinstance(model, torch.nn.Module) else [model]
    found = [one for one in inside if isinstance(one, LanguageModule) or not missing(type(one))]
    stage = getattr(model, "module", model)
    has_labels = getattr(stage, "post_process", True) and getattr(stage, "add_decoder", True)
    for kind in map(type, found or ([stage] if has_labels else [])):
        lacking = missing(kind)
        if lacking:
            raise ValueError(
                f"{kind.__name__} lacks {', '.join(lacking)}, and nothing inside it has them: the fused head goes in "
                f"there; pass a language model of Megatron-Core ({megatron.core.__version__} here), or a model around "
                f"one"
            )
    return found


def missing(kind: type) -> list[str]:
    """List what the fused head needs of a class and does not find, in words."""
    lacking = []
    for name in (FORWARD, POSTPROCESS) if hasattr(kind, POSTPROCESS) else (FORWARD,):
        method = inspect.getattr_static(kind, name, None)
        if not callable(method):
            lacking.append(f"a method {name}()")
        elif label_argument(method) is None:
            lacking.append(f"an argument `labels` of {name}()")
    if not callable(inspect.getattr_static(kind, LOSS, None)):
        lacking.append(f"a method {LOSS}()")
    return lacking


def why_not_fused(model: Any) -> str | None:
    """Return why the logits of this model cannot be promised, whatever its output layer is; None if they can.

    Whether they are a product, and its loss a cross entropy, is for `fusion_decision` and the proof to say.
    """
    return why_fusion_is_off() or why_not_promised(output_layer(model))


def why_not_promised(layer: Any) -> str | None:
    """Return why an output layer's logits cannot be promised; None if they can."""
    if not isinstance(layer, torch.nn.Module):
        return f"its output layer is a {type(layer).__name__} and no torch.nn.Module"
    if not all(map(functools.partial(hasattr, layer), _ATTRIBUTES)):
        lacking = [name for name in _ATTRIBUTES if not hasattr(layer, name)]
        return f"its output layer is a {type(layer).__name__}, which lacks {', '.join(lacking)} of Megatron's"
    if type(call := standing(layer, CALL)) is not MethodType or call.__func__ is not torch.nn.Module._call_impl:
        return f"its output layer has a {CALL} of its own, which would not run"
    mxfp8_head = getattr(transformer_engine, MXFP8_HEAD, None)
    if isinstance(mxfp8_head, type) and isinstance(layer, mxfp8_head):
        return (
            f"its output layer is a {MXFP8_HEAD}, which multiplies in MXFP8 (fp8_output_proj), and the fused head "
            f"multiplies in the dtype of the hidden states; for the fused head set fp8_output_proj=False"
        )
    if getattr(layer, "gtp_remat_size", 1) > 1:
        return (
            "generalized tensor parallelism cuts its output layer's weight over ranks that the fused head does not "
            "gather from; for the fused head set the size of generalized tensor parallelism to 1"
        )
    rounded, weight = getattr(layer, "output_dtype", None), getattr(layer, "weight", None)
    # One that borrows its weight says by its config what it multiplies in.
    operands = getattr(getattr(layer, "config", None), "params_dtype", None) if weight is None else weight.dtype
    if rounded not in (None, operands, torch.float32):
        return (
            f"its output layer rounds logits to {rounded} (logit_dtype) and multiplies in {operands}, and the fused "
            f"head rounds to the operands' dtype or not at all; for the fused head set logit_dtype to None or float32"
        )
    of_all = torch_module._global_backward_hooks or torch_module._global_backward_pre_hooks
    if layer._backward_hooks or layer._backward_pre_hooks or of_all:
        return "its output layer has backward hooks, which need real logits"
    return None

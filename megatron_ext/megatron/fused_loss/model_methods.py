"""Methods of Megatron's language models that the fused head replaces, and their replacements.

In all models and versions an output layer makes logits, and `compute_language_model_loss` computes a loss from them,
both within one method that takes labels. That method is `_postprocess` if the model has one (GPTModel, whose combined
1F1B schedule calls `_postprocess` by itself), else `forward` (HybridModel, MambaModel, BertModel, T5Model). So models
are recognised by their methods, not by their class names.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import megatron.core
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer import multi_token_prediction
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_ext.megatron.fused_loss import log_probs
from megatron_ext.megatron.fused_loss.fused_region import region_of
from megatron_ext.megatron.fused_loss.fusion_decision import FORWARD, LOSS, multi_token_layers
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.promised_logits import PromisedLogits, real_logits
from megatron_ext.megatron.output_processors import OPTIONS, forward_with_output_processor

POSTPROCESS = "_postprocess"
HEAD = "megatron_ext_head"  # the attribute of a layer spec that holds settings
LABELS = ("labels", "lm_labels")

SettingsFor = Callable[[Any], HeadSettings | None]  # the settings of a model; None: the model is not patched
Make = Callable[[Any, SettingsFor], Any]  # from an original method to its replacement


def language_models() -> Iterator[type]:
    """Return LanguageModule and all classes derived from it that are imported."""
    found: list[type] = [LanguageModule]
    for kind in found:  # the list grows in the loop
        found.extend(type.__subclasses__(kind))
    return iter(dict.fromkeys(found))


def methods(kind: type) -> Iterator[str]:
    """Yield the names of the methods to wrap: those that the class itself defines and that take labels."""
    for name in (FORWARD, POSTPROCESS):
        method = vars(kind).get(name)
        if inspect.isfunction(method) and label_argument(method) is not None:
            yield name


def loss_method(kind: type) -> str:
    """Return the name of the method of a class in which logits are made and a loss is computed from them."""
    method = inspect.getattr_static(kind, POSTPROCESS, None)
    return POSTPROCESS if callable(method) and label_argument(method) is not None else FORWARD


_labels_of: "weakref.WeakKeyDictionary[Any, str | None]" = weakref.WeakKeyDictionary()  # by function


def label_argument(method: Any) -> str | None:
    """Return the name of the parameter by which a method takes labels; None if it takes none."""
    known = type(method) is FunctionType
    if known and method in _labels_of:
        return _labels_of[method]
    parameters = inspect.signature(method).parameters
    named = [name for name in LABELS if name in parameters]
    catches = inspect.Parameter.VAR_KEYWORD in [each.kind for each in parameters.values()]
    found = named[0] if named else LABELS[0] if catches else None
    if known:
        _labels_of[method] = found
    return found


def models_inside(model: Any) -> list[Any]:
    """List the language models in a model: itself, or those that it wraps (data parallelism, 16-bit, LLaVA, MIMO).

    Raises:
        ValueError: there is none, although this pipeline stage gets the labels.
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
    """List, in words, the methods and arguments that the fused head needs and the class lacks."""
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


def takes_losses_without_labels(model: Any) -> bool:
    """Return whether Megatron trains the model's layers of multi-token prediction without labels too, from the
    tokens."""
    function = getattr(multi_token_prediction, "process_mtp_loss", None)
    if function is None or not multi_token_layers(model):
        return False
    return model.training and "input_ids" in inspect.signature(function).parameters


def settings_of_spec(model: Any, otherwise: HeadSettings | None = None) -> HeadSettings | None:
    """Return the settings that the model's layer spec names; `otherwise` if it names none."""
    for spec in vars(model).values():
        if HEAD in getattr(spec, "__dict__", ()):
            return vars(spec)[HEAD]
    return otherwise


def _fused(original: Any, settings_for: SettingsFor, name: str) -> Any:
    """Return a model's method that takes labels, with promised logits in calls that compute a loss."""
    signature, labels = inspect.signature(original), label_argument(original)

    def method(self, *args, **kwargs):
        settings = settings_for(self) if loss_method(type(self)) == name else None
        if settings is None or not isinstance(self, torch.nn.Module):  # no module: an unknown stand-in for a model
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments | kwargs
        with_labels = labels is not None and given.get(labels) is not None
        wanted = with_labels or takes_losses_without_labels(self)
        region = region_of(self, settings) if wanted else None
        if region is None:
            return original(self, *args, **kwargs)
        mask = given.get("loss_mask") if with_labels and settings.skip_ignored else None
        if mask is not None and labels is not None:
            counted = log_probs.masked(given[labels], mask)
            if labels in kwargs:
                kwargs = kwargs | {labels: counted}
            else:
                at = [*signature.parameters].index(labels) - 1  # without `self`
                args = (*args[:at], counted, *args[at + 1 :])
        results = region.run(functools.partial(original, self, *args, **kwargs))
        if isinstance(results, PromisedLogits):  # in a call without labels, whose caller wants logits
            region.quiet = True
            return results.logits().contiguous()
        # Promised logits beside a loss are made now: after the optimizer's step they would be those of other weights.
        return results if isinstance(results, Tensor) else tree_map(real_logits, results)

    return method


def _forward(original: Any, settings_for: SettingsFor) -> Any:
    """Return `forward` with the fused loss, log-probabilities of next tokens and output processors."""
    fused = _fused(original, settings_for, FORWARD)
    if label_argument(original) != "labels":  # BERT and T5, whose labels are no next tokens
        return fused
    processed = functools.cache(functools.partial(forward_with_output_processor, original, fused))
    signature = inspect.signature(processed(HeadSettings()))
    named, options = log_probs.with_arguments_read(signature), (log_probs.OPTION, *OPTIONS)

    def forward(self, *args, **kwargs):
        if kwargs.keys().isdisjoint(options):
            return fused(self, *args, **kwargs)
        if (settings := settings_for(self)) is None:
            return original(self, *args, **kwargs)
        call = functools.partial(processed(settings), self)
        if not kwargs.pop(log_probs.OPTION, False) or not self.post_process:
            return call(*args, **kwargs)
        return log_probs.of_next_tokens(self, settings, call, named.bind(self, *args, **kwargs))

    forward.__signature__ = log_probs.with_argument(signature, log_probs.OPTION, False)  # type: ignore[attr-defined]
    return forward


MAKES: dict[str, Make] = {
    FORWARD: _forward,
    POSTPROCESS: functools.partial(_fused, name=POSTPROCESS),
}

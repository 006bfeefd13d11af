"""The patch of Megatron's language models: with labels, the loss comes from hidden states without logits.

`megatron_ext.model_utils` has NeMo-RL's names of it, and says what users see; the launcher and layer specs call it too.

A language model asks its output layer for logits and hands them, with the labels, to `compute_language_model_loss`; it
does so once for the main loss and once for each multi-token-prediction layer. Those two calls are the seams. While a
patched method runs with labels, the output layer returns promised logits, and the loss redeems the promise with the
fused head. All the rest of the model is Megatron's own code.

The patched `forward` takes one argument more, `return_logprobs_for_linear_ce_fusion`, and answers it from the losses;
and `output_processor` where Megatron's does not (see `output_processors`).

The patch sits on the classes or on single models; `unpatch_...` puts the original objects back. A model's own settings
come before those of its layer spec (see `spec_head`), and these before those of the classes.
"""

import functools
import inspect
import weakref
from typing import Any

import megatron.core.utils
import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction as megatron_mtp
from torch import Tensor

from megatron_ext.megatron import versions
from megatron_ext.megatron.fused_loss import (
    acceptance_counts,
    function_wrapping,
    fusion_decision,
    log_probs,
    patch_points,
)
from megatron_ext.megatron.fused_loss.fused_region import Region, is_promising, must_stay_stock
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.megatron_log import with_head_logged
from megatron_ext.megatron.fused_loss.module_calls import in_this_call
from megatron_ext.megatron.fused_loss.promised_logits import PromisedLogits
from megatron_ext.megatron.output_processors import forward_with_output_processor
from megatron_ext.replace import Replacement, original_of


def patch_language_models(settings: HeadSettings, model: Any = None) -> None:
    """`megatron_ext.model_utils.patch_gpt_model_forward_for_linear_ce_fusion` with its settings in one object."""
    models = None if model is None else _models_in(model)
    fusion_decision.forget()
    versions.warn_if_untested()
    if models is None:
        function_wrapping.wrap_models(_MAKES, settings)
    else:
        for one in models:
            function_wrapping.wrap_model(one, _MAKES, settings)
            weakref.finalize(one, _guard_megatron).atexit = False
    _guard_megatron()


def patch_for_specs() -> None:
    """Models whose layer spec names a head get it; a patch of the classes that is there already stays."""
    if not function_wrapping.models_are_wrapped():
        versions.warn_if_untested()
        function_wrapping.wrap_models(_MAKES, None)
        _guard_megatron()


def unpatch_language_models(model: Any = None) -> None:
    """`megatron_ext.model_utils.unpatch_gpt_model_forward_for_linear_ce_fusion`."""
    if model is None:
        function_wrapping.unwrap_models()
    else:
        for one in _models_in(model):
            function_wrapping.unwrap_model(one)
    _guard_megatron()


def forward_with_fused_head(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run the patched `forward`, as a function of the model, which need not be patched.

    Arguments that are None are left to their defaults, so that those of one Megatron may be given to another.
    """
    kind, name = type(model), patch_points.region(type(model))
    settings = function_wrapping.settings_of(model, name)

    def patched(method: str) -> Any:
        return _MAKES[method](original_of(getattr(kind, method)), settings)

    with in_this_call(model, name, functools.partial(patched(name), model)):
        given = {argument: value for argument, value in kwargs.items() if value is not None}
        return patched(patch_points.FORWARD)(model, *args, **given)


def _fused(original: Any, settings: HeadSettings, name: str) -> Any:
    """A model's method that is given labels, with promised logits where it has them and an output layer."""
    signature, labels = inspect.signature(original), patch_points.label_argument(original)

    def method(self, *args, **kwargs):
        given = signature.bind(self, *args, **kwargs).arguments | kwargs
        with_labels = labels is not None and given.get(labels) is not None
        if (
            patch_points.region(type(self)) != name
            or not (with_labels or patch_points.takes_losses_without_labels(self))
            or not isinstance(self, torch.nn.Module)  # a stand-in for a model, of which nothing is known
            or patch_points.output_layer(self) is None
            or is_promising(self)
            or must_stay_stock(self, settings)
        ):
            return original(self, *args, **kwargs)
        mask = given.get("loss_mask") if with_labels and settings.skip_ignored else None
        if mask is not None and labels is not None:
            counted = log_probs.masked(given[labels], mask)
            if labels in kwargs:
                kwargs = kwargs | {labels: counted}
            else:
                at = [*signature.parameters].index(labels) - 1  # without `self`
                args = (*args[:at], counted, *args[at + 1 :])
        with Region(self, settings).entered() as region:
            results = original(self, *args, **kwargs)
            if isinstance(results, PromisedLogits):  # without labels the caller wants logits, or an output processor
                region.quiet = True
                return results.logits().contiguous()
            return results

    return method


def _forward(original: Any, settings: HeadSettings) -> Any:
    fused = _fused(original, settings, patch_points.FORWARD)
    if patch_points.label_argument(original) != "labels":  # BERT and T5, whose labels are no next tokens
        return fused
    return log_probs.forward_with_log_probs(forward_with_output_processor(original, fused, settings), settings)


_MAKES: dict[str, function_wrapping.Make] = {
    patch_points.FORWARD: _forward,
    patch_points.POSTPROCESS: functools.partial(_fused, name=patch_points.POSTPROCESS),
}


def _drain_if_deferred(original: Any) -> Any:
    """The fused head defers no weight gradient; Megatron's function fails where there is none to compute.

    Which function that is, is looked up at each call: `substitute_tensor_parallel()` may have put ours in its place.
    """

    def drain(config, embedding_activation_buffer, grad_output_buffer, *args, **kwargs):
        if embedding_activation_buffer or grad_output_buffer:
            megatron.core.utils.drain_embedding_wgrad_compute(
                config, embedding_activation_buffer, grad_output_buffer, *args, **kwargs
            )

    return drain


# Functions of Megatron's modules that stand wrapped while anything is patched; some versions lack some.
_DRAIN = Replacement(schedules, "drain_embedding_wgrad_compute", _drain_if_deferred)
_GUARDS = (
    _DRAIN,
    Replacement(schedules, "forward_step_calc_loss", with_head_logged),
    Replacement(megatron_mtp, acceptance_counts.COUNTS, acceptance_counts.counts_by_hits),
)


def _guard_megatron() -> None:
    """Megatron's functions are wrapped with the first patch and come back with the last patch or patched model."""
    patched = function_wrapping.models_of_their_own() or function_wrapping.models_are_wrapped()
    for guard in _GUARDS:
        if patched and hasattr(guard.owner, guard.name):
            guard.apply()
        elif guard is _DRAIN and guard.stands():
            guard.restore()  # and what `substitute_tensor_parallel()` put into Megatron meanwhile stays
            setattr(guard.owner, guard.name, getattr(megatron.core.utils, guard.name, guard.original))
        else:
            guard.restore()


def _models_in(model: Any) -> list[Any]:
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    return [inside for one in models for inside in patch_points.models_inside(one)]

"""The patch of Megatron's language models: with labels, the loss comes from hidden states without logits.

`megatron_ext.model_utils` has NeMo-RL's names of it, and says what users see; the launcher and layer specs call it too.

A language model asks its output layer for logits and hands them, with the labels, to `compute_language_model_loss`; it
does so once for the main loss and once for each multi-token-prediction layer. Those two calls are the seams. While a
patched method runs with labels, the output layer returns promised logits, and the loss redeems the promise with the
fused head. All the rest of the model is Megatron's own code.

The patched `forward` takes one argument more, `return_logprobs_for_linear_ce_fusion`, and answers it from the losses;
and `output_processor` where Megatron's does not (see `output_processors`).

The patch sits on the classes or on single models; `unpatch_...` puts the original objects back. A model's own settings
come before those of its layer spec (see `spec_head`), and these before those of the classes. A patch is found by
identity, also where a user's wrapper stands around it: patching again with other settings changes what is within that
wrapper.
"""

import functools
import inspect
import threading
import weakref
from collections.abc import Callable
from typing import Any

import megatron.core.utils
import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction as megatron_mtp
from torch import Tensor

from megatron_ext.megatron import versions
from megatron_ext.megatron.fused_loss import (
    fusion_decision,
    log_probs,
    megatron_log,
    patch_points,
)
from megatron_ext.megatron.fused_loss.fused_region import region_of
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.module_calls import in_this_call
from megatron_ext.megatron.fused_loss.promised_logits import PromisedLogits
from megatron_ext.megatron.output_processors import OPTIONS, forward_with_output_processor
from megatron_ext.replace import Replacement, original_of

SettingsFor = Callable[[Any], HeadSettings | None]  # of a model; None where it is left alone
Make = Callable[[Any, SettingsFor], Any]  # from an original to what stands in its place
_FUTURE = "__init_subclass__"
HEAD = "megatron_ext_head"  # the attribute of a layer spec that names settings
_guarding = threading.Lock()
_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()  # models after whose end Megatron's functions are looked at


def patch_language_models(settings: HeadSettings, model: Any = None) -> None:
    """`megatron_ext.model_utils.patch_gpt_model_forward_for_linear_ce_fusion` with its settings in one object."""
    models = None if model is None else _models_in(model)
    fusion_decision.forget()
    versions.warn_if_untested()
    if models is None:
        wrap_models(_MAKES, settings)
    else:
        for one in models:
            wrap_model(one, _MAKES, settings)
            if one not in _watched:
                _watched.add(one)
                weakref.finalize(one, _guard_megatron, False).atexit = False
    _guard_megatron()


def patch_for_specs() -> None:
    """Models whose layer spec names a head get it; a patch of the classes that is there already stays."""
    if not models_are_wrapped():
        versions.warn_if_untested()
        wrap_models(_MAKES, None)
        _guard_megatron()


def unpatch_language_models(model: Any = None) -> None:
    """`megatron_ext.model_utils.unpatch_gpt_model_forward_for_linear_ce_fusion`."""
    if model is None:
        unwrap_models()
    else:
        for one in _models_in(model):
            unwrap_model(one)
    _guard_megatron()


def forward_with_fused_head(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run the patched `forward`, as a function of the model, which need not be patched.

    Arguments that are None are left to their defaults, so that those of one Megatron may be given to another.
    """
    kind, name = type(model), patch_points.region(type(model))
    settings = settings_of(model, name)

    def patched(method: str) -> Any:
        return _MAKES[method](original_of(getattr(kind, method)), lambda model: settings)

    with in_this_call((model, name, functools.partial(patched(name), model))):
        given = {argument: value for argument, value in kwargs.items() if value is not None}
        return patched(patch_points.FORWARD)(model, *args, **given)


def _fused(original: Any, settings_for: SettingsFor, name: str) -> Any:
    """A model's method that is given labels, with promised logits where it has them and an output layer."""
    signature, labels = inspect.signature(original), patch_points.label_argument(original)

    def method(self, *args, **kwargs):
        settings = settings_for(self) if patch_points.region(type(self)) == name else None
        if settings is None or not isinstance(self, torch.nn.Module):  # a stand-in, of which nothing is known
            return original(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments | kwargs
        with_labels = labels is not None and given.get(labels) is not None
        wanted = with_labels or patch_points.takes_losses_without_labels(self)
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
        if isinstance(results, PromisedLogits):  # without labels the caller wants logits, or an output processor
            region.quiet = True
            return results.logits().contiguous()
        return results

    return method


def _forward(original: Any, settings_for: SettingsFor) -> Any:
    """`forward` with the fused loss, log-probabilities of next tokens and output processors."""
    fused = _fused(original, settings_for, patch_points.FORWARD)
    if patch_points.label_argument(original) != "labels":  # BERT and T5, whose labels are no next tokens
        return fused
    processed = functools.cache(functools.partial(forward_with_output_processor, original, fused))
    signature = inspect.signature(processed(HeadSettings()))
    options = (log_probs.OPTION, *OPTIONS)

    def forward(self, *args, **kwargs):
        if kwargs.keys().isdisjoint(options):
            return fused(self, *args, **kwargs)
        if (settings := settings_for(self)) is None:
            return original(self, *args, **kwargs)
        call = functools.partial(processed(settings), self)
        if not kwargs.pop(log_probs.OPTION, False) or not self.post_process:
            return call(*args, **kwargs)
        return log_probs.of_next_tokens(self, settings, call, signature.bind(self, *args, **kwargs))

    forward.__signature__ = log_probs.with_argument(signature, log_probs.OPTION, False)  # type: ignore[attr-defined]
    return forward


_MAKES: dict[str, Make] = {
    patch_points.FORWARD: _forward,
    patch_points.POSTPROCESS: functools.partial(_fused, name=patch_points.POSTPROCESS),
}


class Patch(Replacement):
    """A method of a class or a model with settings; of a class None for the models alone whose spec names some."""

    settings: HeadSettings | None = None

    def __init__(self, owner: Any, name: str):
        super().__init__(owner, name, original_of)

    def set(self, make: Make, settings: HeadSettings | None) -> None:
        """Put what `make` makes for the settings in the place, or let that stand there which stands there already."""
        wanted = functools.partial(_made_by_spec if isinstance(self.owner, type) else _made, make, settings)
        if self.placed is None:
            self.make = wanted
            self.apply()
        elif self.settings != settings:
            self.change(wanted)
        self.settings = settings


_of_classes: dict[tuple[type, str], Patch] = {}
_of_models: "weakref.WeakKeyDictionary[Any, list[weakref.ref[Patch]]]" = weakref.WeakKeyDictionary()


def settings_of(model: Any, name: str) -> HeadSettings:
    """Return the settings of the model's own patch, its spec or its class's patch; the default ones otherwise."""
    own = next((patch.settings for patch in _patches_of(model) if patch.name == name), None)
    kinds = (_of_classes.get((kind, name)) for kind in type(model).__mro__)
    of_class = next((patch.settings for patch in kinds if patch is not None), None)
    return own or settings_of_spec(model) or of_class or HeadSettings()


def settings_of_spec(model: Any, otherwise: HeadSettings | None = None) -> HeadSettings | None:
    """Return the settings that the model's layer spec names; `otherwise` if it names none."""
    for spec in vars(model).values():
        if HEAD in getattr(spec, "__dict__", ()):
            return vars(spec)[HEAD]
    return otherwise


def _made(make: Make, settings: Any, original: Any) -> Any:
    """`make` for the method of one model; the patch of its class is left out."""
    return make(original_of(original), lambda model: settings)


def _made_by_spec(make: Make, usual: HeadSettings | None, original: Any) -> Any:
    """`make` for the method of a class: settings of a model's spec come before those of the class."""
    method = make(original, functools.partial(settings_of_spec, otherwise=usual))
    if usual is None:
        method.__dict__.pop("__signature__", None)
    return method


def wrap_models(makes: dict[str, Make], settings: HeadSettings | None) -> None:
    """Patch the methods of every language model, and of those whose classes are made later.

    `settings`: None for the models alone whose spec names settings.
    """

    def wrap(kind: type) -> None:
        for name in patch_points.methods(kind):
            patch = _of_classes.setdefault((kind, name), Patch(kind, name))
            patch.set(makes[name], settings)

    def created(kind: type, **arguments: Any) -> None:
        super(LanguageModule, kind).__init_subclass__(**arguments)
        wrap(kind)

    for kind in patch_points.language_models():
        wrap(kind)
    LanguageModule.__init_subclass__ = classmethod(created)


def unwrap_models() -> None:
    for patch in _of_classes.values():
        patch.restore()
    _of_classes.clear()
    if _FUTURE in vars(LanguageModule):
        del LanguageModule.__init_subclass__


def models_are_wrapped() -> bool:
    return _FUTURE in vars(LanguageModule)


def wrap_model(model: Any, makes: dict[str, Make], settings: HeadSettings) -> None:
    """Patch the methods of one model, which come before those of its class."""
    patches = {patch.name: patch for patch in _patches_of(model)}
    for name in (patch_points.FORWARD, patch_points.POSTPROCESS):
        if name in vars(model) and name not in patches:
            raise ValueError(
                f"this {type(model).__name__} has a {name} of its own, which the patch would replace; patch first, or "
                f"patch the classes (model=None)"
            )
    for name in dict.fromkeys((patch_points.FORWARD, patch_points.region(type(model)))):
        if name not in patches:
            patches[name] = Patch(model, name)
        patches[name].set(makes[name], settings)
    # Held by the function that it has placed, and not here: a patch holds its model.
    _of_models[model] = [weakref.ref(patch) for patch in patches.values()]


def unwrap_model(model: Any) -> None:
    for patch in _patches_of(model):
        patch.restore()
    _of_models.pop(model, None)


def models_of_their_own() -> bool:
    """Return whether a model that is alive has a patch of its own."""
    return any(True for _ in _of_models)


def _patches_of(model: Any) -> list[Patch]:
    return [patch for ref in _of_models.get(model, ()) if (patch := ref()) is not None]


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
    Replacement(schedules, "forward_step_calc_loss", megatron_log.with_head_logged),
    Replacement(megatron_mtp, megatron_log.COUNTS, megatron_log.counts_by_hits),
)


def _guard_megatron(wait: bool = True) -> None:
    """Megatron's functions are wrapped with the first patch and come back with the last patch or patched model.

    The garbage collector, which may run in the midst of this, does not `wait`.
    """
    if not _guarding.acquire(wait):
        return
    try:
        patched = models_of_their_own() or models_are_wrapped()
        for guard in _GUARDS:
            if patched and hasattr(guard.owner, guard.name):
                guard.apply()
            elif guard is _DRAIN and guard.stands():
                guard.restore()  # and what `substitute_tensor_parallel()` put into Megatron meanwhile stays
                setattr(guard.owner, guard.name, getattr(megatron.core.utils, guard.name, guard.original))
            else:
                guard.restore()
    finally:
        _guarding.release()


def _models_in(model: Any) -> list[Any]:
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    return [inside for one in models for inside in patch_points.models_inside(one)]

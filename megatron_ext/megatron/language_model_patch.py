"""The patch of Megatron's language models: with labels, the loss comes from hidden states without logits.

`megatron_ext.model_utils` has and documents the public functions, under NeMo-RL's names; the launcher and layer specs
call this module too.

While a patched method runs with labels, the output layer returns promised logits, and `compute_language_model_loss`,
for the main loss and for each layer of multi-token prediction, computes losses from them with the fused head. All the
rest of the model is Megatron's own code.

The patched `forward` has one more argument, `return_logprobs_for_linear_ce_fusion`, and computes log-probabilities from
the losses. It takes `output_processor` too, also in versions whose `forward` does not (see `output_processors`).

The patch sits on the classes or on single models; `unpatch_...` puts the original objects back. A patch is found by
identity, also inside a user's wrapper: patching again with other settings changes the patch and leaves the wrapper.
"""

import functools
import threading
import weakref
from typing import Any

import megatron.core.utils
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction as megatron_mtp
from torch import Tensor

from megatron_ext.megatron import versions
from megatron_ext.megatron.fused_loss import fusion_decision, megatron_log, model_methods
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.megatron.fused_loss.model_methods import (
    FORWARD,
    MAKES,
    POSTPROCESS,
    Make,
    settings_of_spec,
)
from megatron_ext.megatron.fused_loss.module_calls import in_this_call
from megatron_ext.megatron.fusion_report import counted_models
from megatron_ext.replace import Replacement, original_of

_FUTURE = "__init_subclass__"
_guarding = threading.Lock()
_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()  # models with a finalizer that calls `_guard_megatron`


def patch_language_models(settings: HeadSettings, model: Any = None) -> None:
    """Do what `model_utils.patch_gpt_model_forward_for_linear_ce_fusion` documents, with the settings in one object."""
    models = None if model is None else _models_in(model)
    fusion_decision.forget()
    versions.warn_if_untested()
    if models is None:
        wrap_models(settings)
    else:
        for one in models:
            wrap_model(one, settings)
            if one not in _watched:
                _watched.add(one)
                weakref.finalize(one, _guard_megatron, False).atexit = False
    _guard_megatron()
    _update_report()


def patch_for_specs() -> None:
    """Patch the classes for models whose layer spec names a head; an existing patch of the classes stays."""
    if not models_are_wrapped():
        versions.warn_if_untested()
        wrap_models(None)
        _guard_megatron()
        _update_report()


def unpatch_language_models(model: Any = None) -> None:
    """Do what `megatron_ext.model_utils.unpatch_gpt_model_forward_for_linear_ce_fusion` documents."""
    patched = [counters for one, counters in counted_models() if _is_patched(one)]
    if model is None:
        for patch in _of_classes.values():
            patch.restore()
        _of_classes.clear()
        if models_are_wrapped():
            del LanguageModule.__init_subclass__
    else:
        for one in _models_in(model):
            for patch in _patches_of(one):
                patch.restore()
            _of_models.pop(one, None)
    _guard_megatron()
    for counters in patched:
        counters.unpatched = True
    _update_report()


def _update_report() -> None:
    """Have the fusion report describe the head of each patched model anew, at its next loss."""
    for model, counters in counted_models():
        if _is_patched(model):
            counters.unpatched, counters.sizes, counters.kept = False, "", None


def _is_patched(model: Any) -> bool:
    kinds = type(model).__mro__
    of_class = [patch.settings or settings_of_spec(model) for (kind, _), patch in _of_classes.items() if kind in kinds]
    shares_vocabulary = getattr(fusion_decision.output_layer(model), "promises", False)
    return bool(_patches_of(model) or any(of_class) or shares_vocabulary)


def forward_with_fused_head(model: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Run the patched `forward` of a model that need not be patched.

    Arguments that are None are not passed on, so that a call may name arguments that this Megatron-Core lacks.
    """
    kind, name = type(model), model_methods.loss_method(type(model))
    settings = settings_of(model, name)

    def patched(method: str) -> Any:
        return MAKES[method](original_of(getattr(kind, method)), lambda model: settings)

    with in_this_call((model, name, functools.partial(patched(name), model))):
        given = {argument: value for argument, value in kwargs.items() if value is not None}
        return patched(FORWARD)(model, *args, **given)


class Patch(Replacement):
    """The replacement of a method of a class or model, with its settings. Settings of None, for a class: only models
    whose layer spec names settings are affected."""

    settings: HeadSettings | None = None

    def __init__(self, owner: Any, name: str):
        super().__init__(owner, name, original_of)

    def set(self, make: Make, settings: HeadSettings | None) -> None:
        """Put the method that `make` builds for the settings in place, unless a patch with these settings is there."""
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
    """Return the settings of the model's own patch, else of its spec, else of its class's patch, else the defaults."""
    own = next((patch.settings for patch in _patches_of(model) if patch.name == name), None)
    kinds = (_of_classes.get((kind, name)) for kind in type(model).__mro__)
    of_class = next((patch.settings for patch in kinds if patch is not None), None)
    return own or settings_of_spec(model) or of_class or HeadSettings()


def _made(make: Make, settings: Any, original: Any) -> Any:
    """Build the patched method of one model, from the method without the patch of its class."""
    return make(original_of(original), lambda model: settings)


def _made_by_spec(make: Make, usual: HeadSettings | None, original: Any) -> Any:
    """Build the patched method of a class; settings of a model's spec come before those of the class."""
    method = make(original, functools.partial(settings_of_spec, otherwise=usual))
    if usual is None:
        method.__dict__.pop("__signature__", None)
    return method


def wrap_models(settings: HeadSettings | None) -> None:
    """Patch the methods of every class of language models, also of classes that are defined later.

    `settings`: None: only models whose layer spec names settings are affected.
    """

    def wrap(kind: type) -> None:
        for name in model_methods.methods(kind):
            patch = _of_classes.setdefault((kind, name), Patch(kind, name))
            patch.set(MAKES[name], settings)

    def created(kind: type, **arguments: Any) -> None:
        super(LanguageModule, kind).__init_subclass__(**arguments)
        wrap(kind)

    for kind in model_methods.language_models():
        wrap(kind)
    LanguageModule.__init_subclass__ = classmethod(created)


def models_are_wrapped() -> bool:
    return _FUTURE in vars(LanguageModule)


def wrap_model(model: Any, settings: HeadSettings) -> None:
    """Patch the methods of one model, which come before those of its class."""
    patches = {patch.name: patch for patch in _patches_of(model)}
    for name in (FORWARD, POSTPROCESS):
        if name in vars(model) and name not in patches:
            raise ValueError(
                f"this {type(model).__name__} has a {name} of its own, which the patch would replace; patch first, or "
                f"patch the classes (model=None)"
            )
    for name in dict.fromkeys((FORWARD, model_methods.loss_method(type(model)))):
        if name not in patches:
            patches[name] = Patch(model, name)
        patches[name].set(MAKES[name], settings)
    # The function that a patch has placed holds the patch. Held here, the patch would keep its model alive.
    _of_models[model] = [weakref.ref(patch) for patch in patches.values()]


def _patches_of(model: Any) -> list[Patch]:
    return [patch for ref in _of_models.get(model, ()) if (patch := ref()) is not None]


def _drain_if_deferred(original: Any) -> Any:
    """Return a function that calls Megatron's only if a weight gradient was deferred: the fused head defers none, and
    Megatron's function fails without one.

    Each call looks Megatron's function up: `substitute_tensor_parallel()` may have put ours in its place.
    """

    def drain(config, embedding_activation_buffer, grad_output_buffer, *args, **kwargs):
        if embedding_activation_buffer or grad_output_buffer:
            megatron.core.utils.drain_embedding_wgrad_compute(
                config, embedding_activation_buffer, grad_output_buffer, *args, **kwargs
            )

    return drain


# Functions of Megatron's modules that are wrapped while any model or class is patched; some versions lack some.
_DRAIN = Replacement(schedules, "drain_embedding_wgrad_compute", _drain_if_deferred)
_GUARDS = (
    _DRAIN,
    Replacement(schedules, "forward_step_calc_loss", megatron_log.with_head_logged),
    Replacement(megatron_mtp, megatron_log.COUNTS, megatron_log.counts_by_hits),
)


def _guard_megatron(wait: bool = True) -> None:
    """Wrap Megatron's functions if any model or class is patched; else put the originals back.

    `wait`: False when the garbage collector calls, which may run in the midst of another call of this function.
    """
    if not _guarding.acquire(wait):
        return
    try:
        patched = any(True for _ in _of_models) or models_are_wrapped()  # `_of_models` drops deleted models
        for guard in _GUARDS:
            if patched and hasattr(guard.owner, guard.name):
                guard.apply()
            elif guard is _DRAIN and guard.stands():
                guard.restore()  # then put the function back that Megatron has now, maybe ours by a substitution
                setattr(guard.owner, guard.name, getattr(megatron.core.utils, guard.name, guard.original))
            else:
                guard.restore()
    finally:
        _guarding.release()


def _models_in(model: Any) -> list[Any]:
    models = list(model) if isinstance(model, (list, tuple)) else [model]
    return [inside for one in models for inside in model_methods.models_inside(one)]

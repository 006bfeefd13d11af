"""The patch of Megatron's language models: with labels, the loss comes from hidden states without logits.

`megatron_ext.model_utils` has NeMo-RL's names of it, and says what users see; the launcher and layer specs call it too.

While a patched method runs with labels, the output layer returns promised logits, and `compute_language_model_loss`,
for the main loss and for each layer of multi-token prediction, redeems the promise with the fused head. All the rest of
the model is Megatron's own code.

The patched `forward` takes one argument more, `return_logprobs_for_linear_ce_fusion`, and answers it from the losses;
and `output_processor` where Megatron's does not (see `output_processors`).

The patch sits on the classes or on single models; `unpatch_...` puts the original objects back. A patch is found by
identity, also where a user's wrapper stands around it: patching again with other settings changes what is within it.
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
_watched: "weakref.WeakSet[Any]" = weakref.WeakSet()  # models after whose end Megatron's functions are looked at


def patch_language_models(settings: HeadSettings, model: Any = None) -> None:
    """`megatron_ext.model_utils.patch_gpt_model_forward_for_linear_ce_fusion` with its settings in one object."""
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
    """Models whose layer spec names a head get it; a patch of the classes that is there already stays."""
    if not models_are_wrapped():
        versions.warn_if_untested()
        wrap_models(None)
        _guard_megatron()
        _update_report()


def unpatch_language_models(model: Any = None) -> None:
    """`megatron_ext.model_utils.unpatch_gpt_model_forward_for_linear_ce_fusion`."""
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
    """Run the patched `forward`, as a function of the model, which need not be patched.

    Arguments that are None are left to their defaults, so that those of one Megatron may be given to another.
    """
    kind, name = type(model), model_methods.loss_method(type(model))
    settings = settings_of(model, name)

    def patched(method: str) -> Any:
        return MAKES[method](original_of(getattr(kind, method)), lambda model: settings)

    with in_this_call((model, name, functools.partial(patched(name), model))):
        given = {argument: value for argument, value in kwargs.items() if value is not None}
        return patched(FORWARD)(model, *args, **given)


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


def _made(make: Make, settings: Any, original: Any) -> Any:
    """`make` for the method of one model; the patch of its class is left out."""
    return make(original_of(original), lambda model: settings)


def _made_by_spec(make: Make, usual: HeadSettings | None, original: Any) -> Any:
    """`make` for the method of a class: settings of a model's spec come before those of the class."""
    method = make(original, functools.partial(settings_of_spec, otherwise=usual))
    if usual is None:
        method.__dict__.pop("__signature__", None)
    return method


def wrap_models(settings: HeadSettings | None) -> None:
    """Patch the methods of every language model, and of those whose classes are made later.

    `settings`: None for the models alone whose spec names settings.
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
    # Held by the function that it has placed, and not here: a patch holds its model.
    _of_models[model] = [weakref.ref(patch) for patch in patches.values()]


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
        patched = any(True for _ in _of_models) or models_are_wrapped()  # models that are alive
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
    return [inside for one in models for inside in model_methods.models_inside(one)]

"""Patches methods of Megatron's classes and of single models, and takes them out: replacements that have settings.

A patch is found by identity, also where a user's wrapper stands around it: patching again with other settings changes
what is within that wrapper.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_ext.megatron.fused_loss import patch_points
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings
from megatron_ext.replace import Replacement, original_of

Make = Callable[[Any, HeadSettings], Any]  # from an original and settings to what stands in its place
_FUTURE = "__init_subclass__"
HEAD = "megatron_ext_head"  # the attribute of a layer spec that names settings


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


def settings_of_spec(model: Any) -> HeadSettings | None:
    """Return the settings that the model's layer spec names; None if it names none."""
    return next((vars(spec)[HEAD] for spec in vars(model).values() if HEAD in getattr(spec, "__dict__", ())), None)


def _made(make: Make, settings: Any, original: Any) -> Any:
    """`make` for the method of one model; the patch of its class is left out."""
    return make(original_of(original), settings)


def _made_by_spec(make: Make, usual: HeadSettings | None, original: Any) -> Any:
    """`make` for the method of a class: settings of a model's spec come before those of the class."""
    fused = functools.cache(functools.partial(make, original))

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        settings = settings_of_spec(self) or usual
        return (original if settings is None else fused(settings))(self, *args, **kwargs)

    if usual is not None:
        method.__signature__ = inspect.signature(fused(usual))  # type: ignore[attr-defined]
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

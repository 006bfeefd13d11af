"""Replaces functions on Megatron's classes, models and modules, and restores them.

A wrapper remembers what it stands for and which settings it was made for, so that the original objects come back, and
so that wrapping again with other settings wraps the original.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_ext.megatron.fused_loss import patch_points
from megatron_ext.megatron.fused_loss.head_settings import HeadSettings

Make = Callable[[Any, HeadSettings], Any]  # from an original and settings to what stands in its place
ClassMake = Callable[[Any, HeadSettings | None], Any]  # None: for the models alone whose spec names settings
_FUTURE = "__init_subclass__"
HEAD = "megatron_ext_head"  # the attribute of a layer spec that names settings


def wrapper(original: Any, make: Make | ClassMake, settings: Any) -> Any:
    made: Any = functools.wraps(original)(make(original, settings))
    made.original, made.settings = original, settings
    return made


def original_of(function: Any) -> Any:
    return getattr(function, "original", function)


def settings_of(model: Any, name: str) -> HeadSettings:
    """Those of the model's own patch, of its spec, of its class's patch; the usual ones if there is none."""
    own, of_class = (getattr(f, "settings", None) for f in (vars(model).get(name), getattr(type(model), name, None)))
    return own or settings_of_spec(model) or of_class or HeadSettings()


def settings_of_spec(model: Any) -> HeadSettings | None:
    """Those that the layer spec names which the model was built from; None if it names none."""
    return next((vars(spec)[HEAD] for spec in vars(model).values() if HEAD in getattr(spec, "__dict__", ())), None)


def by_spec(make: Make) -> ClassMake:
    """`make` for the method of a class: settings of a model's spec come before those of the class."""

    def made(original: Any, usual: HeadSettings | None) -> Any:
        fused = functools.cache(functools.partial(make, original))

        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            settings = settings_of_spec(self) or usual
            return (original if settings is None else fused(settings))(self, *args, **kwargs)

        if usual is not None:
            method.__signature__ = inspect.signature(fused(usual))  # type: ignore[attr-defined]
        return method

    return made


def replace(owner: Any, name: str, make: Make | ClassMake, settings: HeadSettings | None) -> None:
    """Put a wrapper in the place of `owner.name`; one made for the same settings stays."""
    current = vars(owner)[name]
    if not hasattr(current, "settings") or current.settings != settings:
        setattr(owner, name, wrapper(original_of(current), make, settings))


def wrap_models(makes: dict[str, Make], settings: HeadSettings | None) -> None:
    """Wrap the methods of every language model, and of those whose classes are made later.

    `settings`: None for the models alone whose spec names settings.
    """

    def wrap(kind: type) -> None:
        for name in patch_points.methods(kind):
            replace(kind, name, by_spec(makes[name]), settings)

    def created(kind: type, **arguments: Any) -> None:
        super(LanguageModule, kind).__init_subclass__(**arguments)
        wrap(kind)

    for kind in patch_points.language_models():
        wrap(kind)
    LanguageModule.__init_subclass__ = classmethod(created)


def unwrap_models() -> None:
    for kind in patch_points.language_models():
        for name in patch_points.methods(kind):
            if hasattr(vars(kind)[name], "original"):
                setattr(kind, name, original_of(vars(kind)[name]))
    if _FUTURE in vars(LanguageModule):
        del LanguageModule.__init_subclass__


def models_are_wrapped() -> bool:
    return _FUTURE in vars(LanguageModule)


def wrap_model(model: Any, makes: dict[str, Make], settings: HeadSettings) -> None:
    """Wrap the methods of one model, which come before those of its class."""
    for name in (patch_points.FORWARD, patch_points.POSTPROCESS):
        if name in vars(model) and not hasattr(vars(model)[name], "original"):
            raise ValueError(
                f"this {type(model).__name__} has a {name} of its own, which the patch would replace; patch first, or "
                f"patch the classes (model=None)"
            )
    for name in dict.fromkeys((patch_points.FORWARD, patch_points.region(type(model)))):
        setattr(model, name, wrapper(original_of(getattr(type(model), name)), makes[name], settings).__get__(model))


def unwrap_model(model: Any) -> None:
    for name in (patch_points.FORWARD, patch_points.POSTPROCESS):
        if hasattr(vars(model).get(name), "original"):
            delattr(model, name)

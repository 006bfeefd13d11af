"""Functions put in the place of Megatron's, on classes, models and modules, and taken out again.

A wrapper remembers what it stands for and which settings it was made for, so that the original objects come back, and
so that wrapping again with other settings wraps the original.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule

from megatron_ext.megatron import model_seams
from megatron_ext.megatron.head_settings import HeadSettings

Make = Callable[[Any, HeadSettings], Any]  # from an original and settings to what stands in its place
_FUTURE = "__init_subclass__"


def wrapper(original: Any, make: Make, settings: HeadSettings) -> Any:
    made: Any = functools.wraps(original)(make(original, settings))
    made.original, made.settings = original, settings
    return made


def original_of(function: Any) -> Any:
    return getattr(function, "original", function)


def settings_of(model: Any, name: str) -> HeadSettings:
    """Those that the method of the model was wrapped with; the usual ones if it was not."""
    candidates = (vars(model).get(name), getattr(type(model), name, None))
    return next((found for f in candidates if (found := getattr(f, "settings", None)) is not None), HeadSettings())


def replace(owner: Any, name: str, make: Make, settings: HeadSettings) -> None:
    """Put a wrapper in the place of `owner.name`; one made for the same settings stays."""
    current = vars(owner)[name]
    if getattr(current, "settings", None) != settings:
        setattr(owner, name, wrapper(original_of(current), make, settings))


def restore(owner: Any, name: str) -> None:
    current = vars(owner)[name]
    if original_of(current) is not current:
        setattr(owner, name, original_of(current))


def wrap_models(makes: dict[str, Make], settings: HeadSettings) -> None:
    """Wrap the methods of every language model, and of those whose classes are made later."""

    def wrap(kind: type) -> None:
        for name in model_seams.methods(kind):
            replace(kind, name, makes[name], settings)

    def created(kind: type, **arguments: Any) -> None:
        super(LanguageModule, kind).__init_subclass__(**arguments)
        wrap(kind)

    for kind in model_seams.language_models():
        wrap(kind)
    LanguageModule.__init_subclass__ = classmethod(created)


def unwrap_models() -> None:
    for kind, name in wrapped_methods():
        restore(kind, name)
    if _FUTURE in vars(LanguageModule):
        del LanguageModule.__init_subclass__


def models_are_wrapped() -> bool:
    return _FUTURE in vars(LanguageModule)


def wrapped_methods() -> Iterator[tuple[type, str]]:
    """The classes, and the names of their methods, that stand wrapped."""
    for kind in model_seams.language_models():
        for name in model_seams.methods(kind):
            if hasattr(vars(kind)[name], "original"):
                yield kind, name


def wrap_model(model: Any, makes: dict[str, Make], settings: HeadSettings) -> None:
    """Wrap the methods of one model; they come before those of its class.

    Raises:
        ValueError: the model has such a method of its own, which is not its class's; nothing is changed.
    """
    for name in (model_seams.FORWARD, model_seams.POSTPROCESS):
        if name in vars(model) and not hasattr(vars(model)[name], "original"):
            raise ValueError(
                f"this {type(model).__name__} has a {name} of its own, which the patch would replace; patch first, or "
                f"patch the classes (model=None)"
            )
    for name in dict.fromkeys((model_seams.FORWARD, model_seams.region(type(model)))):
        setattr(model, name, wrapper(original_of(getattr(type(model), name)), makes[name], settings).__get__(model))


def unwrap_model(model: Any) -> None:
    for name in (model_seams.FORWARD, model_seams.POSTPROCESS):
        if hasattr(vars(model).get(name), "original"):
            delattr(model, name)

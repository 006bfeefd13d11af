"""Signatures of compiled functions that take many arguments, most of which are not used on a CPU."""

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


def taking(names: str, **defaults: Any) -> Callable[[Callable[[Any], Any]], Callable[..., Any]]:
    """Decorate a function of one object so that it takes the object's attributes as arguments, by position or by name:
    first `names`, separated by spaces, then those that have `defaults`."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind) for name in names.split()]
    parameters += [inspect.Parameter(name, kind, default=default) for name, default in defaults.items()]
    signature = inspect.Signature(parameters)

    def decorate(function: Callable[[Any], Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            given.apply_defaults()
            return function(SimpleNamespace(**given.arguments))

        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    return decorate

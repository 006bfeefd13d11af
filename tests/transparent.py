"""`Transparent`: a decorator like wrapt's, which has all attributes of the object that it wraps."""

from typing import Any


class Transparent:
    """A function whose result is doubled: a tensor, the first of a tuple, or the loss of a model's output."""

    def __init__(self, function: Any):
        object.__setattr__(self, "_function", function)

    def __getattribute__(self, name: str) -> Any:
        function = object.__getattribute__(self, "_function")
        return function if name == "__wrapped__" else getattr(function, name)

    @property
    def __class__(self) -> type:
        return type(self.__wrapped__)

    def __eq__(self, other: object) -> bool:
        return self.__wrapped__ == other

    def __hash__(self) -> int:
        return hash(self.__wrapped__)

    def __get__(self, instance: Any, kind: type | None = None) -> "Transparent":
        return self if instance is None else Transparent(self.__wrapped__.__get__(instance, kind))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.__wrapped__(*args, **kwargs)
        if isinstance(found, tuple):
            return (2 * found[0], *found[1:])
        if getattr(found, "loss", None) is None:
            return 2 * found
        found.loss = 2 * found.loss
        return found

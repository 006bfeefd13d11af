"""The one way in this package to put an object in another's place, and to restore the original.

    replacement = Replacement(GPTModel, "forward", make)  # make(original) returns the object for its place
    replacement.apply()
    ...
    replacement.restore()

A replacement recognises objects by identity, not by name or module, which `functools.wraps` copies from one function to
another. A wrapper that other code puts around ours stays: see `Replacement.restore`.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import is_dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

Make = Callable[[Any], Any]
_OURS = "_replacement"  # the attribute by which a function of ours knows its replacement


class Replacement:
    """Replacement of `owner.name` by `make(original)`, from `apply` to `restore`.

    Attributes:
        owner: a module, a class, an instance or a function; `name` may be `__bases__` or `__defaults__`.
        original: the object that was replaced, as the owner stores it; None before `apply`.
        placed: the object that took its place; None before `apply` and after `restore`.

    A function that `make` returns is placed inside of another function, which calls the original after `restore`. Any
    other object (a class, a tuple of bases) is placed as it is, and with `switched=False` functions are too: those that
    our own code calls by the same name. In the place of a method that an instance has from its class, a function is
    bound to the instance.
    """

    def __init__(self, owner: Any, name: str, make: Make, switched: bool = True):
        self.owner, self.name, self.make, self.switched = owner, name, make, switched
        self.original: Any = None
        self.placed: Any = None
        self._target: list[Any] = []  # what the placed function calls, alone in a list
        self._passed_on: Any = None  # what the placed function calls after `restore`
        self._own = True  # whether the owner itself stores the name, not only its class

    def apply(self) -> "Replacement":
        """Put our object in the place, unless it is applied already."""
        if self.placed is None:
            self._own = self.name in getattr(self.owner, "__dict__", {}) or _in_slot(self.owner, self.name)
            self.original = _stored(self.owner, self.name)
            made = self.make(self.original)
            self.placed = self._in_switch(made) if self.switched and type(made) is FunctionType else made
            if type(self.placed) is FunctionType and not self._own:
                self.placed = MethodType(self.placed, self.owner)
            _store(self.owner, self.name, self.placed)
        return self

    def change(self, make: Make) -> None:
        """Replace the placed object by what another `make` returns; wrappers that other code put around ours stay."""
        self.make = make
        if self._target:
            self._target[0] = made = make(self.original)
            self._show(self.placed, made)
        else:
            self.restore()
            self.apply()

    def restore(self) -> None:
        """Put the original back if our object is in the place. If another object is, ours, which that object may call,
        passes calls on to the original from now on."""
        if self.placed is None:
            return
        if self.stands():
            if self._own:
                _store(self.owner, self.name, self.original)
            else:
                delattr(self.owner, self.name)
        if self._target:
            self._target[0] = self._passed_on
            self._show(self.placed, self.original)
        self._target, self.placed = [], None

    def stands(self) -> bool:
        """Return whether the owner has our object, and not another in its place."""
        return self.placed is not None and _stored(self.owner, self.name) is self.placed

    def _in_switch(self, made: Any) -> Any:
        """Return a function that calls `made` until `restore`, and then the original; `made` itself if it is one."""
        if replacement_of(made) is not None:
            return made
        name, original = self.name, self.original

        def inherited(instance: Any, *args: Any, **kwargs: Any) -> Any:
            return getattr(type(instance), name)(instance, *args, **kwargs)

        target = self._target = [made]
        self._passed_on = original if self._own else inherited

        @functools.wraps(original)
        def placed(*args: Any, **kwargs: Any) -> Any:
            return target[0](*args, **kwargs)

        self._show(placed, made)
        setattr(placed, _OURS, self)
        return placed

    def _show(self, placed: Any, made: Any) -> None:
        """Have `inspect.signature` show the signature that `made` sets, or else the original's."""
        function = getattr(placed, "__func__", placed)
        function.__wrapped__ = made if "__signature__" in vars(made) else self.original


def replacement_of(value: Any) -> Replacement | None:
    """Return the applied replacement that placed this function or method; None if there is none."""
    function = getattr(value, "__func__", value)
    found = getattr(function, _OURS, None)  # decorators copy the attribute to functions that we did not place
    return found if found is not None and getattr(found.placed, "__func__", found.placed) is function else None


def original_of(value: Any) -> Any:
    """Return the original of a function or method that a replacement placed; any other value as it is."""
    while (found := replacement_of(value)) is not None:
        value = found.original
    return value


def apply_all(replacements: Iterable[Replacement]) -> list[Replacement]:
    """Apply all replacements; if one raises, restore those before it."""
    with ExitStack() as undo:
        applied = []
        for replacement in replacements:
            applied.append(replacement.apply())
            undo.callback(replacement.restore)
        undo.pop_all()
    return applied


def restore_all(replacements: Iterable[Replacement]) -> None:
    """Restore all replacements, the last one first."""
    for replacement in reversed([*replacements]):
        replacement.restore()


def in_modules(objects: Iterable[Any]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yield each imported module, name and object where the module has one of the objects, found by identity."""
    wanted = {id(value): value for value in objects}
    for module in [*sys.modules.values()]:
        if isinstance(module, ModuleType):
            for name, value in [*vars(module).items()]:
                if id(value) in wanted:
                    yield module, name, value


def everywhere(pairs: Sequence[tuple[Any, Any]]) -> list[list[Replacement]]:
    """Make replacements, still to be applied, of the first object of each pair by the second, in all imported modules.

    All replacements of a pair place the same object.
    """
    found: list[list[Replacement]] = [[] for _ in pairs]
    at = {id(original): i for i, (original, _) in enumerate(pairs)}

    def make(places: list[Replacement], ours: Any, _: Any) -> Any:
        return ours if places[0].placed is None else places[0].placed

    for module, name, value in in_modules(original for original, _ in pairs):
        places = found[at[id(value)]]
        places.append(Replacement(module, name, functools.partial(make, places, pairs[at[id(value)]][1])))
    return found


def restore_everywhere(places: Sequence[Replacement]) -> None:
    """Restore the replacements of one pair, and put the original into modules that have imported ours since."""
    if places:
        placed, original = places[0].placed, places[0].original
        restore_all(places)
        for module, name, _ in in_modules([placed]):
            setattr(module, name, original)


def name_of(value: Any) -> str:
    """Return the full name of a module, class or function; of another object, the name of its class."""
    if isinstance(value, ModuleType):
        return value.__name__
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def _stored(owner: Any, name: str) -> Any:
    """Return the stored object, not a bound method; the class's object if an instance has none of its own."""
    own = getattr(owner, "__dict__", {})
    if name in own:
        return own[name]
    return getattr(owner, name) if _in_slot(owner, name) else inspect.getattr_static(owner, name)


def _in_slot(owner: Any, name: str) -> bool:
    """Return whether the owner itself stores the name outside of its `__dict__`: bases, defaults, slots."""
    return inspect.isdatadescriptor(inspect.getattr_static(owner, name))


def _store(owner: Any, name: str, value: Any) -> None:
    if is_dataclass(owner) and not isinstance(owner, type):
        object.__setattr__(owner, name, value)  # the dataclass may be frozen
    else:
        setattr(owner, name, value)

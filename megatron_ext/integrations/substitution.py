"""Puts objects in the place of a framework's own, in its modules and wherever they were imported, and undoes it."""

import functools
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from types import ModuleType
from typing import Any

import torch

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Seam:
    """A name of a framework's module that ours can stand for.

    Attributes:
        module: its full name.
        name: in that module.
        ours: what stands for it; if `made`, a function of the original that gives it.
        required: a version without the name is not known; else that version goes without.
        needs: a package without which the module cannot be imported and nothing calls the name.
        known: other parameter lists of theirs that ours takes, told apart by it.
    """

    module: str
    name: str
    ours: Any
    required: bool = True
    needs: str | None = None
    known: tuple[str, ...] = ()
    made: bool = False


class Substitution:
    """Of all `seams` of one package, at once or not at all."""

    def __init__(self, package: str, seams: Callable[[], Sequence[Seam]]):
        self.package, self._seams = package, seams
        self._pairs: list[tuple[Any, Any]] = []  # original, ours

    @property
    def active(self) -> bool:
        return bool(self._pairs)

    def apply(self) -> None:
        """Raises ImportError without the package, ValueError for a version that is not known; then nothing is changed.

        A second call changes nothing. What only other versions have is logged, at level INFO.
        """
        if self.active:
            return
        if importlib.util.find_spec(self.package) is None:
            raise ImportError(f"{self.package} is not installed: apply() has nothing to change; install it first")
        pairs, left = [], []
        for seam in self._seams():
            if seam.needs is not None and not _is_there(seam.needs):
                continue
            original = getattr(importlib.import_module(seam.module), seam.name, None)
            if original is None:
                if seam.required:
                    raise self._unknown(f"{seam.module} has no {seam.name}")
                left.append(f"{seam.module}.{seam.name}")
                continue
            ours = seam.ours(original) if seam.made else _distinct(seam.ours)
            for read in (parameters, constructor_parameters):
                theirs, wanted = read(original), read(ours)
                if not takes(wanted, theirs) and _listed(theirs) not in seam.known:
                    raise self._unknown(
                        f"{seam.module}.{seam.name} takes ({_listed(theirs)}), ours ({_listed(wanted)})"
                    )
            pairs.append((original, ours))
        _replace(pairs)
        self._pairs = pairs
        if left:
            _LOG.info("this version of %s does not have %s", self.package, ", ".join(left))

    def restore(self) -> None:
        """Theirs everywhere again, in modules that were imported since too. Without `apply` it changes nothing."""
        _replace([(ours, original) for original, ours in self._pairs])
        self._pairs = []

    def _unknown(self, found: str) -> ValueError:
        try:
            version = metadata.version(self.package)
        except metadata.PackageNotFoundError:
            version = "from source"
        return ValueError(
            f"{self.package} {version} is not a version whose functions are known here: {found}; nothing was changed, "
            f"use a version that docs/rl.md names"
        )


def parameters(function: Any) -> list[inspect.Parameter]:
    """What a function takes; of a class, or a class's `apply`, what its `forward` does, without self or ctx."""
    owner = getattr(function, "__self__", None)
    cls: Any = function if isinstance(function, type) else owner if isinstance(owner, type) else None
    if cls is None:
        return [*inspect.signature(function).parameters.values()]
    return [*inspect.signature(cls.forward).parameters.values()][1:]


def constructor_parameters(function: Any) -> list[inspect.Parameter]:
    """What a class takes when an object of it is made, without self; nothing of a function or an autograd function."""
    if not isinstance(function, type) or issubclass(function, torch.autograd.Function):
        return []
    return [*inspect.signature(function.__init__).parameters.values()][1:]


def takes(ours: Sequence[inspect.Parameter], theirs: Sequence[inspect.Parameter]) -> bool:
    """Whether a call written for `theirs` means the same to `ours`: the same places, and every keyword."""
    places = [p.name for p in ours if p.kind != p.KEYWORD_ONLY]
    wanted = [p.name for p in theirs if p.kind != p.KEYWORD_ONLY]
    own = ours[len(wanted) :]
    return (
        places[: len(wanted)] == wanted
        and {p.name for p in theirs} <= {p.name for p in ours}
        and all(p.default is not p.empty or p.name in {q.name for q in theirs} for p in own)
    )


def _listed(found: Sequence[inspect.Parameter]) -> str:
    return ", ".join(p.name for p in found)


def _is_there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is missing
        return False


def _distinct(ours: Any) -> Any:
    """An object that nothing else refers to: where it stands later, it was put or imported from there."""
    if isinstance(ours, type):
        return type(ours.__name__, (ours,), {"__doc__": ours.__doc__, "__module__": ours.__module__})

    @functools.wraps(ours)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(*args, **kwargs)

    return call


def _replace(pairs: Sequence[tuple[Any, Any]]) -> None:
    """Puts the second for the first of each pair in every module that was imported, under whatever name."""
    new = {id(first): second for first, second in pairs}
    for module in [*sys.modules.values()]:
        if isinstance(module, ModuleType):
            for name in [name for name, value in vars(module).items() if id(value) in new]:
                setattr(module, name, new[id(vars(module)[name])])

"""Replacement of a framework's functions and classes by ours, wherever they were imported, and the way back."""

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from typing import Any

import torch

from megatron_ext.proof import why_fusion_is_off
from megatron_ext.replace import Replacement, apply_all, everywhere, restore_everywhere

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class ReplacedName:
    """A name in a framework's module, with the object of ours that replaces it.

    Attributes:
        module: the full name of the module.
        name: the name in the module.
        ours: our function or class; if `made`, a function from the original to ours.
        required: whether a version without the name is refused; else the name is skipped.
        needs: a package without which the module cannot be imported, so that the name is skipped.
        known: other parameter lists of the original that ours takes too, which it tells apart itself.
    """

    module: str
    name: str
    ours: Any
    required: bool = True
    needs: str | None = None
    known: tuple[str, ...] = ()
    made: bool = False


@dataclass
class Replaced:
    """A function or class of a framework that was replaced by ours.

    Attributes:
        name: its full name.
        modules: the modules in which it was found and replaced.
        calls: how often ours ran since. Calls in graphs of `torch.compile` are not counted: a changing number would
            make torch compile them again.
    """

    name: str
    modules: tuple[str, ...] = ()
    calls: int = 0


@dataclass(frozen=True)
class Report:
    """Report of the names that `apply()` replaced, with counts that go on with each call; as a string, a table.

    Attributes:
        package: the framework and its version.
        replaced: one entry for each name; empty before `apply()`.
        lacking: names that this version does not have.
        off: why `apply()` changed nothing, if MEGATRON_EXT_FUSION is off; else None.
        restored: whether `restore()` has put the framework's functions back.
    """

    package: str
    replaced: tuple[Replaced, ...] = ()
    lacking: tuple[str, ...] = ()
    off: str | None = None
    restored: bool = False

    def __str__(self) -> str:
        if not self.replaced:
            return f"megatron_ext replaces nothing in {self.package}: {self.off or 'call apply()'}"
        lines = [f"megatron_ext in {self.package}" + ", until restore() put its own functions back" * self.restored]
        for row in self.replaced:
            modules = f"in {len(row.modules)} module{'s' * (len(row.modules) != 1)}"
            times = f"ran {row.calls} time{'s' * (row.calls != 1)}" if row.calls else "has not run"
            lines.append(f"  {row.name}: {modules}, {times}")
        lines += [f"  {name}: not in this version" for name in self.lacking]
        return "\n".join(lines)


class FrameworkSubstitution:
    """Substitution of all names that `replaced_names()` gives of one package, a framework: all together, or none."""

    def __init__(self, package: str, replaced_names: Callable[[], Sequence[ReplacedName]]):
        self.package, self._replaced_names = package, replaced_names
        self._places: list[list[Replacement]] = []  # of each name
        self._last = Report(package)

    def apply(self) -> Report:
        """Replace the framework's functions wherever they were imported; a second call changes nothing.

        With MEGATRON_EXT_FUSION=off nothing is replaced. A log entry says so, and names functions that this version of
        the framework lacks. Communicates nothing.

        Returns:
            The report, whose counts go on with each call; see `report`.

        Raises:
            ImportError: the framework is not installed.
            ValueError: a function is missing, or its parameters are not known here; then nothing is changed.
        """
        if self._places:
            return self._last
        if (off := why_fusion_is_off()) is not None:
            self._last = Report(self.package, off=off)
            _LOG.info("%s", self._last)
            return self._last
        pairs, replaced, left = self._found()
        self._places = everywhere(pairs)
        apply_all(place for places in self._places for place in places)
        for row, places in zip(replaced, self._places, strict=True):
            row.modules = tuple(place.owner.__name__ for place in places)
        self._last = Report(f"{self.package} {self._version()}", tuple(replaced), tuple(left))
        if left:
            _LOG.info("this version of %s does not have %s", self.package, ", ".join(left))
        return self._last

    def report(self) -> Report:
        """Return the report of the last `apply()`, also after `restore()`."""
        return self._last

    def restore(self) -> None:
        """Put the framework's own functions back everywhere, also in modules that were imported since.

        Without `apply` it changes nothing. A wrapper that other code put around ours stays, and calls the framework's
        function.
        """
        for places in self._places:
            restore_everywhere(places)
        if self._places:
            self._last = replace(self._last, restored=True)
        self._places = []

    def why_not(self) -> str | None:
        """Return why `apply` would raise an error; None if it would not. Imports the framework, and changes nothing."""
        try:
            self._found()
        except Exception as error:  # that the framework cannot be imported is a finding
            return " ".join(str(error).split()) or type(error).__name__
        return None

    def _found(self) -> tuple[list[tuple[Any, Any]], list[Replaced], list[str]]:
        """Return pairs of originals and ours, their entries for the report, and the names that this version lacks."""
        if importlib.util.find_spec(self.package) is None:
            raise ImportError(f"{self.package} is not installed: apply() has nothing to change; install it first")
        pairs: list[tuple[Any, Any]] = []
        replaced: list[Replaced] = []
        left: list[str] = []
        for spec in self._replaced_names():
            if spec.needs is not None and not _is_there(spec.needs):
                continue
            original = getattr(importlib.import_module(spec.module), spec.name, None)
            if original is None:
                if spec.required:
                    raise self._unknown(f"{spec.module} has no {spec.name}")
                left.append(f"{spec.module}.{spec.name}")
                continue
            replaced.append(Replaced(f"{spec.module}.{spec.name}"))
            ours = _counted(spec.ours(original) if spec.made else spec.ours, replaced[-1])
            for read in (parameters, constructor_parameters):
                theirs, wanted = read(original), read(ours)
                if not takes(wanted, theirs) and _listed(theirs) not in spec.known:
                    raise self._unknown(
                        f"{spec.module}.{spec.name} takes ({_listed(theirs)}), ours ({_listed(wanted)})"
                    )
            pairs.append((original, ours))
        return pairs, replaced, left

    def _version(self) -> str:
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return "from source"

    def _unknown(self, found: str) -> ValueError:
        return ValueError(
            f"{self.package} {self._version()} is not a version whose functions are known here: {found}; nothing was "
            f"changed, use a version that docs/rl.md names"
        )


def parameters(function: Any) -> list[inspect.Parameter]:
    """Return a function's parameters; of a class or its bound `apply`, those of `forward`, without self or ctx."""
    owner = getattr(function, "__self__", None)
    cls: Any = function if isinstance(function, type) else owner if isinstance(owner, type) else None
    if cls is None:
        return [*inspect.signature(function).parameters.values()]
    return [*inspect.signature(cls.forward).parameters.values()][1:]


def constructor_parameters(function: Any) -> list[inspect.Parameter]:
    """Return the parameters of a class's constructor, without self; none for a function or an autograd function."""
    if not isinstance(function, type) or issubclass(function, torch.autograd.Function):
        return []
    return [*inspect.signature(function.__init__).parameters.values()][1:]


def takes(ours: Sequence[inspect.Parameter], theirs: Sequence[inspect.Parameter]) -> bool:
    """Return whether `ours` takes each call written for `theirs`: the same positional order, and every keyword."""
    places = [p.name for p in ours if p.kind != p.KEYWORD_ONLY]
    wanted = [p.name for p in theirs if p.kind != p.KEYWORD_ONLY]
    own = [p for p in ours[len(wanted) :] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
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


def _counted(ours: Any, row: Replaced) -> Any:
    """Return `ours` with a count of its calls in `row`, as a new object: only `apply` puts this object into modules."""
    of_class = isinstance(ours, type)
    applied = of_class and issubclass(ours, torch.autograd.Function)
    runs = "apply" if applied else "forward"
    inner = getattr(ours, runs) if of_class else ours

    @functools.wraps(inner)
    def counting(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_compiling():
            row.calls += 1
        return inner(*args, **kwargs)

    if not of_class:
        return counting
    call = staticmethod(counting) if applied else counting
    return type(ours.__name__, (ours,), {"__doc__": ours.__doc__, "__module__": ours.__module__, runs: call})

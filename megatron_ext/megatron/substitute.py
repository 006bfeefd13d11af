"""Megatron-Core on our tensor-parallel package, for scripts that cannot choose a layer spec.

`import megatron.core.tensor_parallel` leaves references to its functions and classes all over Megatron: in the globals
of the modules that imported them, in layer specs, as base classes and default arguments. The substitution puts ours
into all of these places, and into Megatron's package itself, where modules that are imported later find them.
"""

import dataclasses
import gc
import importlib
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any, NamedTuple
from unittest.mock import NonCallableMock

import megatron.core
import torch
from megatron.core.tensor_parallel import random as their_random

from megatron_ext.distributed.groups import is_registered
from megatron_ext.megatron import versions
from megatron_ext.proof import why_fusion_is_off
from megatron_ext.replace import Replacement, name_of, restore_all
from megatron_ext.tensor_parallel import random as our_random
from megatron_ext.tensor_parallel._layers.deferred_weight_gradients import drain_embedding_wgrad_compute
from megatron_ext.tensor_parallel._layers.sharded_layer import ShardedLayer
from megatron_ext.tensor_parallel._random.process_tracker import Process, TrackerOptions
from megatron_ext.tensor_parallel._random.transformer_engine import is_te_tracker
from megatron_ext.tensor_parallel._replaced_functions import HONOURED, is_megatrons_own, parts_of

_LOG = logging.getLogger(__name__)

_THEIRS, _OURS = "megatron.core.tensor_parallel", "megatron_ext.tensor_parallel"
_MODULES = ("cross_entropy", "data", "inference_layers", "layers", "mappings", "random", "utils")
_LAYERS = ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding")


@dataclasses.dataclass(frozen=True)
class Substitution:
    """Record of the replaced names.

    Attributes:
        version: Megatron-Core's.
        names: of functions and classes of its tensor-parallel package, as "layers.ColumnParallelLinear".
        places: where they were found, as "megatron.core.models.backends.ColumnParallelLinear".
    """

    version: str
    names: tuple[str, ...]
    places: tuple[str, ...]

    def __str__(self) -> str:
        return (
            f"megatron_ext stands in for {len(self.names)} functions and classes of megatron.core.tensor_parallel "
            f"{self.version}, in {len(self.places)} places"
        )


class _Swap:
    """Objects with their replacements, and the places in which replacements were put."""

    def __init__(self, pairs: Iterable[tuple[Any, Any]]):
        self._new = {id(old): (old, new) for old, new in pairs}
        self.placed: list[Replacement] = []

    @property
    def old(self) -> list[Any]:
        return [old for old, _ in self._new.values()]

    def new(self, value: Any) -> Any:
        """Return the replacement of `value`; `value` itself where there is none."""
        return self._new.get(id(value), (value, value))[1]

    def subclasses(self) -> list[type]:
        """Return the subclasses of classes to be replaced, except our own, which name Megatron's or ours on purpose,
        and autograd functions, whose base Python cannot change."""
        found: list[type] = []
        for old in self.old:
            if isinstance(old, type) and not issubclass(old, torch.autograd.Function):
                found.extend(type.__subclasses__(old))
        return [kind for kind in found if not kind.__module__.startswith("megatron_ext.")]

    def inverted(self) -> "_Swap":
        return _Swap((new, old) for old, new in self._new.values())

    def put(self, owner: Any, name: str, new: Any) -> None:
        self.placed.append(Replacement(owner, name, lambda _: new, switched=False).apply())

    def in_dataclass(self, owner: Any) -> None:
        for field in dataclasses.fields(owner):
            value = getattr(owner, field.name, None)
            if self.new(value) is not value:
                self.put(owner, field.name, self.new(value))

    def in_bases(self, subclass: type) -> None:
        self.put(subclass, "__bases__", tuple(map(self.new, subclass.__bases__)))

    def in_module(self, module: ModuleType) -> None:
        """Replace objects in a module's globals, in dataclass objects among them (layer specs), and in defaults."""
        for name, value in list(vars(module).items()):
            if self.new(value) is not value:
                self.put(module, name, self.new(value))
        for spec in _specs(list(vars(module).values()), set()):
            self.in_dataclass(spec)
        for function in _functions(module):
            before = function.__defaults__ or ()
            after = tuple({*map(self.new, value)} if type(value) is set else self.new(value) for value in before)
            if before != after:
                self.put(function, "__defaults__", after)


def _specs(values: Iterable[Any], seen: set[int]) -> Iterator[Any]:
    """Yield Megatron's dataclass objects among `values`, and those inside of them."""
    for value in values:
        if id(value) in seen or isinstance(value, type):
            continue
        if dataclasses.is_dataclass(value) and type(value).__module__.startswith("megatron."):
            seen.add(id(value))
            yield value
            yield from _specs([getattr(value, field.name, None) for field in dataclasses.fields(value)], seen)
        elif type(value) is list:
            yield from _specs(value, seen)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions and methods that a module of Megatron's defines; none of any other module."""
    if module.__name__.startswith("megatron."):
        for value in list(vars(module).values()):
            if getattr(value, "__module__", None) == module.__name__:
                methods = list(vars(value).values()) if isinstance(value, type) else [value]
                yield from (found for found in methods if isinstance(found, FunctionType))


def _loaded_modules() -> list[ModuleType]:
    """Return all loaded modules except our own, which name Megatron's package or ours on purpose."""
    return [
        module
        for name, module in list(sys.modules.items())
        if isinstance(module, ModuleType) and name.split(".")[0] != "megatron_ext"
    ]


def _pairs() -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """Pair Megatron's functions and classes with ours, by name, and list Megatron's public names that ours lack."""
    found, lacking = {}, []
    for part in _MODULES:
        try:
            theirs = importlib.import_module(f"{_THEIRS}.{part}")
        except ModuleNotFoundError:  # an older Megatron-Core
            continue
        ours = vars(importlib.import_module(f"{_OURS}.{part}"))
        for name, value in list(vars(theirs).items()):
            # Without Transformer Engine Megatron's inference layers are mocks.
            home = theirs.__name__ if isinstance(value, NonCallableMock) else getattr(value, "__module__", None)
            if home != theirs.__name__ or not callable(value):
                continue
            if name in HONOURED and not is_megatrons_own(value):  # a user's replacement, which our layers call
                continue
            if name in ours:
                found[f"{part}.{name}"] = value, ours[name]
            elif not name.startswith("_") and not isinstance(value, NonCallableMock):
                lacking.append(f"{part}.{name}")
    # Megatron's schedules call this function for the output layer's deferred gradients; it is not in the package.
    outside = importlib.import_module("megatron.core.utils")
    found["drain_embedding_wgrad_compute"] = outside.drain_embedding_wgrad_compute, drain_embedding_wgrad_compute
    return found, lacking


def _users_own() -> list[str]:
    """List functions, classes and methods of users in the place of Megatron's, which our package would not call."""
    found = []
    homes = {f"{_THEIRS}.{part}": f"{_OURS}.{part}" for part in _MODULES if part != "inference_layers"}  # mocks, often
    homes["megatron.core.utils"] = f"{_OURS}.layers"
    for home, counterpart in homes.items():
        ours = vars(importlib.import_module(counterpart))
        for name, value in list(vars(sys.modules[home]).items()):
            if name in HONOURED or not str(getattr(ours.get(name), "__module__", "")).startswith("megatron_ext."):
                continue
            places = parts_of(name, value)
            if isinstance(value, type) and value.__module__.startswith("megatron."):
                del places[0]
            found += [f"{home}.{place} ({_file_of(code)})" for place, code in places if not is_megatrons_own(code)]
    return found


def _file_of(value: Any) -> str:
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else f"of {type(value).__module__}"


def _in_use(kinds: tuple[type, ...]) -> list[Any]:
    """Return the objects of these kinds that a running function or a module can still reach and use.

    Unreachable ones may be left in memory: Megatron's data parallelism registers hooks on autograd nodes, which
    Python's garbage collector does not see through. The walk over all reachable objects takes seconds in a large
    process, and is made only if an object of these kinds has a process group that still exists.
    """
    if not any(map(_has_its_group, _instances(kinds))):
        return []
    gc.collect()
    if not any(map(_has_its_group, _instances(kinds))):
        return []
    found: list[Any] = []
    seen: set[int] = set()
    reached: list[Any] = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    for frame in sys._current_frames().values():
        while frame is not None:
            reached.extend(frame.f_locals.values())
            frame = frame.f_back  # type: ignore[assignment]
    while reached:
        # What the garbage collector does not track (numbers, strings, ...) holds no other objects.
        new = list({id(t): t for t in reached if gc.is_tracked(t) and id(t) not in seen}.values())
        seen.update(map(id, new))
        found.extend(thing for thing in new if _is_theirs(thing, kinds) and _has_its_group(thing))
        reached = gc.get_referents(*new)
    return found


def _instances(kinds: tuple[type, ...]) -> list[Any]:
    """Return all objects of these kinds in memory, found as referrers of their class."""
    classes: list[type] = list(kinds)
    for kind in classes:  # the list grows in the loop
        classes.extend(type.__subclasses__(kind))
    return [thing for thing in gc.get_referrers(*classes) if _is_theirs(thing, kinds)]


def _is_theirs(thing: Any, kinds: tuple[type, ...]) -> bool:
    """Return whether `thing` is a layer of these kinds, but none of our layer specs, whose layers derive from both."""
    return issubclass(type(thing), kinds) and not issubclass(type(thing), ShardedLayer)


def _has_its_group(layer: Any) -> bool:
    """Return whether the layer's process group still exists; without it the layer cannot run any more."""
    group = getattr(layer, "tp_group", None)
    return group is None or is_registered(group)


def why_not_substituted() -> str | None:
    """Return which names or arguments of Megatron's tensor-parallel package ours lacks; None if it lacks none."""
    if (missing := versions.why_missing("substitution")) is not None or _active is not None:
        return missing
    pairs, lacking = _pairs()
    for name, (theirs, ours) in pairs.items():
        if not isinstance(theirs, NonCallableMock) and not (
            isinstance(theirs, type) and issubclass(theirs, torch.autograd.Function)
        ):
            lacking += [f"{name}({argument}=...)" for argument in versions.unknown_arguments(theirs, ours)]
    return f"megatron_ext.tensor_parallel does not know {', '.join(lacking)}" if lacking else None


def _refuse_half_way(pairs: dict[str, tuple[Any, Any]]) -> None:
    reason = why_not_substituted()
    if reason is not None:
        instead = "Choose our layers by a layer spec instead (megatron_ext.megatron.layer_specs)"
        if versions.why_no_spec() is not None:
            instead = versions.PATCH_INSTEAD
        raise RuntimeError(
            f"Megatron-Core {megatron.core.__version__} ({versions.megatron_path()}) cannot run on our tensor-parallel "
            f"package: {reason}; what uses it would fail, or stay with Megatron's own; nothing was replaced. {instead}"
        )
    users = _users_own()
    if users:
        raise RuntimeError(
            f"{', '.join(users)}: other code is in Megatron's place, and our package would not call it; nothing was "
            f"replaced. Replace {' and '.join(HONOURED)} instead, which our layers call, or "
            f"{versions.PATCH_INSTEAD[0].lower()}{versions.PATCH_INSTEAD[1:]}"
        )
    layers = tuple(pairs[f"layers.{name}"][0] for name in _LAYERS)
    alive = Counter(type(thing).__name__ for thing in _in_use(layers))
    if alive:
        count = ", ".join(f"{number} {name}" for name, number in sorted(alive.items()))
        raise RuntimeError(
            f"Megatron's own layers are in use ({count}): their models would go on with half of our package; nothing "
            f"was replaced. Call substitute_tensor_parallel() before the first model is built"
        )


def _kind(tracker: Any) -> dict[str, bool]:
    """Return the arguments of `initialize_rng_tracker`, of either package, that make a tracker of this kind."""
    if is_te_tracker(tracker):
        return {"use_te_rng_tracker": True}
    return {
        "inference_rng_tracker": tracker.is_inference_rng_tracker,
        "use_cudagraphable_rng": tracker.use_cudagraphable_rng,
    }


def _carry_streams(source: Any, target: Any) -> None:
    """Give the RNG tracker of the module `target`, an object of that module's own class, the states of `source`.

    An existing tracker of the same kind is kept, since other code may hold it and read it after `restore`.
    """
    if source is None or not source.is_initialized():
        return
    there = target._CUDA_RNG_STATE_TRACKER
    if there is None or _kind(there) != _kind(source):
        target.initialize_rng_tracker(**_kind(source), force_reset=True)
    target._CUDA_RNG_STATE_TRACKER.set_states(source.get_states())


class _Active(NamedTuple):
    """State of an active substitution, for `restore_tensor_parallel`."""

    report: Substitution
    swap: _Swap
    known: set[str]  # names of the modules that were loaded before
    tracker: tuple[Any, TrackerOptions]  # our own package's tracker and its options before


_active: _Active | None = None


def substitute_tensor_parallel() -> Substitution:
    """Make Megatron-Core use `megatron_ext.tensor_parallel` everywhere, from now on and in modules imported later.

    Call it before the first model is built. Random streams that were seeded already keep their states. A second call
    changes nothing. With MEGATRON_EXT_FUSION=off nothing is replaced, which is logged. Communicates nothing.

    Returns:
        A record of what was replaced, and where, to be printed.

    Raises:
        RuntimeError: models with Megatron's own layers exist; this Megatron-Core has functions, or arguments of
            functions, that ours lacks; or other code has replaced a function of Megatron's that ours would not call.
            Then nothing is replaced.
    """
    global _active
    if _active is not None:
        return _active.report
    if (off := why_fusion_is_off()) is not None:
        _LOG.info("megatron.core.tensor_parallel stays Megatron's own: %s", off)
        return Substitution(megatron.core.__version__, (), ())
    pairs, _ = _pairs()
    _refuse_half_way(pairs)
    before, known = (Process.tracker, Process.kind), {module.__name__ for module in _loaded_modules()}
    swap = _Swap(pairs.values())
    try:
        for module in _loaded_modules():
            swap.in_module(module)
        for holder in gc.get_referrers(*swap.old):  # layer specs in local variables
            if dataclasses.is_dataclass(holder) and not isinstance(holder, type):
                swap.in_dataclass(holder)
        for subclass in swap.subclasses():
            swap.in_bases(subclass)
        Process.tracker = None
        _carry_streams(their_random._CUDA_RNG_STATE_TRACKER, our_random)
    except BaseException:
        restore_all(swap.placed)
        Process.tracker, Process.kind = before
        raise
    places = dict.fromkeys(f"{name_of(each.owner)}.{each.name}" for each in swap.placed)
    report = Substitution(megatron.core.__version__, tuple(pairs), tuple(places))
    _active = _Active(report, swap, known, before)
    return report


def restore_tensor_parallel() -> Substitution | None:
    """Take `substitute_tensor_parallel` back: each replaced reference is the original object again.

    References in modules that were imported since then are restored too. Objects that other code has put in the place
    of ours stay. Models that were built since then keep our layers. Random streams keep their states.

    Returns:
        The record of what had been replaced; None if nothing was.
    """
    global _active
    if _active is None:
        return None
    report, swap, known, tracker = _active
    back = swap.inverted()
    later = [module for module in _loaded_modules() if module.__name__ not in known]
    for module in later:
        back.in_module(module)
    for subclass in back.subclasses():
        if subclass.__module__ in {module.__name__ for module in later}:
            back.in_bases(subclass)
    restore_all(swap.placed)
    _carry_streams(Process.tracker, their_random)
    Process.tracker, Process.kind = tracker
    _active = None
    return report


def megatrons_own_layer(ours: type) -> type:
    """Return Megatron's own class of the same name as ours, also while ours is substituted for it."""
    found = getattr(importlib.import_module(f"{_THEIRS}.layers"), ours.__name__)
    if _active is None:
        return found
    classes = [old for old in _active.swap.old if isinstance(old, type)]
    return next((old for old in classes if old.__name__ == ours.__name__), found)

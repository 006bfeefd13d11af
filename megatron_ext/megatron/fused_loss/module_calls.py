"""Calls a module with another forward and chosen ones of its hooks, and puts functions in others' places for one call.

State of a call lies in a context variable: other threads that use the same model at the same time do not see it.
"""

import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import MappingProxyType, MethodType
from typing import Any, NamedTuple

from torch.nn.modules import module as torch_module

CALL = "_call_impl"  # the method of a module that runs its forward with its hooks
_ABSENT = object()
_HOOKS = ("_forward_pre_hooks", "_forward_hooks")
# Who puts hooks on a layer that gather its weight, or wait for it; everybody else's hooks are about its output.
_PARAMETER_HOOKS = ("torch.distributed.", "megatron.core.distributed", "megatron_fsdp")


class Hooks(NamedTuple):
    """Hooks before and after a module's forward, by their keys."""

    before: OrderedDict[int, Any]
    after: OrderedDict[int, Any]


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """`owner.name` is `value` for a while; afterwards the instance has (or lacks) its own one as before."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        _put_back(owner, name, before)


@dataclass
class _Dispatched:
    """A method of an instance that looks up, at each call, what stands for it in this context.

    Attributes:
        before: what the instance itself had under the name.
        stock: what its name gave.
        calls: how many calls, of all threads, have put something in its place.
    """

    before: Any
    stock: Any
    calls: int = 0


MethodReplacement = tuple[Any, str, Callable[..., Any]]  # an owner, a name, and what stands there in a call
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_here: ContextVar[Mapping[int, Mapping[str, Any]]] = ContextVar("_here", default=_NOTHING)  # by the owner's id
_dispatched: "weakref.WeakKeyDictionary[Any, dict[str, _Dispatched]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def in_this_call(*places: MethodReplacement) -> Iterator[None]:
    """A call of `owner.name` is one of `function` for a while, in this thread's context alone.

    It stays a method of the owner. When the last thread leaves, the instance has (or lacks) its own one as before.
    """
    here = dict(_here.get())
    with _lock:
        for owner, name, function in places:
            names = _dispatched.setdefault(owner, {})
            if name not in names:
                names[name] = _Dispatched(vars(owner).get(name, _ABSENT), getattr(owner, name))
                setattr(owner, name, MethodType(_dispatching(id(owner), name, names[name].stock), owner))
            names[name].calls += 1
            here[id(owner)] = {**here.get(id(owner), _NOTHING), name: function}
    token = _here.set(here)
    try:
        yield
    finally:
        _here.reset(token)
        with _lock:
            for owner, name, _ in places:
                names = _dispatched[owner]
                names[name].calls -= 1
                if not names[name].calls:
                    _put_back(owner, name, names.pop(name).before)


def stands_in_this_call(owner: Any) -> bool:
    """Tell whether `in_this_call` has put something in the place of a method of the owner, in this context."""
    return id(owner) in _here.get()


def standing(owner: Any, name: str) -> Any:
    """`owner.name` without what `in_this_call` puts in its place."""
    found = _dispatched.get(owner, {}).get(name)
    return getattr(owner, name) if found is None else found.stock


def _dispatching(owner: int, name: str, stock: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return _here.get().get(owner, _NOTHING).get(name, stock)(*args, **kwargs)

    return method


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def split_hooks(layer: Any) -> tuple[Hooks, Hooks]:
    """A module's forward hooks, and those of all modules: those about its parameters, and those about what it
    returns."""
    split = [Hooks(OrderedDict(), OrderedDict()), Hooks(OrderedDict(), OrderedDict())]
    for at, name in enumerate(_HOOKS):
        for key, hook in (*getattr(torch_module, f"_global{name}").items(), *vars(layer)[name].items()):
            split[not _about_parameters(hook)][at][key] = hook
    return split[0], split[1]


def call_with_hooks(layer: Any, forward: Callable[..., Any], hooks: Hooks, *args: Any, **kwargs: Any) -> Any:
    """A call of `forward` as one of the module `layer`, with these of its hooks; nothing of the layer is changed."""
    for key, hook in hooks.before.items():
        if key in layer._forward_pre_hooks_with_kwargs:
            args, kwargs = hook(layer, args, kwargs) or (args, kwargs)
        elif (given := hook(layer, args)) is not None:
            args = given if isinstance(given, tuple) else (given,)
    after = list(hooks.after.items())

    def call(key: int, hook: Any, results: Any) -> Any:
        with_kwargs = key in layer._forward_hooks_with_kwargs or key in torch_module._global_forward_hooks_with_kwargs
        return hook(layer, args, kwargs, results) if with_kwargs else hook(layer, args, results)

    try:
        results = forward(*args, **kwargs)
        while after:
            key, hook = after.pop(0)
            changed = call(key, hook, results)
            results = results if changed is None else changed
    except BaseException:
        for key, hook in after:
            if key in layer._forward_hooks_always_called or key in torch_module._global_forward_hooks_always_called:
                call(key, hook, None)
        raise
    return results


def call_known(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call of Megatron's function with those of `options` that this version's knows."""
    known = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in options.items() if name in known})


def innermost(function: Any) -> Any:
    """The function of a method, or of a partial."""
    while (inner := getattr(function, "func", None) or getattr(function, "__func__", None)) is not None:
        function = inner
    return function


def is_torchs(hook: Any) -> bool:
    """Tell whether torch defines a hook, as its counter of operations does."""
    return _home(innermost(hook)).startswith("torch.")


def _about_parameters(hook: Any) -> bool:
    """Tell whether a hook is about parameters, by the module that defines the hook, which no decorator copies. Wrappers
    of torch's own compiler are looked through."""
    function = innermost(hook)
    while _home(function).startswith("torch._dynamo") and hasattr(function, "__wrapped__"):
        function = innermost(function.__wrapped__)
    return _home(function).startswith(_PARAMETER_HOOKS)


def _home(function: Any) -> str:
    return str(getattr(function, "__globals__", {}).get("__name__", ""))

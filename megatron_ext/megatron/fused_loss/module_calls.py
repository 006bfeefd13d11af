"""Calls of a module with another forward and some of its hooks, and methods that are replaced for one call.

The state of a call is in a context variable: other threads that use the same model at the same time do not see it.
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
# Modules whose hooks on a layer gather its weight, or wait for it; all other hooks are about its output.
_PARAMETER_HOOKS = ("torch.distributed.", "megatron.core.distributed", "megatron_fsdp")


class Hooks(NamedTuple):
    """Hooks before and after a module's forward, by their keys."""

    before: OrderedDict[int, Any]
    after: OrderedDict[int, Any]


@contextmanager
def attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name` to `value` inside the context; then the instance has (or lacks) the attribute as before."""
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        _put_back(owner, name, before)


@dataclass
class _Dispatched:
    """A method of an instance that looks up its replacement in this context at each call.

    Attributes:
        before: the instance's own attribute of that name, or `_ABSENT`.
        stock: the method that the name gave before.
        calls: how many contexts, of all threads, replace it now.
    """

    before: Any
    stock: Any
    calls: int = 0


MethodReplacement = tuple[Any, str, Callable[..., Any]]  # an owner, a name, and the function to call instead
_NOTHING: Mapping[Any, Any] = MappingProxyType({})
_here: ContextVar[Mapping[int, Mapping[str, Any]]] = ContextVar("_here", default=_NOTHING)  # by the owner's id
_dispatched: "weakref.WeakKeyDictionary[Any, dict[str, _Dispatched]]" = weakref.WeakKeyDictionary()
_lock = threading.Lock()


@contextmanager
def in_this_call(*places: MethodReplacement) -> Iterator[None]:
    """Let calls of `owner.name` call `function` inside the context, for this thread alone.

    `owner.name` stays a method of the owner. When the last thread leaves, the instance has (or lacks) the attribute as
    before.
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
    """Tell whether `in_this_call` replaces a method of the owner in this context."""
    return id(owner) in _here.get()


def standing(owner: Any, name: str) -> Any:
    """Return `owner.name` without the replacement by `in_this_call`."""
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
    """Split a module's forward hooks, and the global ones, into those about its parameters and those about its
    output."""
    split = [Hooks(OrderedDict(), OrderedDict()), Hooks(OrderedDict(), OrderedDict())]
    for at, name in enumerate(_HOOKS):
        for key, hook in (*getattr(torch_module, f"_global{name}").items(), *vars(layer)[name].items()):
            split[not _about_parameters(hook)][at][key] = hook
    return split[0], split[1]


def call_with_hooks(layer: Any, forward: Callable[..., Any], hooks: Hooks, *args: Any, **kwargs: Any) -> Any:
    """Call `forward` in the place of the forward of `layer`, with only these hooks; the layer is not changed."""
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
    """Call Megatron's function with those of `options` that this version's function takes."""
    known = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in options.items() if name in known})


def innermost(function: Any) -> Any:
    """Return the function inside of methods and partials."""
    while (inner := getattr(function, "func", None) or getattr(function, "__func__", None)) is not None:
        function = inner
    return function


def is_torchs(hook: Any) -> bool:
    """Tell whether torch defines a hook, as its counter of operations does."""
    return _home(innermost(hook)).startswith("torch.")


def _about_parameters(hook: Any) -> bool:
    """Tell whether a hook is about parameters, by the module that defines its function: decorators do not copy globals.
    Wrappers of torch's own compiler are looked through."""
    function = innermost(hook)
    while _home(function).startswith("torch._dynamo") and hasattr(function, "__wrapped__"):
        function = innermost(function.__wrapped__)
    return _home(function).startswith(_PARAMETER_HOOKS)


def _home(function: Any) -> str:
    return str(getattr(function, "__globals__", {}).get("__name__", ""))

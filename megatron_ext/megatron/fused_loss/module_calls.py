"""Calls a module with a replaced forward and chosen ones of its hooks, and a function with what its version knows."""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

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
        if before is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def split_hooks(layer: Any) -> tuple[Hooks, Hooks]:
    """A module's forward hooks: those about its parameters, and those about what it returns."""
    split = [Hooks(OrderedDict(), OrderedDict()), Hooks(OrderedDict(), OrderedDict())]
    for at, name in enumerate(_HOOKS):
        for key, hook in vars(layer)[name].items():
            split[not _about_parameters(hook)][at][key] = hook
    return split[0], split[1]


@contextmanager
def calling(layer: Any, forward: Callable[..., Any], hooks: Hooks) -> Iterator[None]:
    """For a while a call of `layer` is one of `forward`, with these hooks."""
    with ExitStack() as stack:
        for name, value in zip(("forward", *_HOOKS), (forward, *hooks), strict=True):
            stack.enter_context(attribute(layer, name, value))
        yield


def call_known(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """A call of Megatron's function with those of `options` that this version's knows."""
    known = inspect.signature(function).parameters
    return function(*args, **{name: value for name, value in options.items() if name in known})


def innermost(function: Any) -> Any:
    """The function of a method, or of a partial."""
    while (inner := getattr(function, "func", None) or getattr(function, "__func__", None)) is not None:
        function = inner
    return function


def _about_parameters(hook: Any) -> bool:
    return str(getattr(innermost(hook), "__module__", "")).startswith(_PARAMETER_HOOKS)

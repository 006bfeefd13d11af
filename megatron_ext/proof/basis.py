"""`ProofBasis`: the functions, objects and values that a proof rests on. Compared by identity, never by name."""

import weakref
from collections.abc import Iterator, Mapping
from types import MethodType
from typing import Any

from torch import nn

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_WRITTEN = ("architectures", "dtype", "torch_dtype")  # to a config of transformers by whoever saves it: one rank, maybe
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ProofBasis:
    """Basis of a proof. Two are the same if each part is: plain values by what they are, all else by identity.

    A bound method counts as its function and its object, a list or a tuple as what is in it, and a dict too. Parts are
    referred to weakly: a proof keeps no model alive, and an object in the place of one that is gone is another one.
    Reads no tensor.
    """

    __slots__ = ("_parts",)

    def __init__(self, *parts: Any):
        self._parts = [part for given in parts for part in _flat(given)]

    def same_as(self, other: "ProofBasis") -> bool:
        """Return whether nothing has changed between the two."""
        mine, others = self._parts, other._parts
        return len(mine) == len(others) and all(map(_same, mine, others))


def module_parts(module: nn.Module) -> tuple[Any, ...]:
    """Return the parts that a call of `module` goes through: its class, the forward there and on the instance, its
    hooks."""
    own = vars(module)
    hooks = tuple(hook for kind in _HOOKS for hook in own.get(kind, {}).values())
    return type(module), type(module).forward, own.get("forward"), type(module).__call__, hooks


def config_values(config: Any) -> tuple[Any, ...]:
    """The plain values of a configuration object, and of those inside of it, with their names.

    Left out is what saving writes.
    """
    found: list[Any] = []
    for name, value in vars(config).items():
        if name in _WRITTEN:
            continue
        if isinstance(value, _PLAIN):
            found += (name, value)
        elif hasattr(value, "__dict__") and type(value).__name__.endswith("Config"):
            found += (name, config_values(value))
    return tuple(found)


def _flat(part: Any) -> Iterator[Any]:
    if type(part) in (tuple, list):
        yield len(part)
        for inner in part:
            yield from _flat(inner)
    elif isinstance(part, MethodType):
        yield _weakly(part.__func__)
        yield _weakly(part.__self__)
    elif type(part) is dict or isinstance(part, Mapping):
        yield from _flat(tuple(part.items()))
    else:
        yield part if isinstance(part, _PLAIN) else _weakly(part)


def _weakly(part: Any) -> Any:
    """A weak reference to `part`, the same one each time while it lives; itself where it can have none."""
    try:
        return weakref.ref(part)
    except TypeError:
        return part


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and (a == b or (a != a and b != b)))

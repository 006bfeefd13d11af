"""`ProofBasis`: the functions, objects and values that a proof rests on. Compared by identity, never by name."""

import weakref
from collections.abc import Mapping
from itertools import chain
from types import MethodType
from typing import Any

from torch import Tensor, nn

PLAIN = (bool, int, float, complex, str, bytes, type(None))
# To a config of transformers by whoever saves it, one rank, maybe; the last two up to transformers 4.55.
_WRITTEN = ("architectures", "dtype", "torch_dtype", "_attn_implementation_autoset")
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ProofBasis:
    """Basis of a proof. Two are the same if each part is: plain values by what they are, all else by identity.

    A bound method counts as its function and its object, a list or a tuple as what is in it, and a dict too. Parts are
    referred to weakly: a proof keeps no model alive, and an object in the place of one that is gone is another one.
    Reads no tensor.
    """

    __slots__ = ("_parts",)

    def __init__(self, *parts: Any):
        self._parts: list[Any] = []
        left: list[Any] = [parts]  # what is still to be taken apart, the next one last: each step of a job does so
        while left:
            part = left.pop()
            if isinstance(part, PLAIN):
                self._parts.append(part)
            elif type(part) in (tuple, list):
                self._parts.append(len(part))
                left += reversed(part)
            elif type(part) is MethodType:  # a transparent proxy of one is another function
                left.append((part.__func__, part.__self__))
            elif isinstance(part, Mapping):
                left.append([*chain.from_iterable(part.items())])
            else:
                try:
                    self._parts.append(weakref.ref(part))  # the same one each time while it lives
                except TypeError:
                    self._parts.append(part)

    def same_as(self, other: "ProofBasis") -> bool:
        """Return whether nothing has changed between the two."""
        if len(self._parts) != len(other._parts):
            return False
        for a, b in zip(self._parts, other._parts, strict=True):
            if a is b:
                continue
            if type(a) is not type(b) or not isinstance(a, PLAIN) or (a != b and (a == a or b == b)):  # NaN is alike
                return False
        return True


def module_parts(module: nn.Module) -> tuple[Any, ...]:
    """Return the parts that a call of `module` goes through: its class, the forward there and on the instance, its
    hooks."""
    own, hooks = vars(module), list[Any]()
    for kind in _HOOKS:
        hooks += own.get(kind, {}).values()
    return type(module), type(module).forward, own.get("forward"), type(module).__call__, hooks


def module_values(module: nn.Module) -> tuple[Any, ...]:
    """The plain values that `module` holds, and the versions of its tensors; but those of its weight, of its bias, and
    of parameters that train, which the fused way computes with too."""
    own, found = vars(module), list[Any]()
    for name, value in (own | own["_buffers"] | own["_parameters"] | {"weight": None, "bias": None}).items():
        if isinstance(value, Tensor):
            if not value.requires_grad:
                found += (value, 0 if value.is_inference() else value._version)
        elif isinstance(own.get(name, own), PLAIN):
            found += (name, own[name])
    return tuple(found)


def config_values(config: Any) -> tuple[Any, ...]:
    """The plain values of a configuration, and of those inside of it, with their names; not what saving writes."""
    found: list[Any] = []
    for name, value in vars(config).items():
        if isinstance(value, PLAIN) and name not in _WRITTEN:
            found += (name, value)
        elif hasattr(value, "__dict__") and type(value).__name__.endswith("Config"):
            found += (name, config_values(value))
    return tuple(found)

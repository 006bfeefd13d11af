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
        _flatten(parts, self._parts)

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
    own = vars(module)
    hooks = tuple(hook for kind in _HOOKS for hook in own.get(kind, {}).values())
    return type(module), type(module).forward, own.get("forward"), type(module).__call__, hooks


def module_values(module: nn.Module) -> tuple[Any, ...]:
    """The plain values that `module` holds, and the versions of its tensors; but those of its weight, of its bias, and
    of parameters that train, which the fused way computes with too."""
    own = vars(module)
    plain = [x for x in own.items() if isinstance(x[1], PLAIN)]
    held = own | own["_buffers"] | own["_parameters"] | {"weight": None, "bias": None}
    fixed = [x for x in held.values() if isinstance(x, Tensor) and not x.requires_grad]
    versions = [0 if x.is_inference() else x._version for x in fixed]
    return *chain.from_iterable(plain), *fixed, *versions


def config_values(config: Any) -> tuple[Any, ...]:
    """The plain values of a configuration, and of those inside of it, with their names; not what saving writes."""
    found: list[Any] = []
    for name, value in vars(config).items():
        if isinstance(value, PLAIN) and name not in _WRITTEN:
            found += (name, value)
        elif hasattr(value, "__dict__") and type(value).__name__.endswith("Config"):
            found += (name, config_values(value))
    return tuple(found)


def _flatten(parts: Any, into: list[Any]) -> None:
    """Add what is in `parts`, and in lists, tuples and dicts inside of it, to `into`. Each step of a job does so."""
    into.append(len(parts))
    for part in parts:
        if isinstance(part, PLAIN):
            into.append(part)
        elif type(part) in (tuple, list):
            if part:
                _flatten(part, into)
            else:
                into.append(0)
        elif type(part) is MethodType:  # a transparent proxy of one is another function
            _flatten((part.__func__, part.__self__), into)
        elif isinstance(part, Mapping):
            _flatten(list(chain.from_iterable(part.items())), into)
        else:
            try:
                into.append(weakref.ref(part))  # the same one each time while it lives
            except TypeError:
                into.append(part)

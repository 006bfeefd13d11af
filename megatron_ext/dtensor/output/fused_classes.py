"""Classes of models whose forward computes a loss without logits: each derives from the model's own class.

A class and not a forward on the instance, so that replicas of `nn.DataParallel`, copies and what was saved by
`torch.save` compute with their own weights. Such a class has the name of the model's own.
"""

import functools
import inspect
from collections.abc import Callable
from types import MethodType
from typing import Any

from torch import nn

from megatron_ext.dtensor.output.stand_ins import FusedForward, class_of

FUSED = "_megatron_ext_fused_loss"  # where a model keeps the settings of its fused loss

Dispatch = Callable[[Any, Callable[..., Any], tuple, dict[str, Any]], Any]


def use_fused_class(model: nn.Module, dispatch: Dispatch) -> None:
    """Put `model` into the class of its own whose forward is `dispatch(model, own forward, args, kwargs)`."""
    if isinstance(model, FusedForward):
        return
    kind: Any = type(model)
    model.__class__ = fused_class(kind, dispatch)
    own = vars(model).pop("forward", None)
    if own is not None:  # accelerate has put one there, or somebody else, which was called instead of the class's
        model.__dict__[_INSTANCE] = _OfInstance(model, own)
        model.__dict__.pop("_original_forward", None)  # from which accelerate would make another


def leave_fused_class(model: nn.Module) -> None:
    """Put `model` into its own class again, but one that FSDP2 has wrapped, or that has a forward of its own, which may
    wrap that of the class, as accelerate's autocast does.

    Both classes compute the same for a model without settings of a fused loss.
    """
    own = vars(type(model)).get("_megatron_ext_base")
    if own is not None and not {_INSTANCE, "forward"} & vars(model).keys():
        model.__class__ = own


_INSTANCE = "_megatron_ext_own_forward"


class _OfInstance:
    """A forward that was put on an instance, called with the model or a stand-in of it."""

    def __init__(self, model: Any, forward: Callable[..., Any]):
        # A method of another object computes with what that one has, and a proxy of a method adds something to it.
        own = type(forward) is MethodType and forward.__self__ is model
        self.function = forward.__func__ if own else None  # type: ignore[attr-defined]
        self.forward = None if own else forward

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.function is not None:
            return self.function(model, *args, **kwargs)
        assert self.forward is not None
        return self.forward(*args, **kwargs)


def forward_of(model: Any) -> Callable[..., Any]:
    """The forward that a call of a model of any class comes to, without ours: a function of the model."""
    if isinstance(model, FusedForward):
        return own_forward(model)
    return _OfInstance(model, vars(model)["forward"]) if "forward" in vars(model) else class_of(model).forward  # type: ignore


def own_forward(model: Any) -> Callable[..., Any]:
    """The forward of a model in a fused class that would be called if there were none: a function of the model."""
    if _INSTANCE in vars(model):
        return vars(model)[_INSTANCE]
    after = type(model).__mro__[type(model).__mro__.index(_made_by(type(model))) + 1 :]
    return next(vars(kind)["forward"] for kind in after if "forward" in vars(kind))


def _made_by(kind: type) -> type:
    return next(each for each in kind.__mro__ if "_megatron_ext_base" in vars(each))


@functools.cache
def fused_class(base: type, dispatch: Dispatch) -> type:
    """The class that derives from `base` with the other forward."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatch(self, own_forward(self), args, kwargs)

    own: Any = base.forward  # type: ignore[attr-defined]
    forward.__doc__, forward.__module__, forward.__qualname__ = own.__doc__, base.__module__, own.__qualname__
    forward.__signature__ = inspect.signature(own)  # type: ignore[attr-defined]  # trainers look which columns it takes

    def reduce(self: Any, protocol: Any) -> Any:
        return _rebuilt, (base, dispatch), dict(vars(self))

    attributes = {
        "forward": forward,
        "__reduce_ex__": reduce,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "_megatron_ext_base": base,
    }
    return type(base.__name__, (FusedForward, base), attributes)


def _rebuilt(base: type, dispatch: Dispatch) -> Any:
    kind: Any = fused_class(base, dispatch)
    return kind.__new__(kind)

"""Stand-ins for a model: a copy of the object with another lm head, and a class with a forward of ours.

The model's own forward runs on the copy, whose head gives promises. The model itself is not changed, so that threads do
not disturb each other.

The class whose forward computes a loss without logits derives from the model's own class and has its name. The forward
is on a class and not on the instance, so that replicas of `nn.DataParallel`, copies, and models saved by `torch.save`
compute with their own weights.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType, NoneType
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_ext.dtensor.output.promised_logits import promise_of
from megatron_ext.dtensor.output.reads import HeadCall
from megatron_ext.proof import why_fusion_is_off

# Attributes of models:
REGISTERED = "_megatron_ext_head"  # of a model from `parallelize`: the function that reads hidden states
VOCABULARY = "_megatron_ext_vocabulary_group"  # of the same model: the group that shares its head's vocabulary, or None
KEEPS_LOGITS = "_megatron_ext_keeps_logits"  # the reason for making logits, after a user asked for them
FUSED = "_megatron_ext_fused_loss"  # the settings of the fused loss
_INSTANCE = "_megatron_ext_own_forward"

Dispatch = Callable[[Any, Callable[..., Any], tuple, dict[str, Any]], Any]


class FusedForward:
    """Base of classes of models whose forward `use_fused_loss` has replaced: see `fused_class`."""


def class_of(module: nn.Module) -> type:
    """Return the class of `module` without the classes that FSDP2 and `use_fused_loss` put on top of it."""
    # Objects of a class that FSDP2 made cannot be copied, and a stand-in must not have FSDP2's methods.
    for kind in type(module).__mro__:
        if not issubclass(kind, (FSDPModule, FusedForward)):
            return kind
    raise AssertionError("every class derives from object")


def stub_of(module: nn.Module) -> Any:
    """Return a copy of `module` with its own dicts of attributes and of child modules, whose values are shared."""
    stub: Any = object.__new__(class_of(module))
    stub.__dict__.update(module.__dict__, _modules=dict(module._modules))
    return stub


def with_head(model: nn.Module, path: str, head: nn.Module) -> Any:
    """Return a copy of `model` with another head at `path`; all else is shared, and `model` stays as it is."""
    stub = stub_of(model)
    first, _, rest = path.partition(".")
    stub._modules[first] = with_head(model.get_submodule(first), rest, head) if rest else head
    return stub


@contextmanager
def standing_in(model: nn.Module, path: str, head: nn.Module) -> Iterator[Any]:
    """Give a copy of `model` with another head for one run of its forward; attributes that the forward sets on the copy
    are then set on the model."""
    stub = with_head(model, path, head)
    around, before = path, []
    while around:  # each module that the module at `path` is inside of
        around = around.rpartition(".")[0]
        copy = stub.get_submodule(around)
        before.append((model.get_submodule(around), copy, dict(vars(copy))))
    try:
        yield stub
    finally:
        for own, copy, old in before:
            for name, module in copy._modules.items():
                own._modules.setdefault(name, module)
            for name, x in vars(copy).items():
                if old.get(name, own) is not x:
                    vars(own)[name] = x
            for name in old:
                if name not in vars(copy):
                    vars(own).pop(name, None)


def is_registered(model: nn.Module) -> bool:
    """Return whether `parallelize` made `model`: its head is sharded by vocabulary, or whole in its forward."""
    return REGISTERED in model.__dict__


def why_logits_are_made(model: nn.Module) -> str | None:
    """Return why `causal_lm_loss` reads logits, if that is known without a look at the head, by a user's choice, the
    environment, or the user's own FSDP2; else None."""
    reason = why_fusion_is_off() or model.__dict__.get(KEEPS_LOGITS)
    if reason is None and isinstance(model, FSDPModule) and not is_registered(model):
        return (
            "FSDP2 gathers its weights in its own forward alone: call use_fused_loss(model), and the model with "
            "labels, or use what parallelize makes"
        )
    return reason


def is_sharded(head: nn.Module) -> bool:
    """Return whether FSDP2 wraps the head itself, or ranks share its vocabulary; then its hooks are parallelism's."""
    return isinstance(head, FSDPModule) or any(isinstance(x, DTensor) for x in head.parameters())


def promising(head: Any, call_of: Callable[[Tensor], HeadCall], keep: Callable[[HeadCall], None]) -> nn.Module:
    """Return a stand-in for `head`, with its hooks, that returns promises instead of logits.

    `call_of` makes a call's record from its hidden states, and `keep` gets each record. A call with further arguments,
    or after the model's forward has set an attribute of the head, returns logits, as their effect is unknown here.
    """

    stub: Any = HeadLike(head) if is_sharded(head) else stub_of(head)
    before, own = dict(vars(stub)), weakref.ref(stub)  # a strong reference would be a cycle, and keep a graph alive
    changed: set[str] = set()  # outlives the stub: a checkpoint may run its forward again

    def forward(hidden: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        told = {}
        for name, x in getattr(own(), "__dict__", {}).items():
            if name != "forward" and before.get(name, before) is not x:
                told[name] = x
        changed.update(told)
        if changed or {*map(type, (*args, *kwargs.values()))} - {NoneType}:
            vars(head).update(told)
            return (head if is_sharded(head) else head.forward)(hidden, *args, **kwargs)
        call = call_of(hidden)
        keep(call)
        return promise_of(call)

    stub.__dict__["forward"] = forward
    return stub


class HeadLike(nn.Module):
    """Module in the place of `head`, with the attributes of `head`."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.head = head

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("head"), name)


def use_fused_class(model: nn.Module, dispatch: Dispatch) -> None:
    """Change the class of `model` to one whose forward is `dispatch(model, own forward, args, kwargs)`."""
    if isinstance(model, FusedForward):
        return
    kind: Any = type(model)
    model.__class__ = fused_class(kind, dispatch)
    own = vars(model).pop("forward", None)
    if own is not None:  # accelerate or other code has put a forward on the instance, which hides the class's
        model.__dict__[_INSTANCE] = _OfInstance(model, own)
        model.__dict__.pop("_original_forward", None)  # else accelerate would restore it


def leave_fused_class(model: nn.Module) -> None:
    """Give `model` its own class again, unless FSDP2 has wrapped it, or the instance has a forward, which may wrap
    the class's, as accelerate's autocast does.

    Without settings of a fused loss both classes compute the same.
    """
    own = vars(type(model)).get("_megatron_ext_base")
    if own is not None and not {_INSTANCE, "forward"} & vars(model).keys():
        model.__class__ = own


class _OfInstance:
    """Forward that was put on an instance, to be called with the model or a stand-in for it."""

    def __init__(self, model: Any, forward: Callable[..., Any]):
        # Only a plain method of this model runs on stand-ins; others are bound to another object, or wrap a method.
        own = type(forward) is MethodType and forward.__self__ is model
        self.takes_model = own
        self.forward = forward.__func__ if own else forward  # type: ignore[attr-defined]

    def __call__(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return self.forward(model, *args, **kwargs) if self.takes_model else self.forward(*args, **kwargs)


def forward_of(model: Any) -> Callable[..., Any]:
    """Return the forward that a call of a model reaches, without ours, as a function of the model."""
    if isinstance(model, FusedForward):
        return own_forward(model)
    return _OfInstance(model, vars(model)["forward"]) if "forward" in vars(model) else class_of(model).forward  # type: ignore


def own_forward(model: Any) -> Callable[..., Any]:
    """Return the forward of a model in a fused class that ours stands for, as a function of the model."""
    if _INSTANCE in vars(model):
        return vars(model)[_INSTANCE]
    kinds = type(model).__mro__
    made = next(kind for kind in kinds if "_megatron_ext_base" in vars(kind))
    after = kinds[kinds.index(made) + 1 :]
    return next(vars(kind)["forward"] for kind in after if "forward" in vars(kind))


@functools.cache
def fused_class(base: type, dispatch: Dispatch) -> type:
    """Return the class that derives from `base`, with a forward that calls `dispatch`."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return dispatch(self, own_forward(self), args, kwargs)

    own: Any = base.forward  # type: ignore[attr-defined]
    forward.__doc__, forward.__qualname__ = own.__doc__, own.__qualname__
    forward.__module__ = base.__module__
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

"""Logits that an lm head has not made: operations of a model's own forward on them are followed, up to cross entropy.

A promise passes for the logits `[..., V]` in the forward of a model. It stays a promise if it is multiplied or divided
by a positive number, capped by tanh, cast or viewed, or if some of its tokens or its first columns are taken. Its cross
entropy is read from hidden states. Any other operation gets real logits, on which the same functions were called in the
same order: they equal the model's own bit by bit, and views of them share memory.

Legend: D hidden size, V vocabulary, [...] the leading dims of the tokens.
"""

import math
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_map

from megatron_ext.dtensor.output.reads import CrossEntropyArguments, HeadCall, LogitArithmetic

_GETTERS = ("shape", "dtype", "device", "ndim", "is_cuda", "layout", "is_sparse", "is_quantized", "is_nested")
_FACTS = [
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size, Tensor.__len__),
    *(Tensor.is_complex, Tensor.get_device),
    *(getattr(Tensor, name).__get__ for name in _GETTERS),
]


class _State(NamedTuple):
    """The operands of a promise: tokens and columns of a head, and the operations on their logits.

    `last`: the last operation, a function of the logits before it; `places`: the indices of the tokens among all, or
    None if `HeadCall.whole` is False; `chosen`: whether an index chose tokens. `hidden` are the hidden states of the
    tokens, or this rank's slice of those of all tokens (`HeadCall.in_slices`).
    """

    hidden: Tensor
    tokens: tuple[int, ...]
    columns: int
    dtype: torch.dtype
    transform: LogitArithmetic = LogitArithmetic()
    last: Callable[[Tensor], Tensor] | None = None
    places: Tensor | None = None
    chosen: bool = False


def promise_of(call: HeadCall) -> "DeferredLogits":
    """Return the promise that the head gives in the place of its logits."""
    tokens, places = call.tokens, None
    if call.whole:
        places = torch.arange(math.prod(tokens), device=call.hidden.device).view(tokens)
    return DeferredLogits.of(call, _State(call.hidden, tokens, call.columns, call.dtype, places=places))


class DeferredLogits(Tensor):
    """Promised logits, made by `promise_of`; see the top of this file.

    Attributes:
        source: the promise from which `state.last` made this one; None for the head's own promise.
        with_grad: whether autograd recorded all operations so far.
        made: the real logits, once code has asked for them.
    """

    call: HeadCall
    state: _State
    source: "DeferredLogits | None"
    with_grad: bool
    made: Tensor | None

    @classmethod
    def of(cls, call: HeadCall, state: _State, source: "DeferredLogits | None" = None) -> "DeferredLogits":
        # One element of memory, whatever the shape; code that reads memory without torch's functions finds NaN.
        element = torch.full((), float("nan"), dtype=state.dtype, device=call.hidden.device)
        promise = element.expand(*state.tokens, state.columns).as_subclass(cls)
        promise.call, promise.state, promise.source, promise.made = call, state, source, None
        promise.with_grad = torch.is_grad_enabled() and (source is None or source.with_grad)
        call.promises.append(weakref.ref(promise))
        # An autograd.Function's backward sends its gradient here: torch does not tell this class of the Function.
        if promise.with_grad and call.trains:
            with torch._C.DisableTorchFunctionSubclass():
                promise.requires_grad_().register_hook(_refuse_function)
        return promise

    def logits(self, asked_by: str) -> Tensor:
        """Return the real logits, and make all other promises of the call real too: they may share memory, so that a
        change in place must show in all of them."""
        if self.made is None:
            self.call.read_by = self.call.read_by or asked_by
            real = None if self.source is None else self.source.logits(asked_by)
            if self.made is None:
                with torch.set_grad_enabled(self.with_grad):
                    self.made = self.call.logits() if real is None else self.state.last(real)  # type: ignore[misc]
            for each in self.call.promises:
                if (promise := each()) is not None:
                    promise.logits(asked_by)
        return self.made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"DeferredLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.logits("copy.deepcopy").clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.logits("pickle").detach().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        promise = next((x for x in args if isinstance(x, DeferredLogits)), None)
        if promise is not None:
            with torch._C.DisableTorchFunctionSubclass():
                if promise.grad_fn is not None:  # an autograd.Function has made this promise
                    _refuse_function()
        if promise is not None and promise.made is None and func in _FOLLOWED:
            followed = _FOLLOWED[func](promise, func, args, kwargs)
            if isinstance(followed, _State):
                return cls.of(promise.call, followed, promise)
            if followed is not None:
                return followed
        name = getattr(func, "__name__", str(func))
        args, kwargs = tree_map(lambda x: x.logits(name) if isinstance(x, DeferredLogits) else x, (args, kwargs))
        return func(*args, **kwargs)


def _refuse_function(gradient: Tensor | None = None) -> None:
    raise ValueError(
        "an autograd.Function was applied to logits that the fused head has not made, and its gradient would not reach "
        "them: apply it to logits + 0, which makes the logits, or call restore_own_loss(model)"
    )


def _then(promise: DeferredLogits, func: Any, rest: tuple, kwargs: dict, **changes: Any) -> _State:
    """Return the state after `func(promise, *rest, **kwargs)`."""

    def again(x: Tensor) -> Tensor:
        return func(x, *rest, **kwargs)

    return promise.state._replace(last=again, **changes)


def _scaled(promise: DeferredLogits, func: Any, args: tuple, kwargs: dict) -> _State | None:
    """Follow a product with a positive number, or a quotient by one."""
    if kwargs or len(args) != 2:
        return None
    first, number = promise is args[0], args[1] if promise is args[0] else args[0]
    if type(number) not in (int, float) or not 0 < number < float("inf"):
        return None
    if func in _QUOTIENTS and not first:
        return None
    factor = 1.0 / number if func in _QUOTIENTS else float(number)
    transform = promise.state.transform
    return promise.state._replace(
        transform=transform._replace(scale=transform.scale * factor),
        last=lambda x: func(x, number) if first else func(number, x),
    )


def _capped(promise: DeferredLogits, func: Any, args: tuple, kwargs: dict) -> _State | None:
    transform = promise.state.transform
    if kwargs or len(args) != 1 or transform.inside is not None:
        return None
    return _then(promise, func, (), {}, transform=LogitArithmetic(1.0, transform.scale))


def _cast(promise: DeferredLogits, func: Any, args: tuple, kwargs: dict) -> Any:
    """Follow a cast to another floating dtype on the same device."""
    with torch._C.DisableTorchFunctionSubclass():
        probe = torch.empty((), dtype=promise.state.dtype, device=promise.call.hidden.device)
        after = func(probe, *args[1:], **kwargs)
    if not isinstance(after, Tensor) or not after.is_floating_point() or after.device != probe.device:
        return None
    if after is probe:  # nothing to cast: torch returns the tensor itself, which keeps its gradient under `no_grad`
        return promise
    return _then(promise, func, args[1:], kwargs, dtype=after.dtype)


def _same(promise: DeferredLogits, func: Any, args: tuple, kwargs: dict) -> _State | None:
    return _then(promise, func, args[1:], kwargs) if len(args) == 1 else None


def _viewed(promise: DeferredLogits, func: Any, args: tuple, kwargs: dict) -> _State | None:
    """Follow a view that changes only the leading dims; the promise's own memory, viewed, gives the new shape."""
    state = promise.state
    if kwargs:
        return None
    try:
        with torch._C.DisableTorchFunctionSubclass():
            after = func(*args)
    except Exception:  # the same call on real logits raises the proper error
        return None
    if after.dtype != state.dtype or after.shape[-1:] != (state.columns,):
        return None
    tokens = tuple(after.shape[:-1])
    hidden = state.hidden if promise.call.in_slices else state.hidden.reshape(*tokens, state.hidden.shape[-1])
    places = None if state.places is None else state.places.reshape(tokens)
    return _then(promise, func, args[1:], {}, tokens=tokens, hidden=hidden, places=places)


def _chosen(promise: DeferredLogits, func: Any, args: tuple, kwargs: dict) -> _State | None:
    """Follow an index of the leading dims that chooses tokens, and a slice of the last dim that takes first columns."""
    state, index = promise.state, args[1] if isinstance(args[1], tuple) else (args[1],)
    if not all(_counts_its_dims(x) for x in index):
        return None
    if Ellipsis in [x for x in index if not isinstance(x, Tensor)]:
        if sum(x is Ellipsis for x in index) > 1 or any(isinstance(x, Tensor) for x in index):
            return None
        at = next(i for i, x in enumerate(index) if x is Ellipsis)
        index = (*index[:at], *[slice(None)] * (len(state.tokens) + 1 - len(index) + 1), *index[at + 1 :])
    columns, every = state.columns, slice(None)
    taken = sum(x.dim() if isinstance(x, Tensor) and x.dtype == torch.bool else 1 for x in index)
    if taken > len(state.tokens):
        last, index = index[-1], index[:-1]
        if taken > len(state.tokens) + 1 or not isinstance(last, slice) or last.step not in (None, 1):
            return None
        if last.start not in (None, 0):
            return None
        columns = len(range(columns)[last])
    whole = all(isinstance(x, slice) and x == every for x in index)
    if columns == 0:
        return None
    if whole:
        return _then(promise, func, args[1:], kwargs, columns=columns)
    hidden = state.hidden if promise.call.in_slices else state.hidden[index]
    places = None if state.places is None else state.places[index]
    tokens = tuple(hidden.shape[:-1] if places is None else places.shape)
    return _then(
        promise, func, args[1:], kwargs, tokens=tokens, hidden=hidden, columns=columns, places=places, chosen=True
    )


def _counts_its_dims(index: Any) -> bool:
    """Return whether an index shows how many dims it takes; masks as NumPy arrays, lists, uint8 or one bool do not."""
    if isinstance(index, Tensor):
        return not isinstance(index, DeferredLogits) and index.dtype != torch.uint8
    return type(index) in (int, slice) or index is Ellipsis


def _cross_entropy(promise: DeferredLogits, func: Any, args: tuple, kwargs: dict) -> Tensor | None:
    """Compute the model's own call of cross entropy from hidden states, if its targets are token ids, one per token."""
    names = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
    given = dict(zip(names, args, strict=False)) | kwargs
    target = given.get("target")
    if given.get("input") is not promise or not isinstance(target, Tensor) or target.is_floating_point():
        return None
    state = promise.state
    if any(given.get(name) is not None for name in ("weight", "size_average", "reduce")) or len(state.tokens) > 1:
        return None
    if tuple(target.shape) != state.tokens or target.device != promise.call.hidden.device:
        return None
    own = {name: given[name] for name in CrossEntropyArguments._fields if name in given}
    call, arguments = promise.call, CrossEntropyArguments(**own)
    call.redeemed = arguments
    with torch.set_grad_enabled(torch.is_grad_enabled() and promise.with_grad):
        if state.places is not None and state.chosen:
            return _as_of_all(call, state, target, arguments)
        return call.redeem(state.hidden, target, state.transform, state.columns, arguments)


def _as_of_all(call: HeadCall, state: _State, target: Tensor, asked: CrossEntropyArguments) -> Tensor:
    """Compute the cross entropy of some tokens in a pass over all tokens that ignores the others."""
    assert state.places is not None
    places, target = state.places.reshape(-1), target.reshape(-1)
    every = target.new_full((math.prod(call.tokens),), asked.ignore_index)
    turns = _turns(places)
    last = max(turns.tolist(), default=0)
    if last == 0 and asked.reduction != "none":
        return call.redeem(call.hidden, every.index_copy(0, places, target), state.transform, state.columns, asked)
    losses = torch.zeros((), device=target.device)
    for turn in range(last + 1):  # a token chosen twice may have two targets
        now = turns == turn
        targets, each = every.index_copy(0, places[now], target[now]), asked._replace(reduction="none")
        found = call.redeem(call.hidden, targets, state.transform, state.columns, each)
        losses = losses + found[places].where(now, 0.0)
    if asked.reduction == "none":
        return losses.view(state.tokens)
    return losses.sum() / (target != asked.ignore_index).sum() if asked.reduction == "mean" else losses.sum()


def _turns(places: Tensor) -> Tensor:
    """Count, for each token, the earlier tokens that have the same place."""
    order = places.argsort(stable=True)
    _, counts = places.unique(return_counts=True)
    before = torch.arange(len(places), device=places.device) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    return torch.empty_like(places).index_copy(0, order, before)


_PRODUCTS = (Tensor.mul, torch.mul, torch.multiply, Tensor.multiply, Tensor.__rmul__)
_QUOTIENTS = (Tensor.div, torch.div, Tensor.true_divide, torch.true_divide, Tensor.divide, torch.divide)
_FOLLOWED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((*_PRODUCTS, *_QUOTIENTS), _scaled),
    **dict.fromkeys((Tensor.tanh, torch.tanh), _capped),
    **dict.fromkeys((Tensor.float, Tensor.to, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.type), _cast),
    **dict.fromkeys((Tensor.contiguous, Tensor.clone, torch.clone), _same),
    **dict.fromkeys((Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten), _viewed),
    Tensor.__getitem__: _chosen,
    F.cross_entropy: _cross_entropy,
}

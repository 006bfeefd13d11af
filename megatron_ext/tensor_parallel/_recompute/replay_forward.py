"""Runs a function without saved activations, and again later with the same random states and autocast settings.

All recomputation here has in common: arguments and results as flat tensors, which is what autograd sees; the random
states, the autocast settings (torch's and Transformer Engine's) and the default device of the first run, entered again
for the second; and the flag that a checkpointed function is running.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from megatron_ext.tensor_parallel._random.process_tracker import RandomMoment
from megatron_ext.tensor_parallel._random.transformer_engine import Fp8Recompute, is_loaded

_TENSOR = object()  # stands in for a tensor in a list
_LEAVES = (Tensor, type(None), bool, int, float, str)


class _Depth(threading.local):
    """`now` checkpointed functions run in this thread, one inside the other, for the first or the second time."""

    def __init__(self) -> None:
        self.now = 0


Depth = _Depth()


def is_checkpointing() -> bool:
    """True while a checkpointed function runs in this thread, in its forward or for its backward."""
    return Depth.now > 0


def set_checkpointing() -> None:
    """Enter a checkpointed function. `with checkpointing():` does the same, and cannot be left open."""
    Depth.now += 1


def unset_checkpointing() -> None:
    """Leave the innermost checkpointed function."""
    Depth.now = max(Depth.now - 1, 0)


@contextlib.contextmanager
def checkpointing() -> Iterator[None]:
    """Make `is_checkpointing()` true inside the block, and as before afterwards, however the block ends."""
    before = Depth.now
    Depth.now = before + 1
    try:
        yield
    finally:
        Depth.now = before


class FlatCall:
    """`function(*args, **kwargs)` as a function of its tensors alone that returns a tuple of tensors.

    Containers are those that `torch.utils._pytree` knows; everything else passes through. No argument tensors are kept.
    """

    def __init__(self, function: Callable[..., Any], leaves: list[Any], spec: TreeSpec | type, keywords: bool):
        self._function, self._spec, self._keywords = function, spec, keywords
        self._leaves = _without_tensors(leaves)
        self._result: tuple[list[Any], TreeSpec | type] | None = None
        self.edge = False

    @classmethod
    def flatten(
        cls, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple["FlatCall", list[Tensor]]:
        """Return the call, and the tensors to call it with.

        Where gradients are on but no tensor argument needs one, the function may still hold parameters that do: LoRA on
        a frozen input. Autograd has nothing to hold on to then, so there is one more tensor, an edge, which the call
        ignores, and the first run finds out which results depend on something that needs a gradient.
        """
        leaves, spec = _flatten((args, kwargs) if kwargs else args)
        call = cls(function, leaves, spec, keywords=bool(kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if torch.is_grad_enabled() and not any(tensor.requires_grad for tensor in tensors):
            call.edge = True
            tensors.append(torch.zeros((), requires_grad=True))
        return call, tensors

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        arguments = _unflatten(_with_tensors(self._leaves, tensors), self._spec)  # the edge, if any, is left over
        args, kwargs = arguments if self._keywords else (arguments, {})
        results, spec = _flatten(self._function(*args, **kwargs))
        self._result = _without_tensors(results), spec
        return tuple(result for result in results if isinstance(result, Tensor))

    def unflatten(self, tensors: Sequence[Tensor]) -> Any:
        """Return the results of the function, with these tensors in place of its own."""
        assert self._result is not None
        results, spec = self._result
        return _unflatten(_with_tensors(results, tensors), spec)


def _without_tensors(leaves: Sequence[Any]) -> list[Any]:
    return [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _with_tensors(leaves: Sequence[Any], tensors: Iterable[Tensor]) -> list[Any]:
    """Put these tensors back into `leaves`, which `_without_tensors` made."""
    remaining = iter(tensors)
    return [next(remaining) if leaf is _TENSOR else leaf for leaf in leaves]


def _flatten(tree: Any) -> tuple[list[Any], TreeSpec | type]:
    """`tree_flatten`, without its cost for what most functions take and return: tensors, a tuple, None."""
    if isinstance(tree, Tensor):
        return [tree], Tensor
    if type(tree) is tuple and all(isinstance(leaf, _LEAVES) for leaf in tree):
        return list(tree), tuple
    return tree_flatten(tree)


def _unflatten(leaves: list[Any], spec: TreeSpec | type) -> Any:
    if isinstance(spec, TreeSpec):
        return tree_unflatten(leaves, spec)
    return tuple(leaves) if spec is tuple else leaves[0]


_KINDS = ("cpu", "cuda")


def _autocast(kind: str) -> tuple[str, torch.dtype, bool, bool]:
    """Return the present settings for devices of a kind, as `torch.autocast` takes them."""
    cache = torch.is_autocast_cache_enabled()
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), cache


class Rerun:
    """A function between its two runs, in an `autograd.Function` whose context `ctx` keeps this and the tensors.

    The second run has the random states, autocast settings and default device of the moment when this is made.
    Transformer Engine is told of both runs inside its autocast, and with `fp8` in any case.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any], fp8: bool = False):
        self._function = function
        self._fp8 = Fp8Recompute(told=fp8) if fp8 or is_loaded() else None
        self._device = torch.get_default_device()
        self._args = _without_tensors(args)
        devices = {arg.device for arg in args if isinstance(arg, Tensor)}
        self._random = RandomMoment(devices)
        others = sorted({d.type for d in devices}.difference(_KINDS))
        self._autocast = [_autocast(kind) for kind in (*_KINDS, *filter(torch.amp.is_autocast_available, others))]

    def first(self, ctx: Any, args: Sequence[Any]) -> Any:
        """Run the function without keeping a graph; return what an autograd function's `forward` may return."""
        ctx.set_materialize_grads(False)
        look_for_gradients = isinstance(self._function, FlatCall) and self._function.edge
        fp8 = self._fp8.first() if self._fp8 else contextlib.nullcontext()
        before = _versions(args)
        with checkpointing(), fp8, _graph_without_tensors() if look_for_gradients else torch.no_grad():
            results = self._function(*args)
        self._changed = before != _versions(args)
        listed = results if isinstance(results, tuple | list) else (results,)
        # Private aliases: a tensor that the function was given or holds, and returns itself, must not join the graph.
        aliases = [result.detach() if isinstance(result, Tensor) else result for result in listed]
        if look_for_gradients:
            ctx.mark_non_differentiable(*(a for a, r in zip(aliases, listed, strict=True) if not r.requires_grad))
        return tuple(aliases) if listed is results else aliases[0]

    def second(self, tensors: Sequence[Tensor], needs_grad: Sequence[bool]) -> tuple[list[Any], tuple[Any, ...]]:
        """Run the function again on detached `tensors`, with a graph; return the inputs, which will hold gradients, and
        the results.

        Raises RuntimeError if the first run has changed an argument in place.
        """
        if self._changed:
            raise RuntimeError(
                "the checkpointed function has changed an argument in place: its recomputation would begin with other "
                "numbers; have it change a clone"
            )
        inputs = _with_tensors(self._args, (tensor.detach() for tensor in tensors))
        for x, needed in zip(inputs, needs_grad, strict=True):
            if needed:
                x.requires_grad_()
        with contextlib.ExitStack() as as_before:
            if self._fp8:
                as_before.enter_context(self._fp8.second())
            as_before.enter_context(self._random.again())
            for settings in self._autocast:
                if settings != _autocast(settings[0]):
                    as_before.enter_context(torch.autocast(*settings))
            if torch.get_default_device() != self._device:
                as_before.enter_context(self._device)
            with torch.enable_grad():
                results = self._function(*inputs)
        return inputs, tuple(results) if isinstance(results, tuple | list) else (results,)


def _versions(args: Sequence[Any]) -> list[int]:
    """Return the version counters of the tensors among `args`, which in-place writes change; none while compiling."""
    if torch.compiler.is_compiling():
        return []
    return [arg._version for arg in args if isinstance(arg, Tensor) and not arg.is_inference()]


def backpropagate(results: Sequence[Any], grads: Sequence[Tensor | None], inputs: Sequence[Any]) -> list[Tensor | None]:
    """Return the gradients of `inputs`, from those of `results`; parameters on the way accumulate theirs."""
    if len(results) != len(grads):
        raise RuntimeError(
            f"the checkpointed function returned {len(grads)} values in the forward and {len(results)} in its "
            f"recomputation; it must do the same both times"
        )
    pairs = [(r, g) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
    if pairs:
        torch.autograd.backward([result for result, _ in pairs], [grad for _, grad in pairs])
    return [x.grad if isinstance(x, Tensor) else None for x in inputs]


def check_backward_call() -> None:
    """Raise RuntimeError in the backward passes that recomputation cannot serve.

    In `torch.autograd.grad(...)` parameters' gradients would go into their `.grad` and not to the caller; and gradients
    of gradients would silently be those of constants.
    """
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a checkpointed function is in the graph of a backward with create_graph=True: its gradients cannot be "
            "differentiated again; call the function without checkpointing there"
        )
    if not torch.autograd._is_checkpoint_valid():
        raise RuntimeError(
            "a checkpointed function is in the graph of torch.autograd.grad() or backward(inputs=...): call backward() "
            "without inputs, and read .grad"
        )


@contextlib.contextmanager
def _graph_without_tensors() -> Iterator[None]:
    """Record a graph without saving tensors for it: enough to see what depends on what."""
    with torch.enable_grad(), saved_tensors_hooks(lambda tensor: None, lambda nothing: nothing):
        yield

"""A tensor subclass for logits that are not computed yet, which a patched output layer returns.

A promise looks like the logits `[S, B, V/R]` and holds the layer and the hidden states to compute them. The model's
loss exchanges it for per-token losses, and an output processor for other read-outs. The product or quotient of a
promise and a positive number is a promise of scaled logits; views of the same shape, `detach`, `contiguous` and
`transpose(0, 1)` give a promise too. Any other use (a dump to disk, an operation of a later Megatron) gets real logits.
The loss is then computed from these logits, with all changes made to them in place, also through a transpose.

An `autograd.Function` cannot be served: PyTorch does not tell a tensor subclass that a Function takes it, and the
Function's backward would not reach the logits. So a promise is a leaf that requires a gradient. The graph of a
Function's result then ends in that leaf: such a result is recognised and refused, and so is a gradient that arrives at
the leaf. Code that reads the memory in C++, such as a collective, finds real values.

For losses and for real logits the output layer is called once as a module, with the hooks of sharded data parallelism,
which gather its weight before the call, and again in backward.

Shapes: S positions of the sequence, B batch, H hidden size, V vocabulary, R tensor-parallel ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import filterfalse
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from megatron_ext.autograd import leaves_of
from megatron_ext.distributed.groups import group_size, tensor_parallel_group
from megatron_ext.megatron.fused_loss.module_calls import Hooks, call_with_hooks

_GETTERS = ("shape", "dtype", "device", "ndim", "requires_grad", "is_cuda", "layout", "is_sparse", "is_quantized")
_FACTS = [
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size, Tensor.__len__),
    *(getattr(Tensor, name).__get__ for name in _GETTERS),
]
_REQUIRES_GRAD = vars(torch._C.TensorBase)["requires_grad"].__get__
_PRODUCTS = (Tensor.mul, torch.mul)
_QUOTIENTS = (Tensor.div, torch.div, Tensor.true_divide, torch.true_divide)
_SAME = (Tensor.contiguous, Tensor.view_as, Tensor.reshape_as, Tensor.detach, torch.detach)
_VIEWS = (Tensor.view, Tensor.reshape, torch.reshape)
_GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__
_VERSION = attrgetter("_version")
_TRANSPOSES = (Tensor.transpose, torch.transpose, Tensor.swapaxes)


@dataclass
class Terms:
    """The operands of logits `scale * f(hidden @ weight.T + bias)` of an output layer; f caps logits, or is nothing.

    Attributes:
        hidden: `[S, B, H]`, under sequence parallelism this rank's `[S/R, B, H]`.
        weight: the weight that the layer was called with; None: its own.
        make: a function of these terms and hidden states that returns the layer's real logits, unscaled.
        hooks: the layer's forward hooks about parameters.
        made: the real logits, once code has asked for them.
        with_grad: whether autograd recorded when the layer was called. Real logits then have a gradient even if code
            asks for them under `no_grad`, as the loss is computed from them.
        hits: labels of the last loss, and whether each has the largest logit, `[S, B]`.
        batch_outermost: the logits lie in memory as `[B, S, V/R]`.
        versions: version counters of hidden states and the layer's parameters when the layer was called; tensors of
            inference mode have none.
    """

    layer: Any
    hidden: Tensor
    weight: Tensor | None
    make: Callable[["Terms", Tensor], Tensor]
    hooks: Hooks
    scale: float = 1.0
    made: Tensor | None = None
    hits: tuple[Tensor, Tensor] | None = field(default=None, repr=False)
    with_grad: bool = field(default_factory=torch.is_grad_enabled)
    batch_outermost: bool = False
    versions: list[int] = field(default_factory=list, repr=False)

    def check_versions(self) -> None:
        """Record the operands' version counters at the first call; raises ValueError if one has changed since."""
        operands = (self.hidden, *self.layer.parameters(), *filter(torch.is_tensor, [self.weight]))
        found = [*map(_VERSION, filterfalse(torch.is_inference, operands))]
        self.versions = self.versions or found
        if found[:1] != self.versions[:1] and not self.hidden.is_inference():
            raise ValueError(
                f"hidden states of shape {tuple(self.hidden.shape)} were changed in place after the output layer was "
                f"called with them, whose logits were not made: change a copy, or call the output layer afterwards"
            )
        if found != self.versions:
            raise ValueError(
                "logits of an earlier call, which were not made, are asked for, and the output layer has changed "
                "since: read them in the model's forward, or before the optimizer's step"
            )

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """`(S, B, V/R)`."""
        positions = self.hidden.shape[0] * (group_size(tp_group(self.layer)) if self.layer.sequence_parallel else 1)
        columns = getattr(self.layer, "output_size_per_partition", None)  # the weight may be sharded further
        return (positions, *self.hidden.shape[1:-1], self.own_weight.shape[0] if columns is None else columns)

    @property
    def own_weight(self) -> Tensor:
        """Return the weight in use, as the layer holds it now."""
        return self.layer.weight if self.weight is None else self.weight

    def adds_to_main_grad(self, weight: Tensor) -> bool:
        """Return whether backward adds the gradient of `weight` to its `main_grad`, which a gathered or cast weight
        lacks."""
        return self.layer.gradient_accumulation_fusion and weight is self.own_weight

    @property
    def dtype(self) -> torch.dtype:
        return getattr(self.layer, "output_dtype", None) or self.hidden.dtype

    def read(self, compute: Callable[[Tensor, Tensor], Any]) -> Any:
        """Return `compute(hidden, weight)`, run in a call of the output layer with its weight gathered.

        That call returns a plain tuple, since hooks of Megatron-FSDP look for tensors in nothing deeper.
        """
        self.check_versions()
        structure = None

        def forward(hidden: Tensor) -> tuple:
            nonlocal structure
            leaves, structure = tree_flatten(compute(*operands(self, hidden)))
            return tuple(leaves)

        leaves = call_with_hooks(self.layer, forward, self.hooks, self.hidden)
        return tree_unflatten(leaves, structure)  # type: ignore[arg-type]

    def logits(self) -> Tensor:
        """Return the real logits, which the output layer makes at the first call."""
        if self.made is None:
            self.check_versions()

            def forward(hidden: Tensor) -> Any:
                return self.make(self, hidden), None

            with torch.inference_mode(False), torch.set_grad_enabled(self.with_grad):
                self.made = self.laid_out(call_with_hooks(self.layer, forward, self.hooks, self.hidden)[0])
        return self.made

    def laid_out(self, logits: Tensor) -> Tensor:
        """Return the layer's logits scaled, in the memory order of the promise."""
        logits = logits if self.scale == 1.0 else logits * self.scale
        return logits.transpose(0, 1).contiguous().transpose(0, 1) if self.batch_outermost else logits


class PromisedLogits(Tensor):
    """Promised logits, made by `promise_logits`; see the top of this file.

    Attributes:
        terms: the operands of the logits.
        batch_first: the promise is of `[B, S, V/R]`.
        detached: no gradient goes through it.
    """

    terms: Terms
    batch_first: bool
    detached: bool

    @classmethod
    def of(cls, terms: Terms, batch_first: bool = False, detached: bool = False) -> "PromisedLogits":
        shape = terms.shape
        if batch_first:
            shape = (shape[1], shape[0], *shape[2:])
        # One element of memory, whatever the shape; code that reads the memory nevertheless finds NaN.
        element = terms.hidden.detach().new_full((), float("nan"), dtype=terms.dtype)
        promise = element.expand(shape).as_subclass(cls)
        promise.terms, promise.batch_first, promise.detached = terms, batch_first, detached
        if _requires_grad(promise):
            with torch._C.DisableTorchFunctionSubclass():
                promise.requires_grad_().register_hook(_refuse_function)
        return promise

    def logits(self) -> Tensor:
        """Return the real logits; those of transposed or detached promises share memory, as of any tensor."""
        self.check_own()
        logits = self.terms.logits()
        logits = logits.transpose(0, 1) if self.batch_first else logits
        return logits.detach() if self.detached else logits

    def made_of(self, hidden: Tensor) -> Tensor:
        """Return real logits of `hidden`, within a call of the output layer; the promise does not keep them."""
        logits = self.terms.laid_out(self.terms.make(self.terms, hidden))
        return logits.transpose(0, 1) if self.batch_first else logits

    def check_own(self) -> None:
        """Raise ValueError if an `autograd.Function` made this tensor of a promise: its backward would be skipped."""
        with torch._C.DisableTorchFunctionSubclass():
            if _GRAD_FN(self) is not None:
                _refuse_function()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PromisedLogits(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.logits().clone()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in _FACTS:
            if func == _REQUIRES_GRAD:
                return _requires_grad(args[0])
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        promise = next((x for x in args if isinstance(x, PromisedLogits)), None)
        if promise is not None:
            promise.check_own()
        kept = None if promise is None or promise.terms.made is not None else _kept(promise, func, args, kwargs)
        if kept is not None:
            return kept
        args, kwargs = tree_map(real_logits, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        with torch.overrides.enable_reentrant_dispatch():  # so that autograd records how the logits are made here
            args, kwargs = tree_map(
                lambda x: x.logits().detach() if isinstance(x, PromisedLogits) else x, (args, kwargs or {})
            )
        return func(*args, **kwargs)


def real_logits(x: Any) -> Any:
    """Return the real logits of a promise; anything else as it is."""
    return x.logits() if isinstance(x, PromisedLogits) else x


def promise_logits(
    layer: Any,
    hidden: Tensor,
    weight: Tensor | None,
    gathered: bool | None,
    make: Callable[[Terms, Tensor], Tensor],
    hooks: Hooks,
) -> PromisedLogits:
    """Promise the result of `layer(hidden, weight, runtime_gather_output=gathered)`."""
    # Megatron's loss of gathered logits is too high by the logarithm of the number of ranks.
    if (layer.gather_output if gathered is None else gathered) and group_size(tp_group(layer)) > 1:
        raise ValueError(
            f"{'parallel_output is False' if gathered is None else f'runtime_gather_output is {gathered}'} and there "
            f"are labels: a loss is taken from logits that stay sharded over the {group_size(tp_group(layer))} "
            f"tensor-parallel ranks; pass runtime_gather_output=False with labels, or leave the labels out to get "
            f"gathered logits"
        )
    terms = Terms(layer, hidden, weight, make, hooks)
    terms.check_versions()
    return PromisedLogits.of(terms, detached=not torch.is_grad_enabled())


def tp_group(layer: Any):
    """Return the group of ranks that share an output layer's vocabulary."""
    return tensor_parallel_group(getattr(layer, "tp_group", None))


def operands(terms: Terms, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Return hidden states and this rank's whole shard `[V/R, H]` of the weight, in the dtype to compute in."""
    weight = terms.layer.weight if terms.weight is None else terms.weight
    if isinstance(weight, DTensor):  # the weight of a tied embedding that FSDP2 shards
        weight = _gathered(weight).to(hidden.dtype)
    if hidden.element_size() == 2 and terms.dtype == torch.float32 and not hidden.is_cuda:
        return hidden.float(), weight.float()  # on CUDA the head's logits are fp32 already
    return hidden, weight


def _gathered(weight: DTensor) -> Tensor:
    """Return the whole weight; the ranks of its mesh average its gradient, as FSDP2 does for its own parameters."""
    mesh = weight.device_mesh
    whole = weight.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda grad: grad / mesh.size())
    return whole


def check_graph(logits: Tensor) -> None:
    """Raise ValueError for logits that an `autograd.Function` made of a promise: gradients would end there."""
    if any(isinstance(leaf, PromisedLogits) for leaf in leaves_of(logits.grad_fn)):
        _refuse_function()


def _refuse_function(gradient: Tensor | None = None) -> None:
    raise ValueError(
        "an autograd.Function was applied to logits that the fused head has not made, and its backward would be "
        "skipped: apply it to logits.clone(), which makes the logits, or remove the fused head "
        "(unpatch_gpt_model_forward_for_linear_ce_fusion)"
    )


def _requires_grad(promise: PromisedLogits) -> bool:
    if promise.detached:
        return False
    terms, layer = promise.terms, promise.terms.layer
    for part in (terms.hidden, terms.weight, layer.weight, layer.bias):
        if part is not None and part.requires_grad:
            return True
    return False


def _kept(promise: PromisedLogits, func: Any, args: tuple, kwargs: dict) -> PromisedLogits | None:
    """Return the promise that results from a call on a promise of logits not made yet; None if it needs real ones."""
    terms, batch_first = promise.terms, promise.batch_first
    detached = promise.detached or not torch.is_grad_enabled()
    factor, alone = _factor(promise, func, args, kwargs), promise is args[0] and not kwargs
    if factor is not None:
        terms = replace(terms, scale=terms.scale * factor, hits=None)
    elif alone and func in _SAME and all(x.shape == promise.shape for x in args[1:]):
        detached |= func in (Tensor.detach, torch.detach)
        if func is Tensor.contiguous:
            if batch_first == terms.batch_outermost or 1 in promise.shape[:2]:
                return promise  # the same promise, with its gradient, also under `no_grad`
            terms = replace(terms, batch_outermost=batch_first, hits=None)  # a copy
    elif alone and func in _TRANSPOSES and {x % promise.dim() for x in args[1:]} == {0, 1}:
        batch_first = not batch_first
    elif not (alone and func in _VIEWS and _same_shape(promise, args[1:])):
        return None
    return PromisedLogits.of(terms, batch_first, detached)


def _same_shape(promise: PromisedLogits, sizes: tuple) -> bool:
    sizes = tuple(sizes[0]) if len(sizes) == 1 and isinstance(sizes[0], (tuple, list)) else sizes
    return all(type(x) is int for x in sizes) and sizes == tuple(promise.shape)


def _factor(promise: PromisedLogits, func: Any, args: tuple, kwargs: dict) -> float | None:
    """Return the positive number that the call multiplies a promise by; None if it does something else."""
    if kwargs or len(args) != 2 or func not in _PRODUCTS + _QUOTIENTS:
        return None
    number = args[1] if promise is args[0] else args[0]
    if type(number) not in (int, float) or not 0 < number < float("inf"):
        return None
    if func in _PRODUCTS:
        return float(number)
    return 1.0 / number if promise is args[0] else None

"""Activation checkpointing: inputs are saved, and activations recomputed in backward.

Activation checkpointing (Chen et al., 2016, https://arxiv.org/abs/1604.06174), and its distribution over the
tensor-parallel ranks (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054): the input of a layer is the same on
all of them, so that each needs to keep only its part.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import UNSHARDED, group_size, require_tensor_parallel_group
from megatron_ext.tensor_parallel._recompute.replay_forward import (
    FlatCall,
    Rerun,
    backpropagate,
    check_backward_call,
    checkpointing,
)
from megatron_ext.tensor_parallel.utils import gather_split_1d_tensor, split_tensor_into_1d_equal_chunks


def checkpoint(
    function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any, **kwargs: Any
) -> Any:
    """Call `function(*args, **kwargs)`; only its inputs are kept for backward, which runs the function again first.

    The second run draws the same random numbers (of the CPU, of the tensors' devices and of the streams of our RNG
    tracker and Megatron's) under the same autocast settings, torch's and Transformer Engine's, and the same default
    device, so that losses and gradients are those of the plain call, bit for bit, as long as the function itself does
    the same twice. Exceptions: a call captured into a CUDA graph draws new numbers; and, as in Transformer Engine's
    own checkpoint, its delayed scaling quantizes anew where checkpoints are nested, or one module is in two of them.

    Args:
        function: Anything that takes and returns tensors, also inside tuples, lists, dicts and named tuples, and any
            other objects among them. Tensors inside other objects pass through, without gradient.
        distribute_saved_activations: Keep only this rank's part of the first argument, a tensor of any shape that is
            equal on all tensor-parallel ranks (so not under sequence parallelism). As in Megatron the caller's tensor
            itself becomes that part, flat, and the memory of the rest is free: do not read it after this call. The
            tensor stays whole if it is a view, or another argument of the function too. The ranks are those of the
            linear layers of ours that the function runs, else Megatron's; over layers of several groups, or with
            sequence parallelism, the tensor is kept whole.

    Gradients flow to tensor arguments and to parameters that the function holds, also where only the latter need any.
    With gradients off this is the plain call.

    Communication: none of its own; with `distribute_saved_activations` one all-gather of the first argument's bytes in
    the backward. The function's own communication takes place twice.

    Raises:
        ValueError: with `distribute_saved_activations` the first argument is no tensor, or the tensor-parallel group is
            unknown.
        RuntimeError: in a backward by `torch.autograd.grad(...)`, or one that creates a graph; in any backward if the
            function has changed an argument in place.
    """
    if distribute_saved_activations and not (args and isinstance(args[0], Tensor)):
        raise ValueError(
            f"distribute_saved_activations is set and the first argument is {type(args[0]) if args else 'missing'}: "
            f"it must be the tensor to distribute; pass that first, or False"
        )
    if not torch.is_grad_enabled():
        with checkpointing():
            return function(*args, **kwargs)
    call, tensors = FlatCall.flatten(function, args, kwargs)
    return call.unflatten(CheckpointFunction.apply(call, distribute_saved_activations, *tensors))


class _Notes(threading.local):  # torch.compile can trace this, and not a ContextVar
    groups: list[Any] | None = None


_notes = _Notes()


@contextlib.contextmanager
def layer_groups() -> Iterator[list[Any]]:
    """Collect the tensor-parallel groups of the linear layers that run in the block; see `note_layer_group`."""
    before, inside = _notes.groups, list[Any]()
    _notes.groups = inside
    try:
        yield inside
    finally:
        _notes.groups = before
        for group in inside:
            note_layer_group(group)


def note_layer_group(group: Any) -> None:
    """Note the group whose ranks all give the same input to a layer that runs now; None: each gives its own."""
    if (notes := _notes.groups) is not None and all(known is not group for known in notes):
        notes.append(group)


class CheckpointFunction(torch.autograd.Function):
    """Autograd function of `checkpoint`."""

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., Any], distribute_saved_activations: bool | None, *args: Any
    ) -> Any:
        """Run the function without a graph, and keep the tensors among `args`."""
        ctx.rerun = Rerun(run_function, args)
        with layer_groups() as groups:
            results = ctx.rerun.first(ctx, args)
        tensors = [arg for arg in args if isinstance(arg, Tensor)]
        ctx.distributed_shape = None
        if distribute_saved_activations and len(groups) < 2 and groups != [None]:
            ctx.group = groups[0] if groups else require_tensor_parallel_group()
            whole, ctx.distributed_shape = tensors[0], tensors[0].shape
            several = ctx.group is not UNSHARDED and group_size(ctx.group) > 1
            tensors[0] = split_tensor_into_1d_equal_chunks(whole.detach(), new_buffer=several, tp_group=ctx.group)
            if not whole._is_view() and all(tensor is not whole for tensor in tensors[1:]):
                whole.data = tensors[0]
                ctx.cut_leaf = whole if whole.is_leaf else None
        ctx.save_for_backward(*tensors)
        return results

    @staticmethod
    def backward(ctx: Any, *args: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the function again with a graph, then its backward. `args`: the gradients of its results."""
        check_backward_call()
        tensors = list(ctx.saved_tensors)
        if ctx.distributed_shape is not None:
            shape = ctx.distributed_shape
            tensors[0] = gather_split_1d_tensor(tensors[0], tp_group=ctx.group)[: shape.numel()].view(shape)
            if getattr(ctx, "cut_leaf", None) is not None:  # a leaf's gradient must have its shape
                ctx.cut_leaf.data = tensors[0]
        with checkpointing():
            inputs, results = ctx.rerun.second(tensors, ctx.needs_input_grad[2:])
            return None, None, *backpropagate(results, args, inputs)

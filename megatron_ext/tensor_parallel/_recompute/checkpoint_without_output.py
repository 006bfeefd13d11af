"""`CheckpointWithoutOutput`: the output is freed after its use, and recomputed just before backward reads it.

`checkpoint` frees the activations inside a function; its output stays, because the next layer saves it. For a function
that is cheap next to its output, a norm or an activation, the output is the memory. So it is emptied in place, all
references to it stay valid, and the recomputation writes the same numbers back into the same storage.

    recompute = CheckpointWithoutOutput()
    normed = recompute.checkpoint(norm, hidden)
    out = mlp(normed)                                        # saves normed for its backward
    recompute.discard_output_and_register_recompute(out)     # normed is empty until out's gradient arrives

Calls whose outputs are one another's inputs are recomputed together, in the order in which they were made, by one
manager:

    manager = CheckpointWithoutOutputManager()
    mixed = CheckpointWithoutOutput(ckpt_manager=manager).checkpoint(mix, streams)
    normed = CheckpointWithoutOutput(ckpt_manager=manager).checkpoint(norm, mixed)
    out = mlp(normed)
    manager.discard_all_outputs_and_register_unified_recompute(out)   # both are empty until out's gradient arrives

The idea is Megatron-Core's (its selective recomputation of norms and activations, and of hyper-connections).
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import cuda_graph_phase
from megatron_ext.tensor_parallel._random.transformer_engine import is_loaded
from megatron_ext.tensor_parallel._recompute.replay_forward import (
    FlatCall,
    Rerun,
    backpropagate,
    check_backward_call,
    checkpointing,
)


class CheckpointWithoutOutputFunction(torch.autograd.Function):
    """Autograd function of `CheckpointWithoutOutput`."""

    @staticmethod
    def forward(
        ctx: Any, run_function: Callable[..., Any], checkpoint_without_output_obj: "CheckpointWithoutOutput", *args: Any
    ) -> Any:
        """Run the function without a graph, keep the tensors among `args`, and give the object `ctx`."""
        ctx.rerun = Rerun(run_function, args, checkpoint_without_output_obj.fp8)
        results = ctx.rerun.first(ctx, args)
        ctx.save_for_backward(*(arg for arg in args if isinstance(arg, Tensor)))
        ctx.second_run = None
        checkpoint_without_output_obj.ctx = ctx
        return results

    @staticmethod
    def backward(ctx: Any, *args: Tensor | None) -> tuple[Tensor | None, ...]:
        """Backpropagate through the second run. `args`: the gradients of the function's results."""
        inputs, results = ctx.second_run or run_again(ctx)
        ctx.second_run = None  # its graph serves once
        with checkpointing():
            return None, None, *backpropagate(results, args, inputs)


def run_again(ctx: Any) -> tuple[list[Any], tuple[Any, ...]]:
    """Run the function that `ctx` keeps for the second time; return its inputs and results."""
    if cuda_graph_phase() != "capture":  # a capture calls torch.autograd.grad() on purpose
        check_backward_call()
    with checkpointing():
        return ctx.rerun.second(ctx.saved_tensors, ctx.needs_input_grad[2:])


class CheckpointWithoutOutput:
    """One call of a function whose output is freed after use and recomputed for the backward.

    Args:
        fp8: Whether the function uses Transformer Engine's fp8 (any true value, such as Megatron's "hybrid"). If
            Transformer Engine is loaded it is told of both runs unless `fp8` is None, as by Megatron, whose generalized
            tensor parallelism asks it about them. Inside its autocast it is always told.
        ckpt_manager: A manager that discards this call's outputs together with others'. None: this object discards.
        retain_input_tensors: Accepted and not needed: an output that shares memory with an input always stays.

    Random numbers, autocast, arguments and gradients are treated as by `checkpoint`. Communicates: twice what the
    function itself communicates.
    """

    def __init__(
        self,
        fp8: Any = False,
        ckpt_manager: "CheckpointWithoutOutputManager | None" = None,
        retain_input_tensors: bool = False,
    ):
        self.fp8 = bool(fp8) or (fp8 is not None and is_loaded())
        self.ckpt_manager, self.retain_input_tensors = ckpt_manager, retain_input_tensors
        self.ctx: Any = None  # of the call that was made and not yet discarded
        self.outputs: tuple[Tensor, ...] | None = None  # of that call
        self._inputs_at: set[int] = set()

    def checkpoint(self, run_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call `run_function(*args, **kwargs)`, and keep only its inputs and outputs.

        Raises:
            ImportError: `fp8` is true, and Transformer Engine is missing.
        """
        if cuda_graph_phase() == "warmup":  # its backward is never run as a whole
            return run_function(*args, **kwargs)
        call, tensors = FlatCall.flatten(run_function, args, kwargs)
        self.outputs = CheckpointWithoutOutputFunction.apply(call, self, *tensors)
        self._inputs_at = {_storage_id(tensor) for tensor in tensors}
        if self.ckpt_manager is not None:
            self.ckpt_manager.add_checkpoint(self)
        return call.unflatten(self.outputs)

    def discard_output_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the outputs' memory until the gradient of `hook_tensor` is known; then they are recomputed into it.

        Call it after the last use of the outputs in forward. `hook_tensor` is computed from the outputs, and backward
        computes its gradient before it needs them. An output stays as it is if it shares memory with an input or with
        `hook_tensor`; all stay if only the outputs, or only `hook_tensor`, need a gradient: nothing would bring them
        back. With a manager nothing happens here: the manager discards.

        Raises:
            RuntimeError: there was no `checkpoint()` since the last call.
        """
        if cuda_graph_phase() == "warmup" or self.ckpt_manager is not None:
            return
        self._discard(hook_tensor)

    def _discard(self, hook_tensor: Tensor) -> None:
        if self.outputs is None:
            raise RuntimeError("there is no output to discard: call checkpoint(run_function, *args) first")
        ctx, outputs = self.ctx, self.outputs
        self.ctx = self.outputs = None
        if hook_tensor.requires_grad != any(output.requires_grad for output in outputs):
            return
        kept = self._inputs_at | {_storage_id(hook_tensor)}
        freed = []
        for place, output in enumerate(outputs):
            if _storage_id(output) not in kept:
                kept.add(_storage_id(output))  # several outputs may be pieces of one storage
                storage = output.untyped_storage()
                freed.append((place, storage, storage.nbytes()))
                storage.resize_(0)  # tensors on this storage stay valid objects
        if hook_tensor.requires_grad:
            hook_tensor.register_hook(functools.partial(_fill_again, ctx, freed))


class CheckpointWithoutOutputManager:
    """Calls of `CheckpointWithoutOutput` whose outputs are discarded and recomputed together, for chains of them.

    Attributes:
        is_last_layer_in_recompute_block: Megatron's transformer block sets it for its layers, which then do not discard
            what they return to the next block.
    """

    def __init__(self) -> None:
        self.checkpoints: list[CheckpointWithoutOutput] = []
        self.is_last_layer_in_recompute_block = False

    def add_checkpoint(self, ckpt: CheckpointWithoutOutput) -> None:
        """Add a call that was made. `ckpt.checkpoint()` does so by itself if `ckpt` was given this manager.

        Raises:
            TypeError: `ckpt` is no `CheckpointWithoutOutput`.
            ValueError: its `checkpoint()` was not called yet.
        """
        if not isinstance(ckpt, CheckpointWithoutOutput):
            raise TypeError(f"ckpt is a {type(ckpt).__name__}: it must be a CheckpointWithoutOutput; pass that object")
        if ckpt.outputs is None:
            raise ValueError("ckpt has no outputs yet: call its checkpoint(run_function, *args) before adding it")
        self.checkpoints.append(ckpt)

    def discard_all_outputs_and_register_unified_recompute(self, hook_tensor: Tensor) -> None:
        """Free the outputs of all calls until the gradient of `hook_tensor` is known; then recompute them in order.

        For `hook_tensor` and outputs that stay see `CheckpointWithoutOutput.discard_output_and_register_recompute`. The
        manager may be used for other calls afterwards.
        """
        if cuda_graph_phase() == "warmup":
            return
        calls, self.checkpoints = self.checkpoints, []
        for call in calls:  # a tensor's hooks run in the order in which they were registered
            call._discard(hook_tensor)


def _fill_again(ctx: Any, freed: list[tuple[int, torch.UntypedStorage, int]], grad: Tensor) -> None:
    """Hook: run the function again, and fill the freed outputs, which the rest of backward is about to read.

    `freed`: each output's index among the results, its storage, and the bytes of that storage.
    """
    if cuda_graph_phase() == "warmup":
        return
    ctx.second_run = run_again(ctx)
    for place, storage, n_bytes in freed:
        again = ctx.second_run[1][place].untyped_storage()
        assert again.nbytes() == n_bytes, "the function returned another shape or layout in its recomputation"
        storage.resize_(n_bytes)
        storage.copy_(again)  # past autograd, whose version counters would take it for a change


def _storage_id(tensor: Tensor) -> int:
    """A number that tensors share if they share memory, whether the memory is freed at present or not."""
    return tensor.untyped_storage()._cdata

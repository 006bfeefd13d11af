"""Megatron's functions for linear layers (`linear_with_grad_accumulation_and_async_allreduce` and others).

The input of these functions is replicated, or with `sequence_parallel` a slice of the sequence; the output is sharded.

Their arguments stand in the order of Megatron-Core 0.17 and newer. Up to 0.16 `async_grad_allreduce`, an old name of
`allreduce_dgrad` without effect, stood where `tp_group` (of a trainable weight) and `gtp_remat_size` (of a frozen one)
stand: positional calls in that order are recognised by the types that they pass.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, require_tensor_parallel_group
from megatron_ext.tensor_parallel._layers.deferred_weight_gradients import Deferral
from megatron_ext.tensor_parallel._layers.distributed_weights import piece_of
from megatron_ext.tensor_parallel._layers.linear_autograd import ActivationLayout, LinearPlan, parallel_linear


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: list[Tensor] | None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: Group = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | None = None,
    async_grad_allreduce: bool | None = None,
) -> Tensor:
    """Compute `input @ weight.T + bias`; its backward pass communicates under the weight-gradient matmul.

    Args:
        input: `[..., D]`, any leading dimensions; with `sequence_parallel` this rank's slice of the first one.
        weight: `[N, D]` this rank's shard.
        bias: `[N]`, or None.
        gradient_accumulation_fusion: Add the weight gradient into `weight.main_grad` (see `megatron_ext.main_grad`;
            Apex is not needed).
        allreduce_dgrad: Sum the input gradient over the ranks: one all-reduce, or none if no gradient is needed.
        sequence_parallel: Gather the input, and reduce-scatter its gradient: one all-gather forward; one all-gather
            (for a trainable weight) and one reduce-scatter (for a gradient of the input) backward.
        grad_output_buffer: A list that keeps output gradients of weight gradients to be computed later, as Megatron's
            deferred embedding gradient does; the caller keeps the inputs. None: nothing is deferred.
        wgrad_deferral_limit: The most gradients that the list may hold; 0 or None: any number.
        tp_group: The ranks that share the weight; None: Megatron's tensor-parallel group.
        gtp_remat_size: The number of ranks over which generalized tensor parallelism cuts the weight once more.
        output_dtype: dtype of the result; None: the matmul's. float32 for 16-bit inputs keeps the full sums (on CUDA by
            one matmul with fp32 output; elsewhere the operands are converted first). Gradients flow in the input's.
        async_grad_allreduce: An old name of `allreduce_dgrad`, without effect, as in Megatron.

    Returns:
        `[..., N]`, with `sequence_parallel` of the whole sequence.

    Raises:
        ValueError: as in `parallel_linear`; `allreduce_dgrad` and `sequence_parallel` are both set; or
            `gtp_remat_size` is not that of the weight.
    """
    if not isinstance(gtp_remat_size, int):  # (async_grad_allreduce, tp_group): the order up to 0.16
        tp_group, gtp_remat_size = gtp_remat_size, 1
    if isinstance(tp_group, bool):
        tp_group = None
    _check_pieces(weight, gtp_remat_size)
    buffer = grad_output_buffer
    plan = _plan(
        tp_group,
        allreduce_dgrad,
        sequence_parallel,
        fuse_main_grad=gradient_accumulation_fusion,
        deferral=None if buffer is None else Deferral(buffer, limit=wgrad_deferral_limit),
        output_dtype=output_dtype,
    )
    return parallel_linear(input, weight, bias, plan)


def linear_with_frozen_weight(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Group = None,
    grad_output_buffer: None = None,
    wgrad_deferral_limit: None = None,
    gtp_remat_size: int = 1,
    output_dtype: torch.dtype | None = None,
    async_grad_allreduce: bool | None = None,
) -> Tensor:
    """Compute `input @ weight.T + bias` for a weight without gradient; the input is not saved nor gathered again.

    Arguments as of `linear_with_grad_accumulation_and_async_allreduce`; `gradient_accumulation_fusion` has no effect.
    The bias gets its gradient.

    Raises:
        ValueError: as in that function; or a weight gradient is to be deferred, though there is none.
    """
    for name, value in (("grad_output_buffer", grad_output_buffer), ("wgrad_deferral_limit", wgrad_deferral_limit)):
        if value is not None:
            raise ValueError(
                f"{name} is {value!r}: a frozen weight has no gradient to defer; pass None, or call "
                f"linear_with_grad_accumulation_and_async_allreduce"
            )
    if not isinstance(gtp_remat_size, bool | None):  # else it is async_grad_allreduce: the order up to 0.16
        _check_pieces(weight, gtp_remat_size)
    plan = _plan(tp_group, allreduce_dgrad, sequence_parallel, frozen=True, output_dtype=output_dtype)
    return parallel_linear(input, weight, bias, plan)


def _check_pieces(weight: Tensor, size: int) -> None:
    pieces = piece_of(weight)[1]
    if size != pieces:
        raise ValueError(
            f"gtp_remat_size is {size}, and generalized tensor parallelism has cut the weight into {pieces} pieces: "
            f"pass {pieces}, or the weight that Megatron's wrap_module_params_gtp made over {size} ranks"
        )


def _plan(group: Group, allreduce_dgrad: bool, sequence_parallel: bool, **options: Any) -> LinearPlan:
    if allreduce_dgrad and sequence_parallel:
        raise ValueError(
            "allreduce_dgrad and sequence_parallel are both True: the gradient of a sequence-parallel input is "
            "reduce-scattered already; pass allreduce_dgrad=False"
        )
    layout: ActivationLayout = "sequence" if sequence_parallel else "replicated" if allreduce_dgrad else "sharded"
    return LinearPlan(require_tensor_parallel_group(group), layout, "sharded", **options).in_mode()


class LinearWithGradAccumulationAndAsyncCommunication:
    """Megatron's autograd function by name, for callers of its `apply`, which takes positional arguments alone."""

    apply = staticmethod(linear_with_grad_accumulation_and_async_allreduce)


class LinearWithFrozenWeight:
    """Megatron's autograd function for a weight without gradient, by name (see above)."""

    @staticmethod
    def apply(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        allreduce_dgrad: bool,
        tp_group: Group,
        output_dtype: torch.dtype | None = None,
    ) -> Tensor:
        return linear_with_frozen_weight(
            input, weight, bias, False, allreduce_dgrad, False, tp_group, output_dtype=output_dtype
        )

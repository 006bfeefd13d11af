"""Weight gradients of the output layer, deferred to the end of the pipeline's flush (`defer_embedding_wgrad_compute`).

With `defer_embedding_wgrad_compute` the backward pass of the last pipeline stage keeps each micro-batch's input and
output gradient instead of multiplying them, so that the stage before gets its gradients sooner; the products are made
while the pipeline drains. Input and gradient are kept together, in the backward pass: a forward pass without a backward
one (evaluation) leaves nothing behind, and the two lists always agree.

Legend: T tokens of all ranks, D input size, N outputs of this rank.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed.collectives import Pending, start_all_gather
from megatron_ext.distributed.groups import Group
from megatron_ext.numerics import cpu_products


@dataclass(frozen=True, eq=False)
class Deferral:
    """Lists that keep pairs of an input and an output gradient, and the most that they keep.

    Attributes:
        grad_outputs: output gradients, oldest first.
        inputs: the inputs of the same calls (this rank's slice under sequence parallelism); None: the caller keeps
            them.
        limit: the most pairs to keep; 0 or None: any number.
    """

    grad_outputs: list[Tensor]
    inputs: list[Tensor] | None = None
    limit: int | None = 0

    def keep(self, x: Tensor, dy: Tensor) -> bool:
        """Keep the pair for later; return False if the limit is reached."""
        if self.limit and len(self.grad_outputs) >= self.limit:
            return False
        self.grad_outputs.append(dy)
        if self.inputs is not None:
            self.inputs.append(x)
        return True


def add_to_main_grad(weight: Tensor, dy_TN: Tensor, x_TD: Tensor) -> None:
    """Add `dy.T @ x` to the weight's `main_grad`, which Megatron-FSDP provides anew and uninitialised each time."""
    buffer_ND = main_grad.buffer_of(weight)
    if hasattr(weight, "__fsdp_param__"):
        buffer_ND.zero_()
    main_grad.add_product(buffer_ND, dy_TN, x_TD)


@torch.no_grad()
def drain_embedding_wgrad_compute(
    config: Any,
    embedding_activation_buffer: list[Tensor],
    grad_output_buffer: list[Tensor],
    weight: Tensor,
    tp_group: Group,
) -> None:
    """Compute the weight gradients that were deferred, oldest first, and empty both lists.

    They go to `weight.main_grad` with `config.gradient_accumulation_fusion`, else to `weight.grad`. With
    `config.sequence_parallel` each input is gathered over `tp_group` (one all-gather a pair, under the matmul of the
    pair before); nothing is communicated otherwise.

    Raises:
        ValueError: the lists differ in length.
    """
    inputs, grads = embedding_activation_buffer, grad_output_buffer
    if len(inputs) != len(grads):
        raise ValueError(
            f"embedding_activation_buffer has {len(inputs)} tensors and grad_output_buffer {len(grads)}: each "
            f"deferred weight gradient takes one of both; clear both lists before a step"
        )

    def start() -> Pending:
        x = inputs.pop(0)
        x_TD = x.reshape(-1, x.shape[-1])
        return start_all_gather(x_TD, tp_group) if config.sequence_parallel else Pending(x_TD)

    coming = start() if inputs else None
    while coming is not None:
        x_TD = coming.wait()
        coming = start() if inputs else None
        dy = grads.pop(0)
        dy_TN = dy.reshape(-1, dy.shape[-1]).to(x_TD.dtype)
        if config.gradient_accumulation_fusion:
            add_to_main_grad(weight, dy_TN, x_TD)
        else:
            dw_ND = cpu_products.mm(dy_TN.t(), x_TD).to(weight.dtype)
            weight.grad = dw_ND if weight.grad is None else weight.grad + dw_ND

"""Cross entropy of logits as 2.20 of Transformer Engine calls it: a mean is over the tokens that are not ignored."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_on_cpu.transformer_engine import cross_entropy
from megatron_on_cpu.transformer_engine.parameters import taking


def cross_entropy_forward(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: dist.ProcessGroup | None,
    ignore_idx: int,
    overwrite_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, int]:
    """(losses or their mean, what backward needs, nothing, labels, how many are not ignored, rank, ranks).

    The kernels keep the logits for backward, here it is their gradients; the logits stay, whatever `overwrite_input`.
    """
    loss, grad = cross_entropy.cross_entropy_forward(
        _input, target, label_smoothing, False, dist_process_group, ignore_idx
    )
    count = (target != ignore_idx).sum().clamp(min=1).view(1) if reduce_loss else None
    loss = loss if count is None else (loss.sum() / count).squeeze()
    return loss, grad, torch.empty(0), target, count, *cross_entropy.coordinates(dist_process_group)


@taking("saved_input stats target n_non_ignore grad_output label_smoothing reduce_loss rank world_size ignore_idx")
def cross_entropy_backward(given: Any) -> Tensor:
    """The gradients of the logits, multiplied by those of the losses."""
    factor = given.grad_output if given.n_non_ignore is None else given.grad_output / given.n_non_ignore
    return cross_entropy.cross_entropy_backward(given.saved_input, factor)

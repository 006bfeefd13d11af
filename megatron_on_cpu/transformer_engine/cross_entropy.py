"""Cross entropy of logits whose vocabulary may be sharded, which replaces TE's Triton kernels, as these need a GPU.

It makes one all-gather of three fp32 numbers a token over the group, as the kernels do. The kernels of 2.20 take and
return other values, and their mean is over the tokens that are not ignored.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_on_cpu.transformer_engine.parameters import taking


def _coordinates(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """Return (this rank in `group`, number of ranks); None is a group of one rank."""
    return (0, 1) if group is None else (group.rank(), group.size())


def cross_entropy_forward(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: dist.ProcessGroup | None,
    ignore_idx: int,
) -> tuple[Tensor, Tensor]:
    """Return (losses `[B, S]` in fp32, or their mean over all tokens, gradients of the logits `[B, S, V / ranks]`).

    The kernels overwrite the logits with the gradients; here the logits stay.
    """
    rank, ranks = _coordinates(dist_process_group)
    if label_smoothing > 0 and ranks > 1:
        raise NotImplementedError(
            f"label_smoothing is {label_smoothing} over {ranks} ranks: the CPU emulation of Transformer Engine has it "
            "only on one rank; use cross_entropy_fusion_impl='native'"
        )
    batch, length, columns = _input.shape
    x = _input.reshape(-1, columns).float()
    y = target.reshape(-1)
    local = y - rank * columns
    here = (local >= 0) & (local < columns)
    at_label = x.gather(1, local.clamp(0, columns - 1)[:, None])[:, 0].masked_fill(~here, float("-inf"))
    top = x.amax(1)
    total = (x - top[:, None]).exp().sum(1)
    numbers = torch.stack([top, total, at_label])
    if ranks > 1:
        gathered = [torch.empty_like(numbers) for _ in range(ranks)]
        dist.all_gather(gathered, numbers, dist_process_group)
        tops, totals, labels = torch.stack(gathered).unbind(1)
        top, at_label = tops.amax(0), labels.amax(0)
        total = (totals * (tops - top).exp()).sum(0)
    lse = top + total.log()
    ignored = y == ignore_idx
    each = label_smoothing / (columns * ranks)
    loss = (1 - label_smoothing) * (lse - at_label) + label_smoothing * lse - each * x.sum(1)
    grad = (x - lse[:, None]).exp() - each
    grad.scatter_add_(1, local.clamp(0, columns - 1)[:, None], -(1 - label_smoothing) * here.float()[:, None])
    grad = grad.masked_fill(ignored[:, None], 0.0)
    loss = loss.masked_fill(ignored, 0.0)
    if reduce_loss:
        return loss.sum() / len(x), (grad / len(x)).to(_input.dtype).view_as(_input)
    return loss.view(batch, length), grad.to(_input.dtype).view_as(_input)


def cross_entropy_backward(_input: Tensor, grad_output: Tensor, is_cg_capturable: bool = False) -> Tensor:
    """Return the gradients of the logits, multiplied by the gradients of the losses."""
    factor = grad_output.reshape(-1, 1) if grad_output.numel() > 1 else grad_output
    return (_input.reshape(-1, _input.shape[-1]) * factor).to(_input.dtype).view_as(_input)


def cross_entropy_forward_since_2_20(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: dist.ProcessGroup | None,
    ignore_idx: int,
    overwrite_input: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, int, int]:
    """Return (losses or their mean, gradients of the logits, empty, labels, number of tokens not ignored, rank, ranks).

    The number is None without `reduce_loss`. The kernels save the logits for backward, here gradients are saved. The
    logits stay, whatever `overwrite_input`.
    """
    loss, grad = cross_entropy_forward(_input, target, label_smoothing, False, dist_process_group, ignore_idx)
    count = (target != ignore_idx).sum().clamp(min=1).view(1) if reduce_loss else None
    loss = loss if count is None else (loss.sum() / count).squeeze()
    return loss, grad, torch.empty(0), target, count, *_coordinates(dist_process_group)


@taking("saved_input stats target n_non_ignore grad_output label_smoothing reduce_loss rank world_size ignore_idx")
def cross_entropy_backward_since_2_20(given: Any) -> Tensor:
    """Return the gradients of the logits, multiplied by the gradients of the losses."""
    factor = given.grad_output if given.n_non_ignore is None else given.grad_output / given.n_non_ignore
    return cross_entropy_backward(given.saved_input, factor)

"""Cross entropy of logits whose vocabulary may be sharded: in the place of TE's Triton kernels, which need a GPU.

Communicates one all-gather of three numbers a token over the group, as those do.
"""

import torch
import torch.distributed as dist
from torch import Tensor


def coordinates(group: dist.ProcessGroup | None) -> tuple[int, int]:
    """(this rank's number in `group`, how many ranks it has); None is a group of one rank."""
    return (0, 1) if group is None else (group.rank(), group.size())


def cross_entropy_forward(
    _input: Tensor,
    target: Tensor,
    label_smoothing: float,
    reduce_loss: bool,
    dist_process_group: dist.ProcessGroup | None,
    ignore_idx: int,
) -> tuple[Tensor, Tensor]:
    """(losses `[B, S]` in fp32 or their mean, gradients of the logits `[B, S, V / ranks]`).

    The kernels put the gradients where the logits were; here the logits stay.
    """
    rank, ranks = coordinates(dist_process_group)
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
    """The gradients of the logits, multiplied by those of the losses."""
    factor = grad_output.reshape(-1, 1) if grad_output.numel() > 1 else grad_output
    return (_input.reshape(-1, _input.shape[-1]) * factor).to(_input.dtype).view_as(_input)

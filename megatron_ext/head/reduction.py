"""Labels with a mask, the read-outs of log-probabilities of them, and losses reduced to a number."""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.readouts.labels import IsArgmax, LogProbs
from megatron_ext.head.readouts.read_out import ReadOut
from megatron_ext.head.readouts.row_sums import Entropy
from megatron_ext.head.validation.argument_checks import check_integers, check_same_shape
from megatron_ext.head.validation.option_checks import Reduction


def masked(labels: Any, loss_mask: Tensor | None, ignore_index: int) -> Tensor:
    """The labels, `ignore_index` where the mask is 0."""
    check_integers("labels", labels)
    if loss_mask is None:
        return labels
    check_same_shape("loss_mask", loss_mask, labels)
    return labels.long().masked_fill(loss_mask == 0, ignore_index)


def log_prob_readouts(labels: Tensor, ignore_index: int, counts: Tensor | None, hits: bool) -> list[ReadOut]:
    """Log-probabilities, with `counts` the entropies of the tokens that count, and with `hits` those."""
    readouts: list[ReadOut] = [LogProbs(labels, ignore_index)]
    if counts is not None:
        readouts.append(Entropy(counts))
    if hits:
        readouts.append(IsArgmax(labels, ignore_index))
    return readouts


def side_by_side(found: Any, token_dims: int) -> Tensor:
    """Results of read-outs, each `[...]` or `[..., K]` of the tokens, as one tensor `[..., columns]` in their order.

    Token ids among them become numbers of the others' dtype: exact in fp32, as all below 2^24 are.
    """
    leaves = torch.utils._pytree.tree_leaves(found)
    return torch.cat([x.unsqueeze(-1) if x.dim() == token_dims else x for x in leaves], -1)


def reduced(loss: Tensor, labels: Tensor, loss_mask: Tensor | None, ignore_index: int, reduction: Reduction) -> Tensor:
    """The losses times the mask: each, their sum, or their mean over the tokens that count (0 if none does)."""
    if loss_mask is not None:
        loss = loss * loss_mask.to(loss.dtype)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    kept = labels != ignore_index
    weight = (kept if loss_mask is None else kept * loss_mask).sum(dtype=loss.dtype)
    return loss.sum() / weight.where(weight != 0, 1.0)

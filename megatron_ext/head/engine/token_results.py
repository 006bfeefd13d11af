"""What the public functions from hidden states and from logits share: flat labels, refusals, results in their shape."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.engine import statistics
from megatron_ext.head.engine.options import HeadOptions, Reduction
from megatron_ext.head.row_passes.logit_passes import accumulation_dtype
from megatron_ext.head.validation import argument_checks


class Found(NamedTuple):
    """Per-token results, shaped as the labels."""

    loss: Any
    entropy: Any
    hits: Any
    z_loss: Any


def flat_labels(
    labels: Tensor,
    loss_mask: Tensor | None,
    options: HeadOptions,
    vocab: VocabShard | None,
    order: Sequence[int] | None = None,
) -> tuple[Tensor, ValueError | None]:
    """The labels as `[T]`, the masked ones ignored, their dims in the order given; and what only this rank may see."""
    fault = argument_checks.size_fault(
        vocab,
        argument_checks.check_labels,
        labels,
        options.ignore_index,
        size=options.vocab.size,
        group=options.group,
    )
    labels = labels.long()
    if loss_mask is not None:
        argument_checks.check_same_shape("loss_mask", loss_mask, labels)
        labels = labels.masked_fill(loss_mask == 0, options.ignore_index)
    return (labels if order is None or len(order) != labels.dim() else labels.permute([*order])).reshape(-1), fault


def refuse(fault: ValueError, like: Tensor, tokens: int, sizes: list[int] | None, options: HeadOptions) -> None:
    """Raises `fault` once the other ranks know of it, by the exchange that they are waiting for."""
    if options.ranks > 1 and tokens:
        if sizes is not None:
            piece = like.new_zeros(sizes[group_rank(options.group)], like.shape[-1])
            collectives.all_gather(piece, options.group, sizes=sizes)
        statistics.refuse(tokens, options, accumulation_dtype(like.dtype), like.device)
    raise fault


def log_probs(found: Found) -> Tensor | tuple[Tensor, ...]:
    results = (0.0 - found.loss, found.entropy, found.hits)  # a minus sign alone would make -0.0 of an ignored token
    chosen = tuple(x for x in results if x is not None)
    return chosen if len(chosen) > 1 else chosen[0]


def reduced(loss: Tensor, labels: Tensor, loss_mask: Tensor | None, ignore_index: int, reduction: Reduction) -> Tensor:
    if loss_mask is not None:
        loss = loss * loss_mask.to(loss.dtype)
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    kept = labels != ignore_index
    weight = (kept if loss_mask is None else kept * loss_mask).sum(dtype=loss.dtype)
    return loss.sum() / weight.where(weight != 0, 1.0)

"""The loss of a training step together with what is logged with it: top-1 hits and the z-loss, from the same pass."""

from typing import Any, NamedTuple

from torch import Tensor

from megatron_ext.distributed.groups import Group
from megatron_ext.head.cross_entropy_of_hidden_states import linear_parts
from megatron_ext.head.cross_entropy_of_logits import on_logits


class TrainingLoss(NamedTuple):
    """Per token, in the shape of the labels, the same on every tensor-parallel rank.

    Attributes:
        loss: without the z-loss; its gradient is that of the loss with it.
        hits: bool, whether the label has the largest logit; None if not asked for.
        z_loss: `z_loss lse^2`, no gradient; None without a z-loss.
    """

    loss: Tensor
    hits: Tensor | None
    z_loss: Tensor | None


def linear_training_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, *, tp_group: Group, z_loss: float, hits: bool, **options: Any
) -> TrainingLoss:
    """`linear_cross_entropy` by its parts; `options` are `bias` and the fields of `HeadOptions`.

    Communicates and raises as `linear_cross_entropy`.
    """
    found = linear_parts(
        hidden,
        weight,
        labels,
        tp_group=tp_group,
        vocab=None,
        loss_mask=None,
        skip_ignored=False,
        z_loss=z_loss,
        z_apart=z_loss != 0,
        hits=hits,
        **options,
    )
    return TrainingLoss(found.loss, found.hits, found.z_loss)


def training_loss_of_logits(
    logits: Tensor, labels: Tensor, *, tp_group: Group, z_loss: float, **options: Any
) -> TrainingLoss:
    """The same from logits `[..., V/R]` that exist already; `options` are fields of `HeadOptions`."""
    found = on_logits(
        logits,
        labels,
        tp_group=tp_group,
        vocab=None,
        loss_mask=None,
        gradient_into_logits=False,
        z_loss=z_loss,
        z_apart=z_loss != 0,
        **options,
    )
    return TrainingLoss(found.loss, None, found.z_loss)

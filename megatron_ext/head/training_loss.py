"""The loss of a training step together with what is logged with it: top-1 hits, z-loss, entropy, from the same pass."""

from typing import Any, NamedTuple

from torch import Tensor

from megatron_ext.head.checks import token_bound
from megatron_ext.head.lm_head import LmHead
from megatron_ext.head.logits import Logits
from megatron_ext.head.readouts.read_out import CrossEntropy, IsArgmax, ReadOut
from megatron_ext.head.readouts.row_sums import Entropy


class TrainingLoss(NamedTuple):
    """Per token, in the shape of the labels, the same on every tensor-parallel rank.

    Attributes:
        loss: without the z-loss; its gradient is that of the loss with it.
        hits: bool, whether the label has the largest logit; None if not asked for.
        z_loss: `z_loss lse^2`, no gradient; None without a z-loss.
        entropy: of the distributions, 0 where the label does not count, no gradient; None if not asked for.
    """

    loss: Tensor
    hits: Tensor | None = None
    z_loss: Tensor | None = None
    entropy: Tensor | None = None


class LossSettings(NamedTuple):
    """Settings of a training loss; see `CrossEntropy`.

    Attributes:
        hits, entropy: whether they are wanted.
        skip_ignored: leave out the tokens that do not count, as in `linear_cross_entropy`; of logits that exist they
            are computed.
    """

    ignore_index: int = -100
    label_smoothing: float = 0.0
    smooth_others: bool = False
    z_loss: float = 0.0
    hits: bool = False
    entropy: bool = False
    skip_ignored: bool | int = False

    def readouts(self, labels: Tensor) -> list[ReadOut]:
        """The cross entropy, with its z-loss apart, and the hits and the entropy if they are wanted."""
        loss = CrossEntropy(
            labels, self.ignore_index, self.label_smoothing, self.z_loss, self.smooth_others, z_apart=True
        )
        hits = [IsArgmax(labels, self.ignore_index)] if self.hits else []
        return [loss, *hits, Entropy(labels != self.ignore_index)] if self.entropy else [loss, *hits]


def linear_training_loss(head: LmHead, hidden: Tensor, labels: Tensor, settings: LossSettings) -> TrainingLoss:
    """`linear_cross_entropy` by its parts. Communicates and raises as `LmHead.read`."""
    counts = labels != settings.ignore_index if settings.skip_ignored else None
    found = head.read(hidden, *settings.readouts(labels), counts=counts, at_most=token_bound(settings.skip_ignored))
    return _by_parts(found, settings)


def training_loss_of_logits(logits: Logits, labels: Tensor, settings: LossSettings) -> TrainingLoss:
    """The training loss from logits `[..., V/R]` that exist already."""
    return _by_parts(logits.read(*settings.readouts(labels)), settings)


def _by_parts(found: Any, settings: LossSettings) -> TrainingLoss:
    (loss, z_loss), *others = found if settings.hits or settings.entropy else (found,)
    entropy = others.pop().detach() if settings.entropy else None
    return TrainingLoss(loss, others[0] if others else None, z_loss if settings.z_loss else None, entropy)

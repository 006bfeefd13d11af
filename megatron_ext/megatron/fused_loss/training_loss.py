"""The loss of a training step together with what is logged with it: top-1 hits, z-loss, entropy, from the same pass."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from megatron_ext.head.checks import token_bound
from megatron_ext.head.lm_head import LmHead
from megatron_ext.head.readouts.read_out import CrossEntropy, IsArgmax, ReadOut
from megatron_ext.head.readouts.row_sums import Entropy

IGNORE_INDEX = -100


class TrainingLoss(NamedTuple):
    """Values per token, in the shape of the labels, the same on every tensor-parallel rank.

    Attributes:
        loss: without the z-loss; its gradient includes that of the z-loss.
        hits: bool, whether the label has the largest logit; None if not asked for.
        z_loss: `z_loss lse^2`, without a gradient; None without a z-loss.
        entropy: each token's entropy, 0 where the label does not count, without a gradient; None if not asked for.
    """

    loss: Tensor
    hits: Tensor | None = None
    z_loss: Tensor | None = None
    entropy: Tensor | None = None


def training_loss(
    read: Callable[..., Any],
    labels: Tensor,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    hits: bool = False,
    entropy: bool = False,
) -> TrainingLoss:
    """Compute the loss, and what is logged with it, of tokens whose label is not -100.

    Args:
        read: called with read-outs; gives their results, as `Logits.read` does.
        label_smoothing, z_loss: see `CrossEntropy`.
        hits, entropy: whether to compute them.
    """
    readouts: list[ReadOut] = [CrossEntropy(labels, IGNORE_INDEX, label_smoothing, z_loss, z_apart=True)]
    readouts += [IsArgmax(labels, IGNORE_INDEX)] if hits else []
    readouts += [Entropy(labels != IGNORE_INDEX)] if entropy else []
    found = read(*readouts)
    (loss, of_z), *others = found if len(readouts) > 1 else (found,)
    entropies = others.pop().detach() if entropy else None
    return TrainingLoss(loss, others[0] if hits else None, of_z if z_loss else None, entropies)


def linear_training_loss(
    head: LmHead, hidden: Tensor, labels: Tensor, skip_ignored: bool | int = False, **options: Any
) -> TrainingLoss:
    """Compute `training_loss` from hidden states, with its `options`. Communicates and raises what `LmHead.read` does.

    `skip_ignored`: leave tokens with a label of -100 out of the products, as in `linear_cross_entropy`.
    """
    counts = labels != IGNORE_INDEX if skip_ignored else None
    read = partial(head.read, hidden, counts=counts, at_most=token_bound(skip_ignored))
    return training_loss(read, labels, **options)

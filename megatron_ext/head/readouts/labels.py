"""Log-probabilities and cross entropy of labels, and whether a label has the largest logit.

All of one call are of the same labels, which the shared pass over the logits reads. Legend: T tokens.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head import checks
from megatron_ext.head.call import statistics
from megatron_ext.head.call.logit_gradient import Basis
from megatron_ext.head.call.statistics import Statistics
from megatron_ext.head.readouts.read_out import Flatten, Found, ReadOut, counted
from megatron_ext.numerics.readable_values import OutsideVocabulary


class OfLabels(ReadOut):
    """Base of read-outs of a label per token.

    Args:
        labels: `[...]`, integers: global token ids, of all ranks' tokens.
        ignore_index: tokens with this label get 0 and no gradient.
    """

    reads_labels = True

    def __init__(self, labels: Tensor, ignore_index: int = -100):
        if type(ignore_index) is not int:
            checks.check_ignore_index(ignore_index)
        self.labels, self.ignore_index = labels, ignore_index

    def flatten(self, flat: Flatten) -> None:
        self.labels_T = flat(self.labels).long()
        self.counts_T = None if self.all_count and self.softmax else self.labels_T != self.ignore_index

    def per_token(self) -> tuple[str, Tensor]:
        return "labels", self.labels

    def check(self, size: int, vocab: VocabShard | None, group: Group) -> ValueError | None:
        try:
            self.all_count = checks.check_labels(self.labels, self.ignore_index, size)
        except OutsideVocabulary as fault:
            return ValueError(f"{fault}{checks.forgotten_group(group, vocab)}")
        return None


class LogProbs(OfLabels):
    """Log-probability of each label: `[...]`, fp32 (fp64 for fp64), 0 where the label is `ignore_index`."""

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> Found:
        return [counted((stats.target - stats.log_sum).to(own_KT.dtype), self.counts_T)], []

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis:
        return Basis(log_prob=self.counted_gradient(grad))


class IsArgmax(OfLabels):
    """Read-out of whether each label has the largest logit: `[...]`, bool, no gradient; False where it does not count.

    Among equal logits the lowest id is the largest.
    """

    hits = True
    differentiable = False

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> Found:
        return [stats.hits.clone() if self.counts_T is None else stats.hits & self.counts_T], []


_OFF = {"label_smoothing": 0.0, "z_loss": 0.0}


class CrossEntropy(OfLabels):
    """`(1 - e) nll - e mean_log_prob + z_loss lse^2` of each label, as `torch.nn.functional.cross_entropy` has it.

    Args:
        labels, ignore_index: as for `LogProbs`.
        label_smoothing: e, in [0, 1).
        z_loss: factor of `lse^2`.
        smooth_others: e is the mass of the other tokens alone, as in Megatron-Core: `e V / (V - 1)` stands for e.
        z_apart: the last term is a second result, without a gradient; the gradient of the first one is that of both.
    """

    def __init__(
        self,
        labels: Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        smooth_others: bool = False,
        z_apart: bool = False,
    ):
        super().__init__(labels, ignore_index)
        self.label_smoothing, self.z_loss, self.smooth_others = label_smoothing, z_loss, smooth_others
        if not type(label_smoothing) is type(z_loss) is float or label_smoothing or z_loss:
            checks.check_options(self, _OFF)
        self.z_apart, self.count = z_apart, 1 + z_apart
        self.mean = label_smoothing > 0

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> Found:
        value = stats.log_sum - stats.target
        if self.mean:
            assert stats.mean is not None
            e = self._smoothing(stats)
            value = (1 - e) * value - e * (stats.mean - stats.log_sum)
        found = [value]
        if self.z_loss:
            z_loss = self.z_loss * statistics.lse(stats).square()
            found = [value, z_loss] if self.z_apart else [value + z_loss]
        elif self.z_apart:
            found = [value, torch.zeros_like(value)]
        if self.counts_T is None and len(found) == 1:
            return [found[0].to(own_KT.dtype)], []
        return [counted(x_T.to(own_KT.dtype), self.counts_T) for x_T in found], []

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis:
        g = self.counted_gradient(grad)
        if not self.mean and not self.z_loss:
            return Basis(log_prob=-g)
        g = g.double()
        log_prob, lse, mean = -g, None, None
        if self.mean:
            e = self._smoothing(stats)
            log_prob, lse, mean = (e - 1) * g, e * g, -e * g
        if self.z_loss:
            of_square = g * (2 * self.z_loss) * counted(statistics.lse(stats), self.counts_T)
            lse = of_square if lse is None else lse + of_square
        return Basis(log_prob=log_prob, lse=lse, mean=mean)

    def _smoothing(self, stats: Statistics) -> Tensor | float:
        """e of `(1 - e) nll - e mean_log_prob`."""
        if not self.smooth_others:
            return self.label_smoothing
        assert stats.columns is not None
        return self.label_smoothing * stats.columns / (stats.columns - 1).clamp(min=1)


class Filtered(OfLabels):
    """Base of filters: they find their labels' logits themselves, and need no softmax of the whole row."""

    softmax = False
    needs_logits = True
    by_leaf = True
    reads_labels = False

    labels_T: Tensor
    counts_T: Tensor

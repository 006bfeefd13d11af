"""Jensen-Shannon divergence and total variation: read-outs of a student's and a teacher's normalised distributions.

A mixture, or which of two probabilities is the smaller one, wants normalised distributions: the ranks tell each other
their shards' statistics before they can go on, chunk by chunk, as the logits come. Gradients reach the student. With p
of the student (a draft), q of the teacher (its target), and m = (1 - b) p + b q, of each token

    Jensen-Shannon     (1 - b) KL(p | m) + b KL(q | m)          dz = (1 - b) p ((log p - log m) - KL(p | m))
    total variation    1/2 sum |p - q| = 1 - sum min(p, q)      dz = p (s - sum p s),  s = sign(p - q) / 2

The first is the generalised divergence as TRL and Liger define it (Agarwal et al., 2023). Speculative sampling accepts
a token that the draft drew with probability `sum min(p, q)` (Leviathan et al., 2023), so that total variation is what
training a draft for it should minimise (Bebop, arXiv 2606.12370).

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K statistics, R ranks.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.head.call import chunk_sizes
from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.checks import check_number
from megatron_ext.head.readouts.read_out import ReadOut, ReadOutResults, put
from megatron_ext.head.readouts.teacher import SIDE, below, normaliser, side_statistics
from megatron_ext.numerics.tensors import accumulation_dtype

_SIDES = 2 * SIDE  # statistics of both sides; behind them the sums of p h and of the terms


class NormalisedSides(ReadOut):
    """A sum over the vocabulary for each token, of terms of both probabilities; h is their derivative by the student's
    p, and the gradient `p (h - sum p h)`."""

    softmax = False
    needs_logits = True
    by_leaf = True
    by_factor = True
    in_step = True
    begins = True
    rows = _SIDES + 2

    def __init__(self, teacher: Any):
        self.teacher = teacher

    def summed(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return `p h`, and the terms, of log-probabilities: both are summed over the vocabulary."""
        raise NotImplementedError

    def derivative(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Return h, of log-probabilities; anything where the student's probability is 0."""
        raise NotImplementedError

    def chunks(self, tokens: int, on_gpu: bool) -> list[slice]:
        """Cut the tokens by the width of an equal shard, since all ranks must cut the tokens alike."""
        width = -(-self.call.vocab.size // self.call.ranks)
        return chunk_sizes.chunks(slice(0, tokens), self.call.chunk_tokens, width, on_gpu)

    def scan(self, rows: slice, logits: Sequence[Tensor], stats_Kt: Tensor, own_Kt: Any) -> None:
        self.scan_leaves([self], [(rows, logits, stats_Kt, own_Kt)])

    def scan_leaves(self, of_leaves: Sequence[ReadOut], chunks: Sequence[Any]) -> None:
        for leaf, (_, logits, stats_Kt, _) in zip(of_leaves, chunks, strict=True):
            side_statistics(logits, stats_Kt, leaf.call)
        sides_NKt = torch.stack([stats_Kt[:_SIDES] for _, _, stats_Kt, _ in chunks])
        if self.call.ranks > 1:
            sides_NKt = collectives.all_gather(sides_NKt, self.call.group)
        normalisers = self._normalisers(sides_NKt)
        for leaf, (_, logits, stats_Kt, _) in zip(of_leaves, chunks, strict=True):
            stats_Kt[_SIDES:] = 0
            for at in blocks(logits[0]) if leaf.call.vocab.counted else []:
                sides = _log_probs(logits, normalisers, at, leaf.call)
                for row, x in enumerate(self.summed(*sides), _SIDES):
                    stats_Kt[row, at] = self.row_sums(x)

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        expected_T, value_T = self.added(stats_RKT[:, _SIDES:].double())
        return [value_T.to(own_KT.dtype)], [expected_T, *self._normalisers(stats_RKT[:, :_SIDES])]

    def pull(
        self, saved: list[Tensor], rows: slice, logits: Sequence[Tensor], grad: Tensor, out_tV: Tensor, first: bool
    ) -> None:
        wide, counted = accumulation_dtype(out_tV.dtype), self.call.vocab.counted
        expected_t, *normalisers = (x[rows] for x in saved)
        scale_t = grad[rows].double() / self.call.temperature
        counts_t1 = (scale_t != 0).unsqueeze(1)  # others may have NaN, which 0 times is NaN
        for at in blocks(out_tV) if counted else []:
            student, teacher = _log_probs(logits, normalisers, at, self.call)
            p = student.exp()
            pulled = p * (self.derivative(student, teacher) - expected_t[at].to(wide).unsqueeze(1))
            pulled *= scale_t[at].to(wide).unsqueeze(1)
            put(out_tV[at, :counted], pulled.where((p > 0) & counts_t1[at], 0.0), first)

    def _normalisers(self, sides_RKT: Tensor) -> list[Tensor]:
        """fp64 `[T]`, of the student and then of the teacher: the largest logit, and the log of the sum below it."""
        return [x for i in (0, 1) for x in normaliser(sides_RKT, i, self.call)]


def _log_probs(logits: Sequence[Tensor], normalisers: list[Tensor], at: slice, call: ResolvedHead) -> list[Tensor]:
    wide = [accumulation_dtype(z_tV.dtype) for z_tV in logits]
    peaks, log_sums = ([x[at].to(dtype) for x, dtype in zip(normalisers[i::2], wide, strict=True)] for i in (0, 1))
    sides = below(logits, peaks, at, call)
    return [z.sub_(log_sum_u.unsqueeze(1)) for z, log_sum_u in zip(sides, log_sums, strict=True)]


def check_beta(beta: float) -> None:
    """Raises ValueError unless both distributions have a share of the mixture."""
    limits = "kl_divergence has the limits, 'forward' of 0 and 'reverse' of 1"
    check_number("beta", beta, "in (0, 1)", lambda x: 0 < x < 1, limits)


class JensenShannon(NormalisedSides):
    """Jensen-Shannon divergence of a student and a teacher over the whole vocabulary: `[...]`, fp32 (fp64 for fp64).

    Args:
        teacher: as for `KL`.
        beta: in (0, 1), the teacher's share of the mixture. Near 0 the result is `beta` times KL(teacher | student),
            near 1 `1 - beta` times KL(student | teacher).

    Communicates, at several ranks: forward 1 small collective a chunk and 1 more beside the common one.
    """

    def __init__(self, teacher: Any, beta: float = 0.5):
        check_beta(beta)
        super().__init__(teacher)
        self.beta = beta

    def summed(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        mixture = self._mixture(student, teacher)
        first = _weighed(student, (1 - self.beta) * (student - mixture))
        return first, first + _weighed(teacher, self.beta * (teacher - mixture))

    def derivative(self, student: Tensor, teacher: Tensor) -> Tensor:
        return (1 - self.beta) * (student - self._mixture(student, teacher))

    def _mixture(self, student: Tensor, teacher: Tensor) -> Tensor:
        """`logaddexp`, whose bits on a CPU depend on an element's place, of functions whose bits do not."""
        one, other = student + math.log1p(-self.beta), teacher + math.log(self.beta)
        largest = torch.maximum(one, other)
        below = torch.minimum(one, other).sub_(largest).nan_to_num_(0.0, 0.0, -torch.inf)  # of two -inf nan
        return largest + below.exp_().log1p_()


def _weighed(log_p: Tensor, h: Tensor) -> Tensor:
    """`p h`, 0 where p is 0."""
    p = log_p.exp()
    return (p * h).where(p > 0, 0.0)


class TotalVariation(NormalisedSides):
    """Total variation between a draft and its target over the whole vocabulary: `[...]`, fp32 (fp64 for fp64).

    1 less the rate at which speculative sampling accepts the draft's tokens.

    Args:
        teacher: the target; as for `KL`.

    Communicates, at several ranks: forward 1 small collective a chunk and 1 more beside the common one.
    """

    def summed(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        p = student.exp()
        return p * self.derivative(student, teacher), (p - teacher.exp()).abs_().div_(2)

    def derivative(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Half the sign of what the draft's probability is above the target's; 0 where both are 0."""
        return (student > teacher).to(student.dtype).sub_((student < teacher).to(student.dtype)).div_(2)


class AcceptanceRate(TotalVariation):
    """`sum min(p, q)` of a draft and its target, else as `TotalVariation`, from which 1 it differs: `[...]`.

    Summed by itself: it keeps its digits where it is small, for a loss of its logarithm.
    """

    def summed(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        return super().summed(student, teacher)[0], student.minimum(teacher).exp()

    def derivative(self, student: Tensor, teacher: Tensor) -> Tensor:
        return -super().derivative(student, teacher)

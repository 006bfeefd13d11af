"""Jensen-Shannon divergence between a student's distribution and a teacher's; gradients reach the student.

With p of the student, q of the teacher, and m = (1 - b) p + b q, of each token

    (1 - b) KL(p | m) + b KL(q | m)                         dz = (1 - b) p ((log p - log m) - KL(p | m))

as TRL and Liger define the generalised divergence (Agarwal et al., 2023). The mixture wants normalised distributions,
so the ranks tell each other their shards' statistics before they can go on: chunk by chunk, as the logits come.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K statistics, R ranks.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.head.engine import chunk_sizes
from megatron_ext.head.readouts.read_out import Chunk, Found, ReadOut, put
from megatron_ext.head.readouts.teacher import SIDE, normaliser, side_statistics
from megatron_ext.head.row_passes.logit_passes import accumulation_dtype, transformed
from megatron_ext.head.row_passes.vocabulary_order import blocks

_SIDES = 2 * SIDE  # statistics of both sides, before the sums of p (log p - log m) and q (log q - log m)


def check_beta(beta: float) -> None:
    """Raises ValueError unless both distributions have a share of the mixture."""
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 < beta < 1:
        raise ValueError(
            f"beta is {beta!r}: it must be a number in (0, 1); kl_divergence has the limits, 'forward' of 0 and "
            f"'reverse' of 1"
        )


class JensenShannon(ReadOut):
    """Jensen-Shannon divergence of a student and a teacher over the whole vocabulary: `[...]`, fp32 (fp64 for fp64).

    Args:
        teacher: as for `KL`.
        beta: in (0, 1), the teacher's share of the mixture. Near 0 the result is `beta` times KL(teacher | student),
            near 1 `1 - beta` times KL(student | teacher).

    Communicates, at several ranks: forward 1 small collective a chunk and 1 more beside the common one.
    """

    softmax = False
    needs_logits = True
    in_step = True
    begins = True
    rows = _SIDES + 2

    def __init__(self, teacher: Any, beta: float = 0.5):
        check_beta(beta)
        self.teacher, self.beta = teacher, beta

    def chunks(self, tokens: int) -> list[slice]:
        """By the width of an equal shard: all ranks must cut the tokens alike."""
        width = -(-self.call.vocab.size // self.call.ranks)
        return chunk_sizes.chunks(slice(0, tokens), self.call.chunk_tokens, width)

    def scan(self, chunk: Chunk) -> None:
        stats_Kt = chunk.stats_Kt
        side_statistics(chunk.logits, stats_Kt, self.call)
        sides_RKt = stats_Kt[None, :_SIDES]
        if self.call.ranks > 1:
            sides_RKt = collectives.all_gather(sides_RKt, self.call.group)
        normalisers = _normalisers(sides_RKt)
        stats_Kt[_SIDES:] = 0
        for at in blocks(chunk.logits[0]) if self.call.vocab.counted else []:
            student, teacher, mixture = self._log_probs(chunk.logits, normalisers, at)
            for row, log_p in ((_SIDES, student), (_SIDES + 1, teacher)):
                p = log_p.exp()
                stats_Kt[row, at] = (p * (log_p - mixture)).where(p > 0, 0.0).sum(1)

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> Found:
        sums_KT = stats_RKT[:, _SIDES:].double().sum(0)
        value_T = (1 - self.beta) * sums_KT[0] + self.beta * sums_KT[1]
        return [value_T.to(own_KT.dtype)], [sums_KT[0], *_normalisers(stats_RKT[:, :_SIDES])]

    def reads_logits(self, saved: list[Tensor], rows: slice) -> bool:
        return True

    def pull(
        self, saved: list[Tensor], rows: slice, logits: Sequence[Tensor], grad: Tensor, out_tV: Tensor, first: bool
    ) -> None:
        wide, counted = accumulation_dtype(out_tV.dtype), self.call.vocab.counted
        apart_t, *normalisers = (x[rows] for x in saved)
        scale_t = (1 - self.beta) * grad[rows].double() / self.call.temperature
        counts_t1 = (scale_t != 0).unsqueeze(1)  # others may have NaN, which 0 times is NaN
        for at in blocks(out_tV) if counted else []:
            student, _, mixture = self._log_probs(logits, normalisers, at)
            p = student.exp()
            pulled = p * (student - mixture - apart_t[at].to(wide).unsqueeze(1)) * scale_t[at].to(wide).unsqueeze(1)
            put(out_tV[at, :counted], pulled.where((p > 0) & counts_t1[at], 0.0), first)

    def _log_probs(self, logits: Sequence[Tensor], normalisers: list[Tensor], at: slice) -> list[Tensor]:
        """Of the student, the teacher and the mixture."""
        counted = self.call.vocab.counted
        found = []
        for i, z_tV in enumerate(logits):
            wide = accumulation_dtype(z_tV.dtype)
            largest_t1, log_sum_t1 = (x[at].to(wide).unsqueeze(1) for x in normalisers[2 * i : 2 * i + 2])
            z = transformed(z_tV[at, :counted], None, None, self.call.temperature, wide)
            found.append((z - largest_t1) - log_sum_t1)
        student, teacher = found
        shares = math.log1p(-self.beta), math.log(self.beta)
        return [student, teacher, torch.logaddexp(student + shares[0], teacher + shares[1])]


def _normalisers(sides_RKT: Tensor) -> list[Tensor]:
    """fp64 `[T]`, of the student and then of the teacher: the largest logit, and the log of the sum below it."""
    return [x for i in (0, 1) for x in normaliser(sides_RKT, i)]

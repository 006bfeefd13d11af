"""Base of read-outs of a student's and a teacher's normalised distributions.

A mixture, or which of two probabilities is the smaller one, wants normalised distributions: the ranks tell each other
their shards' statistics before they can go on, chunk by chunk, as the logits come.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K statistics, R ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.head.call import chunk_sizes
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.readouts.divergences.teacher import SIDE, OfTwoSides, normaliser, side_statistics
from megatron_ext.head.readouts.read_out import Chunk, Found, ReadOut, put
from megatron_ext.head.row_passes.logit_passes import transformed
from megatron_ext.head.row_passes.row_blocks import blocks
from megatron_ext.numerics.matrices import accumulation_dtype

_SIDES = 2 * SIDE  # statistics of both sides, before the two sums over the vocabulary


class NormalisedSides(OfTwoSides):
    """A number of each token made of two sums over the vocabulary; its gradient wants the first of them.

    Communicates, at several ranks: forward 1 small collective a chunk and 1 more beside the common one.
    """

    in_step = True
    begins = True
    rows = _SIDES + 2

    def __init__(self, teacher: Any):
        self.teacher = teacher

    def summed(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return the terms of log-probabilities that are summed over the vocabulary."""
        raise NotImplementedError

    def value(self, first_T: Tensor, second_T: Tensor) -> Tensor:
        """The result, of both sums."""
        raise NotImplementedError

    def pulled(self, student: Tensor, teacher: Tensor, first_t1: Tensor) -> Tensor:
        """The gradient of the student's logits, without the student's probability as a factor."""
        raise NotImplementedError

    def chunks(self, tokens: int, on_gpu: bool) -> list[slice]:
        """By the width of an equal shard: all ranks must cut the tokens alike."""
        width = -(-self.call.vocab.size // self.call.ranks)
        return chunk_sizes.chunks(slice(0, tokens), self.call.chunk_tokens, width, on_gpu)

    def scan(self, chunk: Chunk) -> None:
        self.scan_leaves([self], [chunk])

    def scan_leaves(self, of_leaves: Sequence[ReadOut], chunks: Sequence[Chunk]) -> None:
        for leaf, chunk in zip(of_leaves, chunks, strict=True):
            side_statistics(chunk.logits, chunk.stats_Kt, leaf.call)
        sides_NKt = torch.stack([chunk.stats_Kt[:_SIDES] for chunk in chunks])
        if self.call.ranks > 1:
            sides_NKt = collectives.all_gather(sides_NKt, self.call.group)
        normalisers = self._normalisers(sides_NKt)
        for leaf, chunk in zip(of_leaves, chunks, strict=True):
            chunk.stats_Kt[_SIDES:] = 0
            for at in blocks(chunk.logits[0]) if leaf.call.vocab.counted else []:
                sides = _log_probs(chunk.logits, normalisers, at, leaf.call)
                for row, x in enumerate(self.summed(*sides), _SIDES):
                    chunk.stats_Kt[row, at] = self.row_sums(x)

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> Found:
        first_T, second_T = self.added(stats_RKT[:, _SIDES:].double())
        value_T = self.value(first_T, second_T)
        return [value_T.to(own_KT.dtype)], [first_T, *self._normalisers(stats_RKT[:, :_SIDES])]

    def pull(
        self, saved: list[Tensor], rows: slice, logits: Sequence[Tensor], grad: Tensor, out_tV: Tensor, first: bool
    ) -> None:
        wide, counted = accumulation_dtype(out_tV.dtype), self.call.vocab.counted
        first_t, *normalisers = (x[rows] for x in saved)
        scale_t = grad[rows].double() / self.call.temperature
        counts_t1 = (scale_t != 0).unsqueeze(1)  # others may have NaN, which 0 times is NaN
        for at in blocks(out_tV) if counted else []:
            student, teacher = _log_probs(logits, normalisers, at, self.call)
            p = student.exp()
            pulled = p * self.pulled(student, teacher, first_t[at].to(wide).unsqueeze(1))
            pulled *= scale_t[at].to(wide).unsqueeze(1)
            put(out_tV[at, :counted], pulled.where((p > 0) & counts_t1[at], 0.0), first)

    def _normalisers(self, sides_RKT: Tensor) -> list[Tensor]:
        """fp64 `[T]`, of the student and then of the teacher: the largest logit, and the log of the sum below it."""
        return [x for i in (0, 1) for x in normaliser(sides_RKT, i, self.call)]


def _log_probs(logits: Sequence[Tensor], normalisers: list[Tensor], at: slice, call: ResolvedHead) -> list[Tensor]:
    """Return the log-probabilities of the student and the teacher."""
    found = []
    for i, z_tV in enumerate(logits):
        wide = accumulation_dtype(z_tV.dtype)
        largest_t1, log_sum_t1 = (x[at].to(wide).unsqueeze(1) for x in normalisers[2 * i : 2 * i + 2])
        z = transformed(z_tV[at, : call.vocab.counted], None, None, call.temperature, wide)
        found.append((z - largest_t1) - log_sum_t1)
    return found

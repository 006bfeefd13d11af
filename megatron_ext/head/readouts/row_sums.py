"""Sums over a whole row of logits: entropy, mean logit, log of the sum of exponentials, sum of squares.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K rows of statistics, R ranks.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call import statistics
from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.call.logit_gradient import Basis
from megatron_ext.head.call.matmul import transformed
from megatron_ext.head.call.statistics import Statistics
from megatron_ext.head.readouts.read_out import ReadOut, ReadOutResults, counted, put
from megatron_ext.numerics.tensors import accumulation_dtype


class Entropy(ReadOut):
    """Entropy `-sum p log p` of each token's distribution: `[...]`, fp32 (fp64 for fp64)."""

    expected = True

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        return self.results_of(stats.log_sum - stats.expected, own_KT)

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis:
        return Basis(entropy=self.counted_gradient(grad))


class MeanLogit(ReadOut):
    """Mean of each token's logits that are not -inf, after the temperature: `[...]`, fp32 (fp64 for fp64)."""

    mean = True

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        return self.results_of(stats.largest + stats.mean, own_KT)

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis:
        return Basis(mean=self.counted_gradient(grad))


class LogSumExp(ReadOut):
    """`log sum exp z` of each token: `[...]`, fp32 (fp64 for fp64). With a log-probability it gives a logit."""

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        return self.results_of(statistics.lse(stats), own_KT)

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis:
        return Basis(lse=self.counted_gradient(grad))


class ZLoss(ReadOut):
    """`(log sum exp z)^2` of each token: `[...]`, fp32 (fp64 for fp64)."""

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        return self.results_of(statistics.lse(stats).square(), own_KT)

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis:
        return Basis(lse=self.counted_gradient(2 * grad.double() * statistics.lse(stats)))


class SumOfSquares(ReadOut):
    """`sum p^2`, the probability that two draws of a token are the same id: `[...]`, fp32 (fp64 for fp64).

    A rank sends m and `sum exp(z - m)^2`. dz = 2 p (p - sum p^2): `basis` has the second term; `pull` adds the first
    from logits that are made again.
    """

    rows = 2
    needs_logits = True
    by_leaf = True

    def scan(self, rows: slice, logits: Sequence[Tensor], stats_Kt: Tensor, own_Kt: Any) -> None:
        z_tV, columns = logits[0], self.call.vocab.counted
        stats_Kt[0], stats_Kt[1] = -torch.inf, 0
        for at in blocks(z_tV) if columns else []:
            z = transformed(z_tV[at, :columns], None, None, self.call.temperature, stats_Kt.dtype)
            peak = z.amax(1)
            stats_Kt[0, at] = peak
            below = z - peak.clamp(min=torch.finfo(z.dtype).min).unsqueeze(1)
            stats_Kt[1, at] = self.row_sums(below.exp_().square_())

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        largest_T = stats.largest.where(stats.largest > -torch.inf, 0.0)
        below_RT = (stats_RKT[:, 0].double() - largest_T).clamp(min=-1e4)
        value_T = self.added(stats_RKT[:, 1].double() * (2 * (below_RT - stats.log_sum)).exp())
        return [counted(value_T.to(own_KT.dtype), self.counts_T)], [value_T, largest_T, stats.log_sum]

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis:
        return Basis(lse=self.counted_gradient(-2 * grad.double() * saved[0]))

    def pull(
        self, saved: list[Tensor], rows: slice, logits: Sequence[Tensor], grad: Tensor, out_tV: Tensor, first: bool
    ) -> None:
        z_tV, columns, temperature = logits[0], self.call.vocab.counted, self.call.temperature
        wide = accumulation_dtype(z_tV.dtype)
        largest_t1, log_sum_t1 = (x[rows].to(wide).unsqueeze(1) for x in saved[1:])
        counts_T = None if self.counts_T is None else self.counts_T[rows]
        g_t1 = counted(2 * grad[rows].double() / temperature, counts_T).to(wide).unsqueeze(1)
        for at in blocks(out_tV) if columns else []:
            z = transformed(z_tV[at, :columns], None, None, temperature, wide)
            squares = ((z - largest_t1[at]) - log_sum_t1[at]).exp_().square_().mul_(g_t1[at])
            put(out_tV[at, :columns], squares.where(g_t1[at] != 0, 0.0), first)

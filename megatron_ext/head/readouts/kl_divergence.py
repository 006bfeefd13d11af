"""KL divergence between a student's and a teacher's whole distributions; gradients reach the student only.

With p of the teacher, q of the student, and logits t and z below their maxima:

    cross entropy   log S_q - E_p[z]                       dz = q - p
    forward KL      E_p[t - z] - log S_p + log S_q         dz = q - p
    reverse KL      E_q[z - t] - log S_q + log S_p         dz = q ((log q - log p) - KL)

A shard's sum of exp(a) (x - y) is moved to the common maxima as in `statistics.py`.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K statistics, R ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_ext.head.engine import statistics
from megatron_ext.head.readouts.readout import OWN, Logits, ReadOut
from megatron_ext.head.readouts.vocabulary_order import blocks
from megatron_ext.head.row_passes.logit_passes import MAX, SUM_EXP, accumulation_dtype, transformed

Direction = Literal["forward", "reverse"]


@dataclass(frozen=True)
class Divergence(ReadOut):
    """`[T]`: cross entropy or KL divergence of the first logits from the second."""

    kind: Literal["cross entropy", "forward", "reverse"]

    more = OWN + 1  # the teacher's own, and the sum

    def scan(self, logits: Logits, rows: slice, stats_Kt: Tensor) -> None:
        for i, z_tV in enumerate(logits):
            self.own_statistics(z_tV, stats_Kt[i * OWN : (i + 1) * OWN])
        stats_Kt[2 * OWN] = 0
        for at in blocks(logits[0]) if self.options.vocab.counted else []:
            student, teacher = self._below(logits, [_finite(stats_Kt[i * OWN + MAX, at]) for i in (0, 1)], at)
            weight, apart = self._parts(student, teacher)
            weight = weight.exp()
            stats_Kt[2 * OWN, at] = (weight * apart).where(weight > 0, 0.0).sum(1)

    def combine(self, stats_RKT: Tensor, own_KT: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        sides = [slice(i * OWN, (i + 1) * OWN) for i in (0, 1)]
        student, teacher = (statistics.combine(stats_RKT[:, s], own_KT[s], self.options) for s in sides)
        below = [
            _finite(stats_RKT[:, s][:, MAX, :-1]) - _finite(stats.largest)
            for s, stats in zip(sides, (student, teacher), strict=True)
        ]
        weight_RT, apart_RT = self._parts(*below)
        sum_RT = stats_RKT[:, sides[self.kind != "reverse"]][:, SUM_EXP, :-1]
        weight_RT = weight_RT.exp().where(sum_RT > 0, 0.0)
        parts_RT = weight_RT * (stats_RKT[:, 2 * OWN, :-1] + sum_RT * apart_RT)
        apart_T = parts_RT.where(weight_RT > 0, 0.0).sum(0) / (weight_RT * sum_RT).sum(0)
        value_T = apart_T - self._parts(student.log_sum, teacher.log_sum)[1]
        sides_T = [x for stats in (student, teacher) for x in (_finite(stats.largest), stats.log_sum.neg().exp())]
        return [value_T.to(own_KT.dtype)], [apart_T, *sides_T]

    def pull(self, logits: Callable[[], Logits], rows: slice, saved: list[Tensor], grad: Tensor, out_tV: Tensor):
        wide, counted, both = accumulation_dtype(out_tV.dtype), self.options.vocab.counted, logits()
        out_tV[:, counted:] = 0
        apart_t, *sides = (x[rows] for x in saved)
        g_t = grad[rows].double() / self.options.temperature
        silent_t1 = (g_t == 0).unsqueeze(1)  # whose logits may be NaN, which 0 times is NaN
        # What turns exponentials into g times probabilities: less is rounded than by a logarithm below them.
        q_scale_t1, p_scale_t1 = ((g_t * x).to(wide).unsqueeze(1) for x in sides[1::2])
        for at in blocks(out_tV) if counted else []:
            student, teacher = self._below(both, [x[at].to(wide) for x in sides[::2]], at)
            if self.kind == "reverse":
                pulled = student - teacher - apart_t[at].to(wide).unsqueeze(1)
                q = student.exp_().mul_(q_scale_t1[at])
                pulled = (q * pulled).where(q != 0, 0.0)  # an infinite divergence left out has a g of 0
            else:
                pulled = student.exp_().mul_(q_scale_t1[at]) - teacher.exp_().mul_(p_scale_t1[at])
            out_tV[at, :counted] = pulled.masked_fill_(silent_t1[at], 0)

    def _parts(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """What is weighed by, as a logarithm, and what is weighed."""
        if self.kind == "cross entropy":
            return teacher, -student
        return (teacher, teacher - student) if self.kind == "forward" else (student, student - teacher)

    def _below(self, logits: Logits, peaks: list[Tensor], at: slice) -> list[Tensor]:
        """New tensors: the logits over the temperature, less what is given for each row."""
        counted = self.options.vocab.counted
        return [
            transformed(z_tV[at, :counted], None, None, self.options.temperature, peak_t.dtype) - peak_t.unsqueeze(1)
            for z_tV, peak_t in zip(logits, peaks, strict=True)
        ]


def _finite(peak: Tensor) -> Tensor:
    """0 for a shard without a finite logit: something that can be subtracted."""
    return peak.where(peak > -torch.inf, 0.0)

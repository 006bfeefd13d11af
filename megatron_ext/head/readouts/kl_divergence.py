"""KL divergence between a student's and a teacher's whole distributions; gradients reach the student only.

With p and q the probabilities of teacher and student, t and z their logits less the maxima, S the sums of exponentials:

    cross entropy   log S_q - E_p[z]                       dz = q - p
    forward KL      E_p[t - z] - log S_p + log S_q         dz = q - p
    reverse KL      E_q[z - t] - log S_q + log S_p         dz = q ((log q - log p) - KL)

A shard's sum of exp(a) (x - y) is relative to its own maxima; `results` moves it to the common ones.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K statistics, R ranks.
"""

from collections.abc import Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.head.call.statistics import MAX, SUM_EXP
from megatron_ext.head.checks import one_of
from megatron_ext.head.readouts.read_out import ReadOut, ReadOutResults, put
from megatron_ext.head.readouts.teacher import SIDE, below, normaliser, side_statistics
from megatron_ext.numerics.tensors import accumulation_dtype

Direction = Literal["forward", "reverse"]
_SUM = 2 * SIDE  # the row of the sum; the rows before it are the statistics of both sides


class KL(ReadOut):
    """KL divergence of a student from a teacher over the whole vocabulary: `[...]`, fp32 (fp64 for fp64).

    KL(p | q) is infinite where p gives probability to a token whose logit in q is -inf.

    Args:
        teacher: a `Teacher` of hidden states, or other `Logits`: of the same tokens and vocabulary shards; hidden
            sizes and dtypes may differ. It gets no gradient. The student's temperature divides both logits.
        direction: "forward": KL(teacher | student); "reverse": KL(student | teacher); "cross entropy":
            `-sum softmax(teacher) log_softmax(student)`.

    The logits of a teacher of hidden states are made in forward, and again in backward unless forward keeps the
    gradient (`LmHead.cache`). With the sequence layout one all-gather carries the hidden states of both.
    """

    softmax = False
    needs_logits = True
    by_leaf = True
    by_factor = True
    rows = _SUM + 1

    def __init__(self, teacher: Any, direction: Literal["forward", "reverse", "cross entropy"] = "forward"):
        one_of("direction", direction, (*get_args(Direction), "cross entropy"))
        self.teacher, self.kind = teacher, direction

    def scan(self, rows: slice, logits: Sequence[Tensor], stats_Kt: Tensor, own_Kt: Any) -> None:
        side_statistics(logits, stats_Kt, self.call)
        stats_Kt[_SUM] = 0
        for at in blocks(logits[0]) if self.call.vocab.counted else []:
            student, teacher = below(logits, [_finite(stats_Kt[i * SIDE + MAX, at]) for i in (0, 1)], at, self.call)
            weight, apart = self._parts(student, teacher)
            weight = weight.exp()
            stats_Kt[_SUM, at] = self.row_sums((weight * apart).where(weight > 0, 0.0))

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        sides = [normaliser(stats_RKT, i, self.call) for i in (0, 1)]
        (_, student_T), (_, teacher_T) = sides
        peaks = [_finite(stats_RKT[:, i * SIDE + MAX].double()) - largest_T for i, (largest_T, _) in enumerate(sides)]
        weight_RT, apart_RT = self._parts(*peaks)
        sum_RT = stats_RKT[:, (self.kind != "reverse") * SIDE + SUM_EXP].double()
        weight_RT = weight_RT.exp().where(sum_RT > 0, 0.0)
        parts_RT = weight_RT * (stats_RKT[:, _SUM] + sum_RT * apart_RT)
        apart_T = self.added(parts_RT.where(weight_RT > 0, 0.0)) / self.added(weight_RT * sum_RT)
        value_T = apart_T - self._parts(student_T, teacher_T)[1]
        sides_T = [x for largest_T, log_sum_T in sides for x in (largest_T, log_sum_T.neg().exp())]
        return [value_T.to(own_KT.dtype)], [apart_T, *sides_T]

    def pull(
        self, saved: list[Tensor], rows: slice, logits: Sequence[Tensor], grad: Tensor, out_tV: Tensor, first: bool
    ) -> None:
        wide, counted = accumulation_dtype(out_tV.dtype), self.call.vocab.counted
        apart_t, *sides = (x[rows] for x in saved)
        g_t = grad[rows].double() / self.call.temperature
        # Tokens without a gradient: their logits may be NaN, and 0 * NaN would be NaN in the gradient.
        silent_t1 = (g_t == 0).unsqueeze(1)
        # Factors that turn exponentials into g times probabilities: a logarithm in the exponent would round more.
        q_scale_t1, p_scale_t1 = ((g_t * x).to(wide).unsqueeze(1) for x in sides[1::2])
        for at in blocks(out_tV) if counted else []:
            student, teacher = below(logits, [x[at].to(wide) for x in sides[::2]], at, self.call)
            if self.kind == "reverse":
                pulled = student - teacher - apart_t[at].to(wide).unsqueeze(1)
                q = student.exp_().mul_(q_scale_t1[at])
                pulled = (q * pulled).where(q != 0, 0.0)  # an infinite divergence that is masked out has a g of 0
            else:
                pulled = student.exp_().mul_(q_scale_t1[at]) - teacher.exp_().mul_(p_scale_t1[at])
            put(out_tV[at, :counted], pulled.masked_fill_(silent_t1[at], 0), first)

    def _parts(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and x - y of the sum of exp(a) (x - y)."""
        if self.kind == "cross entropy":
            return teacher, -student
        return (teacher, teacher - student) if self.kind == "forward" else (student, student - teacher)


def _finite(peak: Tensor) -> Tensor:
    """Return `peak`, 0 where it is -inf, so that it can be subtracted."""
    return peak.where(peak > -torch.inf, 0.0)

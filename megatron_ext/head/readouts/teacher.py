"""The two sides of a divergence: where a teacher's logits come from, and the statistics of student and teacher.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K rows of statistics, R ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.head.call.leaves import added
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import MAX, SUM_EXP
from megatron_ext.head.readouts.read_out import ReadOut
from megatron_ext.head.row_passes.dispatch import passes_of

SIDE = 3  # rows of each side, those of `row_statistics`


class Teacher(NamedTuple):
    """A teacher's lm head and its last hidden states.

    Attributes:
        head: its `LmHead`, of the student's group and vocabulary shards.
        hidden: `[..., D of the teacher]`, of the same tokens and in the same layout as the student's; or, beside the
            student's `[..., n, D]`, of n tokens each, as n drafts of one position have one target: its product is then
            made once for the n.
    """

    head: Any
    hidden: Tensor


class OfTwoSides(ReadOut):
    """Base of divergences: each side has statistics of its own, and the gradient is of a chunk's logits alone."""

    softmax = False
    needs_logits = True
    by_leaf = True
    by_factor = True


def side_statistics(logits: Sequence[Tensor], stats_Kt: Tensor, call: ResolvedHead) -> None:
    """Write the statistics of the student's logits of a chunk, and below them the teacher's."""
    for i, z_tV in enumerate(logits):
        nowhere = torch.full((z_tV.shape[0],), -1, device=z_tV.device)
        rows_Kt = stats_Kt[i * SIDE : (i + 1) * SIDE]
        options = call.vocab.counted, call.temperature
        passes_of(z_tV).row_statistics(z_tV, nowhere, rows_Kt, counted=options[0], temperature=options[1])


def normaliser(stats_RKT: Tensor, side: int, call: ResolvedHead) -> tuple[Tensor, Tensor]:
    """Return of all shards together the largest logit (0 if all are -inf), and the log of the sum of exponentials below
    it; fp64 `[T]`."""
    peaks_RT, sums_RT = (stats_RKT[:, side * SIDE + row].double() for row in (MAX, SUM_EXP))
    largest_T = peaks_RT.amax(0)
    largest_T = largest_T.where(largest_T > -torch.inf, 0.0)
    below_RT = (peaks_RT - largest_T).where(peaks_RT > -torch.inf, 0.0)
    total_T = added(sums_RT * below_RT.exp().where(peaks_RT > -torch.inf, 0.0), call)
    return largest_T, total_T.masked_fill(total_T == 0, 1.0).log()

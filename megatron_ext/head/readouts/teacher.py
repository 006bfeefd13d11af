"""The two sides of a divergence: where a teacher's logits come from, its faults, and the statistics of both sides.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K rows of statistics, R ranks.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.distributed.groups import Group, VocabShard, group_size, tensor_parallel_group
from megatron_ext.head import checks
from megatron_ext.head.call.matmul import transformed
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import MAX, SUM_EXP, added
from megatron_ext.head.row_passes.passes import passes_of

SIDE = 3  # rows of each side, those of `row_statistics`


class Teacher(NamedTuple):
    """A teacher's lm head and its last hidden states.

    Attributes:
        head: its `LmHead`, of the student's group and vocabulary shards.
        hidden: `[..., D of the teacher]`, of the same tokens and in the same layout as the student's. Or `[..., D]` for
            a student of `[..., n, D]`: each row of the teacher then serves n of the student's tokens, as n drafts of
            one position have one target, and its product is made once.
    """

    head: Any
    hidden: Tensor


def side_statistics(logits: Sequence[Tensor], stats_Kt: Tensor, call: ResolvedHead) -> None:
    """Write the statistics of a chunk's logits: `SIDE` rows of the student, then `SIDE` rows of the teacher."""
    for i, z_tV in enumerate(logits):
        nowhere = torch.full((z_tV.shape[0],), -1, device=z_tV.device)
        rows_Kt, counted = stats_Kt[i * SIDE : (i + 1) * SIDE], call.vocab.counted
        passes_of(z_tV).row_statistics(z_tV, nowhere, rows_Kt, counted=counted, temperature=call.temperature)


def below(logits: Sequence[Tensor], peaks: Sequence[Tensor], at: slice, call: ResolvedHead) -> list[Tensor]:
    """Return for both sides the logits `at` of the columns that count, over the temperature, less the peak of each row;
    new tensors in the dtype of the peaks."""
    return [
        transformed(z_tV[at, : call.vocab.counted], None, None, call.temperature, peak_u.dtype) - peak_u.unsqueeze(1)
        for z_tV, peak_u in zip(logits, peaks, strict=True)
    ]


def normaliser(stats_RKT: Tensor, side: int, call: ResolvedHead) -> tuple[Tensor, Tensor]:
    """Return the largest logit of all shards (0 if all are -inf), and the log of the sum of exponentials relative to
    it; fp64 `[T]`."""
    peaks_RT, sums_RT = (stats_RKT[:, side * SIDE + row].double() for row in (MAX, SUM_EXP))
    largest_T = peaks_RT.amax(0)
    largest_T = largest_T.where(largest_T > -torch.inf, 0.0)
    below_RT = (peaks_RT - largest_T).where(peaks_RT > -torch.inf, 0.0)
    total_T = added(sums_RT * below_RT.exp().where(peaks_RT > -torch.inf, 0.0), call)
    return largest_T, total_T.masked_fill(total_T == 0, 1.0).log()


def teacher_fault(teacher: Any, hidden: Tensor, student: ResolvedHead) -> ValueError | None:
    """Return a fault of a teacher of hidden states that maybe this rank alone sees; raise a fault that every rank sees.
    The teacher's weight and bias are checked elsewhere."""
    if not isinstance(teacher, Teacher):
        raise ValueError(
            f"teacher is {type(teacher).__name__}: beside hidden states it must be a Teacher(LmHead(weight), hidden)"
        )
    its = teacher.head
    checks.check_teachers_temperature("teacher's head", its.temperature, student.temperature)
    checks.check_floating("teacher_hidden", teacher.hidden)
    _check_teachers_options(its, student)
    if its.vocab is not None and its.vocab != student.vocab:
        return ValueError(
            f"vocab is {student.vocab} and the teacher's head has {its.vocab}: a divergence is of one vocabulary, cut "
            f"alike; leave out the teacher's, or pass the student's"
        )
    tokens = (hidden.shape[:-1], hidden.shape[:-2])  # the second: a row of the teacher for n tokens of the student
    if teacher.hidden.shape[:-1] not in tokens or teacher.hidden.device != hidden.device:
        return ValueError(
            f"teacher_hidden has shape {tuple(teacher.hidden.shape)} on {teacher.hidden.device}, student_hidden "
            f"{tuple(hidden.shape)} on {hidden.device}: both must be hidden states of the same tokens, on one device; "
            f"or the student's [..., n, D] and the teacher's [..., D]"
        )
    return None


def _check_teachers_options(teacher: Any, student: ResolvedHead) -> None:
    """Raise ValueError for options of a teacher's head that would have no effect beside the student's."""
    layout, its_layout = "sequence" if student.in_slices else "replicated", teacher.hidden_layout
    alike = teacher.tp_group is None or _same_ranks(tensor_parallel_group(teacher.tp_group), student.group)
    for name, its, students, fits in (
        ("bits", teacher.bits, student.bits, teacher.bits in (None, student.bits)),
        ("hidden_layout", its_layout, layout, student.ranks == 1 or its_layout in ("replicated", layout)),
        ("tp_group", teacher.tp_group, student.group, alike),
    ):
        if not fits:
            raise ValueError(
                f"{name} is {students!r} and the teacher's head has {its!r}: both are read in one pass; leave out the "
                f"teacher's, or pass the student's"
            )


def _same_ranks(one: Group, other: Group) -> bool:
    if isinstance(one, ProcessGroup) and isinstance(other, ProcessGroup):
        return dist.get_process_group_ranks(one) == dist.get_process_group_ranks(other)
    return group_size(one) == group_size(other)


def teacher_logits_fault(teacher: Any, student: Any, vocab: VocabShard, ranks: int) -> ValueError | None:
    """Return a fault of a teacher's logits that maybe this rank alone sees; raise a fault that every rank sees."""
    if not isinstance(getattr(teacher, "logits", None), Tensor):
        raise ValueError(f"teacher is {type(teacher).__name__}: beside Logits it must be Logits of the same tokens")
    checks.check_teachers_temperature("teacher", teacher.temperature, student.temperature)
    theirs, logits = teacher.logits, student.logits
    if theirs.shape[:-1] != logits.shape[:-1] or theirs.device != logits.device:
        raise ValueError(
            f"teacher_logits have shape {tuple(theirs.shape)} on {theirs.device}, student_logits "
            f"{tuple(logits.shape)} on {logits.device}: both must be logits of the same tokens, on one device"
        )
    return checks.shard_fault(vocab, theirs.shape[-1], "teacher_logits", ranks)

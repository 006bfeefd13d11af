"""Jensen-Shannon divergence between a student's distribution and a teacher's; gradients reach the student.

With p of the student, q of the teacher, and m = (1 - b) p + b q, of each token

    (1 - b) KL(p | m) + b KL(q | m)                         dz = (1 - b) p ((log p - log m) - KL(p | m))

as TRL and Liger define the generalised divergence (Agarwal et al., 2023). The mixture wants normalised distributions,
so the ranks tell each other their shards' statistics before they can go on: chunk by chunk, as the logits come.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K statistics, R ranks.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head import distributions_of_hidden_states, distributions_of_logits
from megatron_ext.head.engine import agreement
from megatron_ext.head.engine.options import Layout
from megatron_ext.head.engine.statistics import REFUSED
from megatron_ext.head.readouts.readout import OWN, Logits, ReadOut
from megatron_ext.head.readouts.vocabulary_order import blocks
from megatron_ext.head.row_passes.logit_passes import MAX, SUM_EXP, accumulation_dtype, transformed
from megatron_ext.head.validation.argument_checks import REFUSAL, check_agreement
from megatron_ext.head.validation.readable_values import has_values, raise_if

_SIDES = 2 * OWN  # statistics of both sides, before the two sums


def js_divergence(
    student_logits: Tensor,
    teacher_logits: Tensor,
    beta: float = 0.5,
    tp_group: Group = None,
    vocab: VocabShard | None = None,
    chunk_tokens: int | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """Jensen-Shannon divergence `[...]` over the whole vocabulary, of logits `[..., V/R]`, both over the temperature.

    `beta` in (0, 1) is the teacher's share of the mixture. Near 0 it is `beta` times KL(teacher | student), near 1
    `1 - beta` times KL(student | teacher).

    Communicates, at R > 1: forward 1 small collective a chunk and 2 more, backward none.

    Raises:
        ValueError: as `kl_divergence`; `beta` outside (0, 1).
    """
    check_beta(beta)
    return distributions_of_logits.apart(
        lambda options: JensenShannon(options, beta),
        student_logits,
        teacher_logits,
        tp_group,
        vocab,
        chunk_tokens=chunk_tokens,
        temperature=temperature,
    )


def linear_js_divergence(
    student_hidden: Tensor,
    student_weight: Tensor,
    teacher_hidden: Tensor,
    teacher_weight: Tensor,
    beta: float = 0.5,
    tp_group: Group = None,
    hidden_layout: Layout = "replicated",
    vocab: VocabShard | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
    gradient_accumulation_fusion: bool = False,
) -> Tensor:
    """`js_divergence` from hidden states, else as `linear_kl_divergence`.

    Communicates, at R > 1: forward 1 small collective a chunk and 2 more, backward 1; with the sequence layout 1 more
    in each.
    """
    check_beta(beta)
    return distributions_of_hidden_states.linear_apart(
        lambda options: JensenShannon(options, beta),
        (student_hidden, student_weight),
        (teacher_hidden, teacher_weight),
        distributions_of_hidden_states.SharedArguments(
            tp_group, hidden_layout, vocab, temperature, chunk_tokens, gradient_accumulation_fusion
        ),
    )


def check_beta(beta: float) -> None:
    """Raises ValueError unless both distributions have a share of the mixture."""
    if isinstance(beta, bool) or not isinstance(beta, int | float) or not 0 < beta < 1:
        raise ValueError(
            f"beta is {beta!r}: it must be a number in (0, 1); kl_divergence has the limits, 'forward' of 0 and "
            f"'reverse' of 1"
        )


@dataclass(frozen=True)
class JensenShannon(ReadOut):
    """`[T]`: the divergence of the first logits from the second, of which the mixture has `beta`."""

    beta: float

    more = OWN + 2  # the teacher's own, and the sums of p (log p - log m) and q (log q - log m)
    in_step = True

    @property
    def width(self) -> int:
        """Of an equal shard: all ranks must cut the tokens alike."""
        return -(-self.options.vocab.size // self.options.ranks)

    def begin(self, tokens: int, device: torch.device) -> None:
        if self.options.ranks > 1 and tokens:
            sizes_R, options_R = self._tell(self.options.vocab.size, device, tokens).unbind(1)
            if has_values(sizes_R):
                raise_if((sizes_R == int(REFUSED)).any(), REFUSAL)
                raise_if(
                    (sizes_R != sizes_R[0]).any(),
                    "vocab: the ranks of tp_group must agree on the vocabulary's size; pass the same vocab.size on all",
                )
                more = self._shared(tokens, device)
                check_agreement(options_R, torch.zeros_like(options_R), self.options, **more)

    def refuse(self, like: Tensor, tokens: int) -> None:
        self._tell(int(REFUSED), like.device, tokens)

    def _tell(self, size: int, device: torch.device, tokens: int) -> Tensor:
        """Size of the vocabulary, as each rank has it, and what options it has: `[R, 2]`."""
        own = torch.full((1, 2), size, dtype=torch.int64, device=device)
        own[:, 1] = agreement.of_options(self.options, **self._shared(tokens, device)) if has_values(own) else 0
        return collectives.all_gather(own, self.options.group)

    def _shared(self, tokens: int, device: torch.device) -> dict[str, Any]:
        """What all ranks must pass alike, beside options: of each chunk numbers are exchanged."""
        return agreement.scalars(self) | {"chunks": len(self.chunks(tokens, device))}

    def scan(self, logits: Logits, rows: slice, stats_Kt: Tensor) -> None:
        for i, z_tV in enumerate(logits):
            self.own_statistics(z_tV, stats_Kt[i * OWN : (i + 1) * OWN])
        sides_RKt = stats_Kt[None, :_SIDES]
        if self.options.ranks > 1:
            sides_RKt = collectives.all_gather(sides_RKt, self.options.group)
        normalisers = _normalisers(sides_RKt)
        stats_Kt[_SIDES:] = 0
        for at in blocks(logits[0]) if self.options.vocab.counted else []:
            student, teacher, mixture = self._log_probs(logits, normalisers, at)
            for row, log_p in ((_SIDES, student), (_SIDES + 1, teacher)):
                p = log_p.exp()
                stats_Kt[row, at] = (p * (log_p - mixture)).where(p > 0, 0.0).sum(1)

    def combine(self, stats_RKT: Tensor, own_KT: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        sums_KT = stats_RKT[:, _SIDES:, :-1].double().sum(0)
        value_T = (1 - self.beta) * sums_KT[0] + self.beta * sums_KT[1]
        normalisers = _normalisers(stats_RKT[:, :_SIDES, :-1])
        return [value_T.to(own_KT.dtype)], [sums_KT[0], *normalisers]

    def pull(self, logits: Callable[[], Logits], rows: slice, saved: list[Tensor], grad: Tensor, out_tV: Tensor):
        wide, counted, both = accumulation_dtype(out_tV.dtype), self.options.vocab.counted, logits()
        out_tV[:, counted:] = 0
        apart_t, *normalisers = (x[rows] for x in saved)
        scale_t = (1 - self.beta) * grad[rows].double() / self.options.temperature
        counts_t1 = (scale_t != 0).unsqueeze(1)  # others may have NaN, which 0 times is NaN
        for at in blocks(out_tV) if counted else []:
            student, _, mixture = self._log_probs(both, normalisers, at)
            p = student.exp()
            pulled = p * (student - mixture - apart_t[at].to(wide).unsqueeze(1)) * scale_t[at].to(wide).unsqueeze(1)
            out_tV[at, :counted] = pulled.where((p > 0) & counts_t1[at], 0.0)

    def _log_probs(self, logits: Logits, normalisers: list[Tensor], at: slice) -> list[Tensor]:
        """Of the student, the teacher and the mixture."""
        counted = self.options.vocab.counted
        found = []
        for i, z_tV in enumerate(logits):
            wide = accumulation_dtype(z_tV.dtype)
            largest_t1, log_sum_t1 = (x[at].to(wide).unsqueeze(1) for x in normalisers[2 * i : 2 * i + 2])
            z = transformed(z_tV[at, :counted], None, None, self.options.temperature, wide)
            found.append((z - largest_t1) - log_sum_t1)
        student, teacher = found
        shares = math.log1p(-self.beta), math.log(self.beta)
        return [student, teacher, torch.logaddexp(student + shares[0], teacher + shares[1])]


def _normalisers(sides_RKT: Tensor) -> list[Tensor]:
    """fp64 `[T]`, of the student and then of the teacher: the largest logit, and the log of the sum below it."""
    found = []
    for i in (0, 1):
        peaks_RT, sums_RT = (sides_RKT[:, i * OWN + row].double() for row in (MAX, SUM_EXP))
        largest_T = peaks_RT.amax(0)
        largest_T = largest_T.where(largest_T > -torch.inf, 0.0)
        total_T = (sums_RT * (peaks_RT - largest_T).exp()).sum(0)
        found += [largest_T, total_T.masked_fill(total_T == 0, 1.0).log()]
    return found

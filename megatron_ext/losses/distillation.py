"""Losses of a student against a teacher, from hidden states: over the whole vocabulary, or over the teacher's top-k.

Legend: `[...]` leading dims of the tokens, D hidden size, V vocabulary, R ranks of `tp_group`, K ids per token.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_ext.head import KL, Entropy, Gather, JensenShannon, LmHead, Logits, ReadOut, Teacher, TopK
from megatron_ext.head.checks import Cache, check_teachers_temperature, one_of, rounds
from megatron_ext.head.layer_facts import with_options
from megatron_ext.head.readouts.normalised_divergences import check_beta
from megatron_ext.losses.checks import (
    check_number,
    check_per_token,
    check_tensor,
    count_fault,
    fault_unless,
    first_fault,
    per_token_fault,
)
from megatron_ext.losses.from_hidden import FromHidden, Metrics, token_shape, widened
from megatron_ext.losses.reductions import token_mean
from megatron_ext.numerics.tensors import has_values

DivergenceKind = Literal["forward", "reverse", "jsd"]
TopKDivergenceKind = Literal["forward", "reverse", "mixed", "jsd"]
# The log-probability of ids outside of the teacher's top-k, as in NeMo-RL.
LOG_OUTSIDE = -100.0
# Probabilities from 16-bit log-probabilities are each wrong by up to 3 %, and their logsumexp by less than 0.1.
_LOG_ROUNDED_SUM = 0.1


@dataclass(frozen=True, kw_only=True)
class DistillationLoss(FromHidden):
    """`loss, metrics = DistillationLoss(...)(hidden, weight, teacher_hidden, teacher_weight, mask=...)`.

    Attributes:
        divergence: "forward": KL(teacher | student); "reverse": KL(student | teacher); "jsd": the generalised
            Jensen-Shannon divergence, in whose mixture the teacher weighs `beta`. The temperature divides both logits.
        cache: what the head keeps for backward, only where one rank holds the whole vocabulary; see `LmHead`. None: the
            head's, or "bounded".
    """

    divergence: DivergenceKind = "forward"
    beta: float = 0.5
    cache: Cache | None = None

    def __post_init__(self) -> None:
        one_of("divergence", self.divergence, get_args(DivergenceKind))
        check_beta(self.beta)

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | LmHead,
        teacher_hidden: Tensor,
        teacher_weight: Tensor | LmHead,
        mask: Tensor | None = None,
        count: Tensor | float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the mean over the tokens that count, a scalar equal on all ranks, and no metrics.

        Args:
            hidden, weight, teacher_hidden, teacher_weight: `[..., D]` and `[V/R, D]` of each; a weight may be an
                `LmHead`; see `megatron_ext.head.linear_kl_divergence`. Only the student gets gradients.
            mask: `[...]`, which tokens count, or their weights; None: all. In the sequence layout it covers the tokens
                of all ranks. With `skip_ignored` the products of both heads leave out tokens that do not count.
            count: the divisor of the sum, the tokens of all micro-batches and ranks; None: those of this call.

        Communicates: see `linear_kl_divergence` and `linear_js_divergence`.
        """
        head = self._head(weight, cache=self.cache)
        teacher, shape = Teacher(_teacher_head(head, teacher_weight), teacher_hidden), token_shape(hidden, head)
        only = self._only(_that_count(mask, shape))
        found = head.read(hidden, self._divergence(teacher), fault=_mean_fault(shape, mask, count), **only)
        return _mean(found, mask, count)

    def _divergence(self, teacher: Any) -> ReadOut:
        return JensenShannon(teacher, self.beta) if self.divergence == "jsd" else KL(teacher, self.divergence)

    def from_logits(
        self,
        student_logits: Tensor,
        teacher_logits: Tensor,
        mask: Tensor | None = None,
        count: Tensor | float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Compute the loss from logits, or log-probabilities, `[..., V/R]` of student and teacher.

        Options of the products that make logits have no effect here, except `bits` and `logit_dtype`: these promise
        bits of the loss, and raise ValueError.
        """
        if self.bits not in (None, "fast") or rounds(self.logit_dtype):
            raise ValueError(
                f"bits is {self.bits!r} and logit_dtype {self.logit_dtype}: from_logits is for logits that exist, and "
                f"gives neither; leave both out, or call the loss with hidden states and weights"
            )
        options: dict[str, Any] = {"vocab": self.vocab, "chunk_tokens": self.chunk_tokens}
        temperature = 1.0 if self.temperature is None else self.temperature
        student = Logits(student_logits, self.tp_group, temperature=temperature, name="student_logits", **options)
        teacher = Logits(teacher_logits, self.tp_group, vocab=self.vocab, name="teacher_logits")
        fault = _mean_fault(student_logits.shape[:-1], mask, count)
        return _mean(student.read(self._divergence(teacher), fault=fault), mask, count)


@dataclass(frozen=True, kw_only=True)
class TopKDistillationLoss(FromHidden):
    """`loss, metrics = TopKDistillationLoss(...)(hidden, weight, teacher_topk_logits, teacher_topk_indices, ...)`.

    Attributes:
        divergence: as in `DistillationLoss`, or "mixed": `mixed_kl_weight` of the forward KL, the rest of the reverse.
        zero_outside_topk: True: the student's probabilities are those of its whole vocabulary, and the teacher's are 0
            outside of the K (`exp(-100)` in the reverse KL); False: both are distributions over the K, in which an id
            that comes twice is two outcomes.
        bucket: True: all other ids together are one more outcome, with the rest of each side's probability. The teacher
            must then give log-probabilities of its whole vocabulary, at this temperature; logits have no rest.
    """

    divergence: TopKDivergenceKind = "forward"
    mixed_kl_weight: float = 0.5
    beta: float = 0.5
    zero_outside_topk: bool = False
    bucket: bool = False

    def __post_init__(self) -> None:
        if self.bucket and self.zero_outside_topk:
            raise ValueError(
                "bucket and zero_outside_topk are both True: the teacher's probability outside of the K is the rest, "
                "or 0; set one of them"
            )
        one_of("divergence", self.divergence, get_args(TopKDivergenceKind))
        check_number("mixed_kl_weight", self.mixed_kl_weight, "in [0, 1]", lambda x: 0 <= x <= 1)
        check_beta(self.beta)

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | LmHead,
        teacher_topk_logits: Tensor,
        teacher_topk_indices: Tensor,
        mask: Tensor | None = None,
        count: Tensor | float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the mean over the tokens that count, a scalar equal on all ranks, and no metrics.

        Args:
            hidden, weight: of the student's head; see `megatron_ext.head.linear_gather_log_probs`.
            teacher_topk_logits, teacher_topk_indices: `[..., K]`, logits (or log-probabilities), which the temperature
                divides like the student's (with `bucket` log-probabilities, taken as they are), and token ids, both of
                all tokens on every rank. Any ids will do, the student's likeliest too. With `zero_outside_topk` or
                `bucket` a token that counts must not have an id twice.
            mask, count: as for `DistillationLoss`.

        Communicates: forward 1 collective, backward 1; with the sequence layout 2 and 2. If both sides are
        distributions over the K, products compute only the columns that some token's ids name; see `Gather`.
        """
        head = self._head(weight)
        fault = _top_k_fault(teacher_topk_logits, teacher_topk_indices, mask, count)
        fault = fault or self.ids_fault(teacher_topk_indices, mask) or self._rest_fault(teacher_topk_logits, mask)
        whole = self.zero_outside_topk or self.bucket
        readouts = [Gather(teacher_topk_indices, normalised=whole), *([Entropy()] if self.needs_entropy else [])]
        only = self._only(_that_count(mask, teacher_topk_indices.shape[:-1]))
        found = head.read(hidden, *readouts, fault=fault, **only)
        student, entropy = found if self.needs_entropy else (found, None)
        if not whole:
            student = (student / head.temperature).log_softmax(-1)
        teacher = _where_counted(teacher_topk_logits.to(student.dtype), mask)
        if not self.bucket:
            teacher = (teacher / head.temperature).log_softmax(-1)
        return self.from_log_probs(student, teacher, entropy, mask, count)

    def with_teacher(
        self,
        hidden: Tensor,
        weight: Tensor | LmHead,
        teacher_hidden: Tensor,
        teacher_weight: Tensor | LmHead,
        k: int,
        ids_of: Literal["teacher", "student"] = "teacher",
        mask: Tensor | None = None,
        count: Tensor | float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Compute the loss from the teacher's hidden states, `[..., D of the teacher]`, and its weight or head.

        Args:
            k: the number of ids of each token.
            ids_of: the model whose likeliest ids these are.

        The teacher is read without a gradient, by one product. Communicates: as `__call__`, and forward once more for
        the teacher and, with `ids_of="student"`, for the student.
        """
        one_of("ids_of", ids_of, ("teacher", "student"))
        head = self._head(weight)
        teacher = replace(_teacher_head(head, teacher_weight), temperature=head.temperature if self.bucket else 1.0)
        only = self._only(_that_count(mask, token_shape(hidden, head)))
        with torch.no_grad():
            if ids_of == "teacher":
                values, ids = teacher.read(teacher_hidden, TopK(k, self.bucket), **only)
            else:
                ids = head.read(hidden, TopK(k, normalised=False), **only)[1]
                values = teacher.read(teacher_hidden, Gather(ids, self.bucket), **only)
        return self(hidden, head, values, ids, mask, count)

    def ids_fault(self, ids: Tensor, mask: Tensor | None = None) -> ValueError | None:
        """Return the fault of a token that counts and has one of `ids` `[..., K]` twice, if the probability outside of
        the K matters: the id's would be subtracted twice. On CUDA a device-side assertion."""
        if not (self.zero_outside_topk or self.bucket) or not ids.dim() or not has_values(ids):
            return None
        option = "bucket" if self.bucket else "zero_outside_topk"
        return fault_unless(
            _of_no_token((ids.sort(-1).values.diff(dim=-1) == 0).any(-1), mask),
            f"teacher_topk_indices has an id twice for a token that counts: with {option}=True each must be there "
            f"once, since the probability outside of the K is computed from them; pass ids without repetition",
        )

    def _rest_fault(self, log_probs: Tensor, mask: Tensor | None) -> ValueError | None:
        """Return the fault of a token that counts and whose `log_probs` `[..., K]` leave no rest for the bucket, as a
        teacher's logits do not. On CUDA a device-side assertion."""
        if not self.bucket or not has_values(log_probs):
            return None
        return fault_unless(
            _of_no_token(log_probs.logsumexp(-1) > _LOG_ROUNDED_SUM, mask),
            "teacher_topk_logits has a token that counts whose exponentials add up to more than 1: with bucket=True "
            "they must be log-probabilities of the teacher's whole vocabulary; pass log_softmax of the teacher's "
            "logits, divided by the temperature, at the K ids, or bucket=False",
        )

    @property
    def needs_entropy(self) -> bool:
        """Return whether `from_log_probs` needs the student's entropy."""
        return self.zero_outside_topk and self.divergence in ("reverse", "mixed")

    def from_log_probs(
        self,
        student: Tensor,
        teacher: Tensor,
        entropy: Tensor | None = None,
        mask: Tensor | None = None,
        count: Tensor | float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Compute the loss from log-probabilities `[..., K]` of the K tokens, normalised as the class says.

        Args:
            student: -inf is the log-probability of an id that the student rules out. The forward and the mixed
                divergence are infinite where the teacher does not rule this id out.
            teacher: -inf stands for `exp(-100)`.
            entropy: `[...]`, of the student's distribution over its vocabulary; see `needs_entropy`.
        """
        if self.needs_entropy and entropy is None:
            raise ValueError("entropy is None: zero_outside_topk with a reverse KL needs the student's; pass it")
        check_per_token(student.shape[:-1], mask=mask)
        student, teacher = (_where_counted(widened(x), mask) for x in (student, teacher))
        # An id that the teacher rules out would make 0 times infinity, which is NaN.
        ruled_out = teacher == -torch.inf
        teacher = teacher.where(~ruled_out, LOG_OUTSIDE)
        student = student.where(~ruled_out | (student != -torch.inf), LOG_OUTSIDE)
        if self.bucket:
            student, teacher = (torch.cat([x, _log_rest(x)], -1) for x in (student, teacher))
        return _mean(self._divergence(student, teacher, entropy), mask, count)

    def _divergence(self, student: Tensor, teacher: Tensor, entropy: Tensor | None) -> Tensor:
        q = student.exp()
        own_logs = student.where(student != -torch.inf, LOG_OUTSIDE)  # times q they are 0, and not NaN
        if self.divergence == "jsd":
            own, other = 1 - self.beta, self.beta
            mixture = torch.logaddexp(student + math.log(own), teacher + math.log(other))
            inside = own * q * (own_logs - mixture) + other * teacher.exp() * (teacher - mixture)
            outside = -own * math.log(own) * (1 - q.sum(-1)) if self.zero_outside_topk else 0.0
            return inside.sum(-1) + outside
        forward = (teacher.exp() * (teacher - student)).sum(-1)
        if self.divergence == "forward":
            return forward
        reverse = (q * (own_logs - teacher)).sum(-1)
        if self.needs_entropy:
            assert entropy is not None
            reverse = reverse - entropy - (q * own_logs).sum(-1) - LOG_OUTSIDE * (1 - q.sum(-1))
        if self.divergence == "reverse":
            return reverse
        return self.mixed_kl_weight * forward + (1 - self.mixed_kl_weight) * reverse


def _of_no_token(wrong: Tensor, mask: Tensor | None) -> Tensor:
    """Return whether no token that counts is `wrong`, a bool `[...]`."""
    return ~(wrong if mask is None else wrong & (mask > 0)).any()


def _log_rest(log_probs: Tensor) -> Tensor:
    """Return `[..., 1]`, the log of the probability that `[..., K]` leave, at least `LOG_OUTSIDE`."""
    inside = log_probs.logsumexp(-1, keepdim=True)
    some = inside < -torch.finfo(inside.dtype).eps  # else rounding has left nothing, or less
    rest = -torch.expm1(inside.where(some, -1.0))
    return rest.log().clamp(min=LOG_OUTSIDE).where(some, LOG_OUTSIDE)


def _teacher_head(student: LmHead, weight: Tensor | LmHead) -> LmHead:
    """Make the teacher's head with the student's ranks, layout, vocabulary and bits; for a weight `logit_dtype` too.

    Raises:
        ValueError: an `LmHead` has other ones, or a temperature of its own: the student's divides both logits.
    """
    shared: dict[str, Any] = {name: getattr(student, name) for name in ("tp_group", "hidden_layout", "vocab", "bits")}
    if not isinstance(weight, LmHead):
        return LmHead(weight, **shared, logit_dtype=student.logit_dtype)
    check_teachers_temperature("teacher_weight", weight.temperature, student.temperature)
    return with_options(weight, shared, "the student", "the teacher's LmHead")


def _mean(found: Tensor, mask: Tensor | None, count: Tensor | float | None) -> tuple[Tensor, Metrics]:
    """Average one number for each token over the tokens that count."""
    return token_mean(found, torch.ones_like(found) if mask is None else mask.to(found.dtype), count), {}


def _mean_fault(shape: torch.Size, mask: Tensor | None, count: Tensor | float | None) -> ValueError | None:
    return first_fault(per_token_fault(shape, mask=mask), count_fault("count", count))


def _top_k_fault(
    logits: Tensor, indices: Tensor, mask: Tensor | None, count: Tensor | float | None
) -> ValueError | None:
    for name, x in (("teacher_topk_logits", logits), ("teacher_topk_indices", indices)):
        check_tensor(name, x, "a tensor [..., K]")
    fault = None
    if logits.shape != indices.shape:
        fault = ValueError(
            f"teacher_topk_logits has shape {tuple(logits.shape)}, teacher_topk_indices {tuple(indices.shape)}: both "
            f"must be [..., K], a value for each id"
        )
    return first_fault(fault, _mean_fault(indices.shape[:-1], mask, count))


def _that_count(mask: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Return a bool, which tokens count; None: all, or the mask has another shape, which is a fault told elsewhere."""
    return mask > 0 if isinstance(mask, Tensor) and mask.shape == shape else None


def _where_counted(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return `x` `[..., K]` with 0 at tokens that do not count: a NaN there, times 0, would be NaN in the gradient."""
    return x if mask is None else x.where(mask.unsqueeze(-1) > 0, 0.0)

"""Losses under NeMo-RL's names and options, on the formulas of `megatron_ext.losses`: NLL, DPO, distillation.

Legend: B rows, S positions, P pairs, K ids per token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from torch import Tensor

from megatron_ext.head.checks import one_of
from megatron_ext.losses import DPOLoss, TopKDistillationLoss
from megatron_ext.losses.checks import check_numbers, raise_if_any
from megatron_ext.losses.preference import split_pairs
from megatron_ext.losses.reductions import divide, row_means, row_sums, token_mean
from megatron_ext.policy.config import check_flag
from megatron_ext.policy.losses.worker_protocol import (
    LossInputType,
    LossType,
    MetricNormalizer,
    token_weights,
)

_COUNTS = dict.fromkeys(("num_valid_samples", "num_unmasked_tokens"), MetricNormalizer.NONE)


@dataclass(frozen=True)
class NLLLoss:
    """Mean negative log-likelihood of the tokens that count: pretraining and SFT."""

    loss_type: ClassVar[LossType] = LossType.TOKEN_LEVEL
    needs: ClassVar[tuple[str, ...]] = ("input_ids", "token_mask", "sample_mask")
    metric_normalizations: ClassVar[dict[str, MetricNormalizer]] = _COUNTS

    def __call__(self, log_probs_BS, data, global_valid_seqs, global_valid_toks):
        mask_BS = token_weights(data)
        loss = token_mean(-log_probs_BS, mask_BS, global_valid_toks)
        return loss, {
            "loss": loss.detach(),
            "num_unmasked_tokens": mask_BS.sum(),
            "num_valid_samples": data["sample_mask"].sum(),
        }


@dataclass(frozen=True)
class DPOLossFn:
    """`megatron_ext.losses.DPOLoss` of pairs, each chosen row before its rejected one, with NeMo-RL's options.

    `sft_loss_weight` weighs the chosen row's negative log-likelihood, which is added as in NeMo-RL: the row's sum or
    mean, averaged over pairs.

    Attributes:
        reference_policy_kl_penalty: `beta` of `DPOLoss`; the rewards among the metrics are not multiplied by it.
        preference_average_log_probs, sft_average_log_probs: means over a row's tokens instead of sums.
        data key: `reference_policy_logprobs` `[B, S]`, of each token in its own place, as the worker's
            `get_reference_policy_logprobs` gives them. A pair counts where both rows' `sample_mask` is 1, and
            `global_valid_seqs` is the number of rows in such pairs; "num_valid_samples" is the number of pairs.
    """

    reference_policy_kl_penalty: float = 0.1
    preference_loss_weight: float = 1.0
    sft_loss_weight: float = 0.0
    preference_average_log_probs: bool = False
    sft_average_log_probs: bool = False

    loss_type: ClassVar[LossType] = LossType.SEQUENCE_LEVEL
    needs: ClassVar[tuple[str, ...]] = ("input_ids", "token_mask", "sample_mask", "reference_policy_logprobs")
    unit: ClassVar[int] = 2
    metric_normalizations: ClassVar[dict[str, MetricNormalizer]] = _COUNTS

    def __post_init__(self) -> None:
        check_numbers(self, "above 0", "reference_policy_kl_penalty")
        check_numbers(self, "at least 0", "preference_loss_weight", "sft_loss_weight")
        for name in ("preference_average_log_probs", "sft_average_log_probs"):
            check_flag(name, getattr(self, name))

    @property
    def _formula(self) -> DPOLoss:
        beta, average = self.reference_policy_kl_penalty, self.preference_average_log_probs
        return DPOLoss(pairs="interleaved", beta=beta, average_log_prob=average)

    def __call__(self, log_probs_BS, data, global_valid_seqs, global_valid_toks):
        mask_BS = token_weights(data)
        likely_B = (row_means if self.sft_average_log_probs else row_sums)(log_probs_BS, mask_BS)
        apart_B, losses_P = self._formula.of_each_pair(log_probs_BS - data["reference_policy_logprobs"], mask_BS)
        chosen_P, rejected_P = split_pairs(apart_B, "interleaved")
        counts_P = data["sample_mask"][0::2] * data["sample_mask"][1::2]

        def mean(x_P: Tensor) -> Tensor:
            return divide((x_P * counts_P).sum(), global_valid_seqs / 2)

        preference = mean(losses_P)
        sft = -mean(likely_B[0::2])
        loss = self.preference_loss_weight * preference + self.sft_loss_weight * sft
        return loss, {
            "loss": loss.detach(),
            "preference_loss": preference.detach(),
            "sft_loss": sft.detach(),
            "accuracy": mean((chosen_P > rejected_P).to(chosen_P.dtype)),
            "rewards_chosen_mean": mean(chosen_P.detach()),
            "rewards_rejected_mean": mean(rejected_P.detach()),
            "num_valid_samples": counts_P.sum(),
        }


@dataclass(frozen=True)
class DistillationLossFn:
    """KL divergence from a teacher's K likeliest tokens of each position, averaged over tokens.

    Attributes:
        kl_type: "forward": KL(teacher | student); "reverse": KL(student | teacher); "mixed": `mixed_kl_weight` times
            the forward one plus `1 - mixed_kl_weight` times the reverse one.
        zero_outside_topk: True: the student's probabilities are those of its whole vocabulary, and no counting token
            may have an id twice; False: they are normalised over the K ids.
        data keys: `teacher_topk_logits`, `teacher_topk_indices` `[B, S, K]`: the teacher's prediction at each
            position, as `get_topk_logits` returns it.
    """

    kl_type: Literal["forward", "reverse", "mixed"] = "mixed"
    mixed_kl_weight: float = 0.5
    zero_outside_topk: bool = False

    loss_type: ClassVar[LossType] = LossType.TOKEN_LEVEL
    input_type: ClassVar[LossInputType] = LossInputType.DISTILLATION
    needs: ClassVar[tuple[str, ...]] = (
        "input_ids",
        "token_mask",
        "sample_mask",
        "teacher_topk_logits",
        "teacher_topk_indices",
    )
    metric_normalizations: ClassVar[dict[str, MetricNormalizer]] = _COUNTS

    def __post_init__(self) -> None:
        one_of("kl_type", self.kl_type, get_args(Literal["forward", "reverse", "mixed"]))
        check_flag("zero_outside_topk", self.zero_outside_topk)
        _ = self._formula  # checks the weight

    @property
    def _formula(self) -> TopKDistillationLoss:
        return TopKDistillationLoss(
            divergence=self.kl_type, mixed_kl_weight=self.mixed_kl_weight, zero_outside_topk=self.zero_outside_topk
        )

    def __call__(
        self,
        student_topk_logprobs: Tensor,
        teacher_topk_logprobs: Tensor,
        H_all: Tensor | None,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute the loss of log-probabilities `[B, S - 1, K]`, with the student's sums of p log p `[B, S - 1]`."""
        entropy = None if H_all is None else -H_all
        mask_BS = token_weights(data)[:, 1:]
        if (ids_BSK := data.get("teacher_topk_indices")) is not None:
            raise_if_any(self._formula.ids_fault(ids_BSK[:, :-1], mask_BS))
        loss, _ = self._formula.from_log_probs(
            student_topk_logprobs, teacher_topk_logprobs, entropy, mask_BS, global_valid_toks
        )
        return loss, {"loss": loss.detach(), "num_valid_samples": data["sample_mask"].sum()}

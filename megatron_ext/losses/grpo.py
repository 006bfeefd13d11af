"""Group-relative policy optimisation (GRPO; Shao et al., 2024) and its variants, from hidden states.

The fields have the names and meanings of TRL's `GRPOConfig`, https://huggingface.co/docs/trl/grpo_trainer.

Legend: B rows, S positions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from megatron_ext.head.checks import one_of
from megatron_ext.losses import policy_gradient as pg
from megatron_ext.losses.checks import check_numbers, first_fault, shape_fault
from megatron_ext.losses.from_hidden import LogProbLoss, Metrics
from megatron_ext.losses.reductions import counted, divide, row_means, token_mean

LossType = Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo"]
SamplingCorrection = Literal[
    "token", "token_truncate", "token_mask", "sequence", "sequence_truncate", "sequence_mask", "sequence_mean_mask"
]
_CORRECTIONS: dict[str, tuple[pg.Level, pg.Truncation | None]] = {
    "token": ("token", None),
    "token_truncate": ("token", "truncate"),
    "token_mask": ("token", "mask"),
    "sequence": ("sequence", None),
    "sequence_truncate": ("sequence", "truncate"),
    "sequence_mask": ("sequence", "mask"),
    "sequence_mean_mask": ("token", "mean mask"),
}
_OPTIONAL = ("epsilon_high", "delta", "kl_input_clamp", "kl_output_clamp", "sampling_ratio_min", "sampling_ratio_max")


@dataclass(frozen=True, kw_only=True)
class GRPOLoss(LogProbLoss):
    """`loss, metrics = GRPOLoss(...)(hidden, weight, labels, advantages, mask=..., old_log_probs=..., ...)`.

    Attributes:
        loss_type: the mean that the loss is.
            "dapo": over all tokens (Yu et al., 2025); "bnpo" the same;
            "grpo": over rows, each the mean of its tokens;
            "dr_grpo": the sum over tokens, divided by rows times `max_completion_length` (Liu et al., 2025);
            "cispo": over all tokens, of clipped weights, `min(r, epsilon_high)`, times log-probabilities;
            "sapo": as "grpo", with a soft gate in place of clipping.
        epsilon, epsilon_high: ratios are clipped to `1 - epsilon` and `1 + epsilon_high`; None: `epsilon`.
        delta: upper bound of the ratio that is not clipped; None: not bounded.
        importance_sampling_level: "sequence": one ratio for a row, the geometric mean (GSPO).
        beta: factor of the KL divergence from the reference policy, estimated by `kl_estimator` with its clamps (see
            `policy_gradient.kl_estimate`); `use_bias_correction_kl` multiplies the estimate by the ratio.
        sampling_correction: how tokens are weighed if `sampling_log_probs` are given (see
            `policy_gradient.sampling_weights`), with `sampling_ratio_min` and `sampling_ratio_max`.
    """

    loss_type: LossType = "dapo"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    importance_sampling_level: pg.Level = "token"
    beta: float = 0.0
    kl_estimator: pg.KLEstimator = "k3"
    kl_input_clamp: float | None = None
    kl_output_clamp: float | None = None
    use_bias_correction_kl: bool = False
    sapo_temperature_pos: float = 1.0
    sapo_temperature_neg: float = 1.05
    max_completion_length: int | None = None
    sampling_correction: SamplingCorrection = "token_truncate"
    sampling_ratio_min: float | None = None
    sampling_ratio_max: float | None = 3.0

    def __post_init__(self) -> None:
        if self.loss_type == "gspo":
            raise ValueError(
                "loss_type is 'gspo': GSPO is a level of the ratio; pass importance_sampling_level='sequence' with "
                "loss_type='grpo'"
            )
        one_of("loss_type", self.loss_type, get_args(LossType))
        one_of("importance_sampling_level", self.importance_sampling_level, get_args(pg.Level))
        one_of("kl_estimator", self.kl_estimator, get_args(pg.KLEstimator))
        one_of("sampling_correction", self.sampling_correction, get_args(SamplingCorrection))
        check_numbers(self, "at least 0", "epsilon", "beta")
        check_numbers(self, "above 0", "sapo_temperature_pos", "sapo_temperature_neg")
        check_numbers(self, "at least 0", *_OPTIONAL, optional=True)
        low, high = self.sampling_ratio_min, self.sampling_ratio_max
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"sampling_ratio_min is {low} and sampling_ratio_max {high}: the lower bound must not be above; "
                f"exchange them"
            )
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ValueError(
                "epsilon_high is None with loss_type 'cispo', which weighs a token by min(ratio, epsilon_high): pass "
                "the largest weight, as 5.0"
            )
        for name in {"cispo": ("delta",), "sapo": ("delta", "epsilon_high")}.get(self.loss_type, ()):
            if (value := getattr(self, name)) is not None:
                raise ValueError(
                    f"{name} is {value} with loss_type {self.loss_type!r}, which has no use for it; pass None"
                )
        if self.loss_type in ("cispo", "sapo") and self.importance_sampling_level == "sequence":
            raise ValueError(
                f"importance_sampling_level is 'sequence' with loss_type {self.loss_type!r}, which weighs tokens; "
                f"use 'token'"
            )
        length = self.max_completion_length
        counts = isinstance(length, Integral) and not isinstance(length, bool) and length > 0
        if self.loss_type == "dr_grpo" and not counts:
            raise ValueError(
                f"max_completion_length is {length!r}: loss_type 'dr_grpo' divides by it; pass the most tokens that a "
                f"row may have, an int above 0"
            )

    def from_log_probs(
        self,
        log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor | None = None,
        old_log_probs: Tensor | None = None,
        reference_log_probs: Tensor | None = None,
        sampling_log_probs: Tensor | None = None,
        count: Tensor | float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Compute the loss, and metrics: means over the tokens that count.

        Args:
            log_probs: of the labels, `[B, S]` (all per token `[S, B]` with `sequence_first`).
            advantages: `[B]`, or one for each token.
            mask: which tokens count, or their weights; None: all.
            old_log_probs: of the policy that the samples are from; None: this one, with ratio 1. These and the next two
                get no gradient.
            reference_log_probs: needed if `beta` is not 0.
            sampling_log_probs: those of the generator, if they differ from `old_log_probs`.
            count: the divisor of the sum, the tokens or rows of all micro-batches and ranks; None: those of this call.
        """
        self._check(
            log_probs.shape,
            advantages=advantages,
            mask=mask,
            old_log_probs=old_log_probs,
            reference_log_probs=reference_log_probs,
            sampling_log_probs=sampling_log_probs,
            count=count,
        )
        old = log_probs if old_log_probs is None else old_log_probs
        (log_probs_BS, mask_BS), old_BS = self._inputs(log_probs, mask), self._rows(old.detach())
        advantages_BS = advantages.unsqueeze(1) if advantages.dim() == 1 else counted(self._rows(advantages), mask_BS)
        ratio = pg.probability_ratio(log_probs_BS, old_BS, mask_BS, self.importance_sampling_level)
        loss_BS = self._token_loss(counted(log_probs_BS, mask_BS), ratio, advantages_BS)
        metrics = self._clipping(ratio.detach(), advantages_BS, mask_BS)
        if sampling_log_probs is not None:
            level, truncation = _CORRECTIONS[self.sampling_correction]
            bounds = (self.sampling_ratio_min, self.sampling_ratio_max)
            weights, outside = pg.sampling_weights(
                old_BS, self._rows(sampling_log_probs), mask_BS, level, truncation, *bounds
            )
            loss_BS = loss_BS * weights
            metrics["sampling_ratio"] = token_mean(weights.expand_as(mask_BS), mask_BS)
            metrics["sampling_outside"] = token_mean(outside.expand_as(mask_BS).to(mask_BS.dtype), mask_BS)
        if reference_log_probs is not None and self.beta:
            apart_BS = counted(self._rows(reference_log_probs.detach()) - log_probs_BS, mask_BS)
            kl_BS = pg.kl_estimate(apart_BS, self.kl_estimator, self.kl_input_clamp, self.kl_output_clamp)
            kl_BS = kl_BS * ratio if self.use_bias_correction_kl else kl_BS
            loss_BS = loss_BS + self.beta * kl_BS
            metrics["kl"] = token_mean(kl_BS.detach(), mask_BS)
        return self._reduced(loss_BS, mask_BS, count), metrics

    def _token_loss(self, log_probs_BS: Tensor, ratio: Tensor, advantages_BS: Tensor) -> Tensor:
        low, high = self._bounds
        if self.loss_type == "cispo":
            return pg.clipped_weight_loss(log_probs_BS, ratio.clamp(max=high), advantages_BS)
        if self.loss_type == "sapo":
            temperatures = self.sapo_temperature_pos, self.sapo_temperature_neg
            return pg.soft_gated_surrogate(ratio, advantages_BS, *temperatures)
        return pg.clipped_surrogate(ratio, advantages_BS, low, high, self.delta)

    def _clipping(self, ratio: Tensor, advantages_BS: Tensor, mask_BS: Tensor) -> Metrics:
        """Return the mean ratio, and the share of tokens at which it was clipped."""
        low, high = self._bounds
        clipped = ((ratio < low) & (advantages_BS < 0)) | ((ratio > high) & (advantages_BS > 0))
        if self.loss_type == "sapo":
            clipped = torch.zeros_like(clipped)
        means = {"ratio": ratio, "clip_ratio": clipped.to(mask_BS.dtype)}
        return {name: token_mean(x.expand_as(mask_BS), mask_BS) for name, x in means.items()}

    @property
    def _bounds(self) -> tuple[float, float]:
        high = self.epsilon if self.epsilon_high is None else self.epsilon_high
        return (-torch.inf, high) if self.loss_type == "cispo" else (1 - self.epsilon, 1 + high)

    def _reduced(self, loss_BS: Tensor, mask_BS: Tensor, count: Tensor | float | None) -> Tensor:
        if self.loss_type in ("grpo", "sapo"):
            loss_BS = loss_BS.expand_as(mask_BS)
            return divide(row_means(loss_BS, mask_BS).sum(), mask_BS.shape[0] if count is None else count)
        if self.loss_type == "dr_grpo":
            assert self.max_completion_length is not None
            count = (mask_BS.shape[0] if count is None else count) * self.max_completion_length
        return token_mean(loss_BS.expand_as(mask_BS), mask_BS, count)

    def _fault(self, shape: torch.Size, given: Mapping[str, Any]) -> ValueError | None:
        fault = super()._fault(shape, given)
        if self.beta and given.get("reference_log_probs") is None:
            raise ValueError(f"beta is {self.beta} without reference_log_probs: pass those of the reference policy")
        rows = self._row_count(shape)
        rule = f"a tensor with a number for each of {rows} rows, or for each label, {tuple(shape)}"
        return first_fault(shape_fault("advantages", given["advantages"], [(rows,), shape], rule), fault)

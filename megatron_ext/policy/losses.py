"""Losses of a policy from the log-probabilities of its tokens.

A loss is called with log-probabilities and a micro-batch, and gives this micro-batch's part of the loss of the global
batch: it divides by the counts of the global batch, so that parts add up over micro-batches and data-parallel ranks to
the same loss, whatever the cut; so do the metrics.

Legend: B rows, S positions. `x_BS[:, t]` belongs to token t; t = 0, which nothing predicts, never counts.
`token_mask` `[B, S]` says which tokens count, `sample_mask` `[B]` which rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class LossType(Enum):
    """What a loss is a mean over: the tokens of the global batch, or its rows (each the mean of its tokens)."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossFunction(Protocol):
    """What `train` takes. Beside the call it may have `loss_type`, `needs` (keys of the data) and `unit` (rows that
    must come together, 1 if absent; they count where all of them do)."""

    def __call__(
        self, log_probs_BS: Tensor, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        """The scalar loss, and metrics: numbers or 0-d tensors."""


@dataclass(frozen=True)
class NLLLoss:
    """Mean negative log-likelihood of the tokens that count: pretraining and SFT."""

    loss_type: ClassVar[LossType] = LossType.TOKEN_LEVEL
    needs: ClassVar[tuple[str, ...]] = ("input_ids", "token_mask", "sample_mask")

    def __call__(self, log_probs_BS, data, global_valid_seqs, global_valid_toks):
        mask_BS = _mask(data)
        loss = _divide((-log_probs_BS * mask_BS).sum(), global_valid_toks)
        return loss, {"loss": loss.detach(), "num_valid_samples": data["sample_mask"].sum()}


@dataclass(frozen=True)
class ClippedPGLoss:
    """Clipped policy gradient (PPO; Schulman et al., 2017), with GRPO's KL penalty (Shao et al., 2024).

    A token's loss is `-min(r A, clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max) A) + reference_policy_kl_penalty * k3`,
    with `r = exp(log_prob - prev_logprob)`, A its advantage, and k3 Schulman's estimate of the KL divergence from the
    reference policy, `exp(d) - d - 1` with `d = reference - log_prob`.

    Attributes:
        ratio_clip_c: dual clipping: where A < 0 the first term is at most `-ratio_clip_c * A`; None: not bounded.
        token_level_loss: a mean over tokens, else over rows of the mean over a row's tokens.
        use_importance_sampling_correction: weights tokens by `exp(prev_logprobs - generation_logprobs)`, for samples
            of a generator whose numbers differ.
        data keys: `advantages` and `prev_logprobs`, with a KL penalty `reference_policy_logprobs`, with the correction
            `generation_logprobs`, all `[B, S]`.
    """

    reference_policy_kl_penalty: float = 0.0
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    token_level_loss: bool = True
    use_importance_sampling_correction: bool = False

    def __post_init__(self) -> None:
        for name in ("reference_policy_kl_penalty", "ratio_clip_min", "ratio_clip_max"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: it must not be negative")
        if self.ratio_clip_c is not None and self.ratio_clip_c <= 1:
            raise ValueError(f"ratio_clip_c is {self.ratio_clip_c}: it must be above 1, or None for no such bound")

    @property
    def loss_type(self) -> LossType:
        return LossType.TOKEN_LEVEL if self.token_level_loss else LossType.SEQUENCE_LEVEL

    @property
    def needs(self) -> tuple[str, ...]:
        keys = ["input_ids", "token_mask", "sample_mask", "advantages", "prev_logprobs"]
        keys += ["reference_policy_logprobs"] * bool(self.reference_policy_kl_penalty)
        keys += ["generation_logprobs"] * self.use_importance_sampling_correction
        return tuple(keys)

    def __call__(self, log_probs_BS, data, global_valid_seqs, global_valid_toks):
        mask_BS = _mask(data)
        advantages_BS = _counted(data["advantages"], mask_BS)

        def mean(x_BS: Tensor) -> Tensor:
            if self.token_level_loss:
                return _divide((x_BS * mask_BS).sum(), global_valid_toks)
            return _divide(_row_means(x_BS, mask_BS).sum(), global_valid_seqs)

        # Masked before the exponential: what stands at padding must not overflow into 0 * inf.
        change_BS = _counted(log_probs_BS - data["prev_logprobs"], mask_BS)
        ratio_BS = change_BS.exp()
        clipped_BS = ratio_BS.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)
        loss_BS = torch.maximum(-advantages_BS * ratio_BS, -advantages_BS * clipped_BS)
        if self.ratio_clip_c is not None:
            bounded_BS = torch.minimum(loss_BS, -advantages_BS * self.ratio_clip_c)
            loss_BS = bounded_BS.where(advantages_BS < 0, loss_BS)
        if self.use_importance_sampling_correction:
            drift_BS = _counted(data["prev_logprobs"] - data["generation_logprobs"], mask_BS)
            loss_BS = loss_BS * drift_BS.exp()
        loss, kl = mean(loss_BS), torch.zeros((), device=log_probs_BS.device)
        if self.reference_policy_kl_penalty:
            distance_BS = _counted(data["reference_policy_logprobs"] - log_probs_BS, mask_BS)
            kl = mean(distance_BS.exp() - distance_BS - 1)
            loss = loss + self.reference_policy_kl_penalty * kl
        was_clipped_BS = (ratio_BS < 1 - self.ratio_clip_min) | (ratio_BS > 1 + self.ratio_clip_max)
        return loss, {
            "loss": loss.detach(),
            "kl_penalty": self.reference_policy_kl_penalty * kl.detach(),
            "probs_ratio": mean(ratio_BS.detach()),
            "clipped_fraction": mean(was_clipped_BS.to(ratio_BS.dtype)),
            "num_valid_samples": data["sample_mask"].sum(),
        }


@dataclass(frozen=True)
class DPOLoss:
    """Direct preference optimisation (Rafailov et al., 2023): rows come in pairs, chosen before rejected.

    A pair's loss is `-log sigmoid(reference_policy_kl_penalty * margin)`, margin the difference of the rows' rewards
    `sum(log_prob - reference_policy_logprob)`; with `sft_loss_weight`, plus the chosen row's negative log-likelihood.

    Attributes:
        preference_average_log_probs, sft_average_log_probs: means over a row's tokens instead of sums.
        data key: `reference_policy_logprobs` `[B, S]`. A pair counts where both rows' `sample_mask` is 1, and
            `global_valid_seqs` is the number of rows in such pairs.
    """

    reference_policy_kl_penalty: float = 0.1
    preference_loss_weight: float = 1.0
    sft_loss_weight: float = 0.0
    preference_average_log_probs: bool = False
    sft_average_log_probs: bool = False

    loss_type: ClassVar[LossType] = LossType.SEQUENCE_LEVEL
    needs: ClassVar[tuple[str, ...]] = ("input_ids", "token_mask", "sample_mask", "reference_policy_logprobs")
    unit: ClassVar[int] = 2

    def __call__(self, log_probs_BS, data, global_valid_seqs, global_valid_toks):
        mask_BS = _mask(data)
        a_pair = _divide(torch.ones((), device=log_probs_BS.device), global_valid_seqs / 2)

        def reduce(x_BS: Tensor, average: bool) -> Tensor:
            x_BS = _counted(x_BS, mask_BS)
            return _row_means(x_BS, mask_BS) if average else (x_BS * mask_BS).sum(1)

        rewards_B = reduce(log_probs_BS - data["reference_policy_logprobs"], self.preference_average_log_probs)
        margin_P = rewards_B[0::2] - rewards_B[1::2]
        counts_P = (data["sample_mask"][0::2] * data["sample_mask"][1::2]).to(margin_P.dtype)
        preference = -(F.logsigmoid(self.reference_policy_kl_penalty * margin_P) * counts_P).sum() * a_pair
        sft = -(reduce(log_probs_BS, self.sft_average_log_probs)[0::2] * counts_P).sum() * a_pair
        loss = self.preference_loss_weight * preference + self.sft_loss_weight * sft
        return loss, {
            "loss": loss.detach(),
            "preference_loss": preference.detach(),
            "sft_loss": sft.detach(),
            "accuracy": ((margin_P.detach() > 0) * counts_P).sum() * a_pair,
            "rewards_margin": (margin_P.detach() * counts_P).sum() * a_pair * self.reference_policy_kl_penalty,
            "num_valid_samples": 2 * counts_P.sum(),
        }


def valid_counts(data: Mapping[str, Any], unit: int = 1) -> tuple[float, float]:
    """Rows and tokens of a batch that count, as `train` adds them up over the global batch.

    Of `unit` rows that come together all count, or none.
    """
    unit_weights_U = data["sample_mask"].float().view(-1, unit).prod(1)
    counting = {**data, "sample_mask": unit_weights_U.repeat_interleave(unit)}
    rows = float(counting["sample_mask"].sum())
    if "token_mask" not in data:
        return rows, rows * data["input_ids"].shape[1]
    return rows, float(_mask(counting).sum())


def _mask(data: Mapping[str, Any]) -> Tensor:
    """fp32 `[B, S]`: the weight of each token, 0 for the first one."""
    mask_BS = data["token_mask"].float() * data["sample_mask"].float()[:, None]
    return mask_BS.index_fill(1, torch.zeros(1, dtype=torch.int64, device=mask_BS.device), 0.0)


def _counted(x_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """`x` where a token counts, 0 elsewhere, whatever stands there: infinite differences too."""
    return x_BS.where(mask_BS > 0, 0.0)


def _row_means(x_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """`[B]`: means over what counts of a row, 0 where nothing does."""
    return _divide((x_BS * mask_BS).sum(1), mask_BS.sum(1))


def _divide(x: Tensor, count: Tensor) -> Tensor:
    """`x / count`, 0 where nothing counts."""
    return x / count.clamp(min=1e-8)

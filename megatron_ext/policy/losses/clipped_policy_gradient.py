"""The policy gradient loss of a policy worker, with the fields and metrics of NeMo-RL's `ClippedPGLossFn`.

Legend: B rows, S positions. `x_BS[:, t]` belongs to token t; t = 0, which nothing predicts, never counts.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self, get_args

import torch
from torch import Tensor

from megatron_ext.head.checks import one_of
from megatron_ext.losses import policy_gradient as pg
from megatron_ext.losses.checks import check_number, check_numbers, check_per_token
from megatron_ext.losses.reductions import counted, divide, row_means, token_mean
from megatron_ext.policy.config import check_flag
from megatron_ext.policy.losses.worker_protocol import LossType, MetricNormalizer, token_weights

_TRUNCATIONS: dict[str | None, pg.Truncation | None] = {
    None: None,
    "tis": "truncate",
    "icepop": "mask",
    "seq-mask-tis": "mean mask",
}


@dataclass(frozen=True)
class ClippedPGLoss:
    """Clipped policy gradient (PPO; Schulman et al., 2017), with a KL penalty (GRPO; Shao et al., 2024).

    A token's loss is `-min(r A, clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max) A) + reference_policy_kl_penalty * kl`,
    with `r = exp(log_prob - prev_logprob)` and A its advantage.

    Attributes:
        ratio_clip_c: dual clipping: where A < 0 the first term is at most `-ratio_clip_c * A`; None: not bounded.
        token_level_loss: True: a mean over tokens; False: a mean over rows of each row's mean over its tokens.
        use_importance_sampling_correction: weighs tokens by `exp(prev_logprobs - generation_logprobs)`, for samples
            of a generator whose numbers differ; with `sequence_level_importance_ratios` weighs rows by the product of
            their tokens' weights.
        truncated_importance_sampling_type: how `truncated_importance_sampling_ratio` and `..._ratio_min` bound these
            weights: "tis": clamped; "icepop": 0 outside; "seq-mask-tis": 0 for rows whose geometric mean lies outside;
            None: not bounded.
        reference_policy_kl_type, kl_input_clamp_value, kl_output_clamp_value: see `losses.policy_gradient.kl_estimate`.
            The estimate is weighted by an importance weight of value 1 that carries the gradient of sampling, or with
            `use_on_policy_kl_approximation` by `exp(log_prob - generation_logprob)`. With `use_kl_in_reward` the loss
            has no KL term: the caller has put it into the rewards.
        sequence_level_importance_ratios: r is the geometric mean over a row (GSPO); with `token_level_loss=False`.
        use_cispo: the clipped r only weighs the log-probability (CISPO).
        disable_ppo_ratio: the log-probability stands in place of r (REINFORCE, RLOO): nothing is clipped.
        force_on_policy_ratio: r is 1, its gradient that of the log-probability; `prev_logprobs` are not read. Right
            where each batch is trained on once.
        positive_example_nll_weight: factor of the mean negative log-likelihood of the tokens in rows whose `rewards`
            are above 0, a mean over each micro-batch (VAPO).
        data keys: `advantages` `[B, S]`; `prev_logprobs`, `generation_logprobs`, `reference_policy_logprobs` `[B, S]`
            where needed; `rewards` `[B]`. If `generation_logprobs` are given, metrics compare them with the trainer's.
    """

    reference_policy_kl_penalty: float = 0.0
    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    token_level_loss: bool = True
    use_importance_sampling_correction: bool = False
    truncated_importance_sampling_type: str | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    reference_policy_kl_type: pg.KLEstimator = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_kl_in_reward: bool = False
    use_on_policy_kl_approximation: bool = False
    sequence_level_importance_ratios: bool = False
    use_cispo: bool = False
    disable_ppo_ratio: bool = False
    force_on_policy_ratio: bool = False
    positive_example_nll_weight: float = 0.0

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Make the loss of NeMo-RL's `loss_fn` configuration, a mapping or an object with these attributes.

        An option that is left out has NeMo-RL's default: `reference_policy_kl_penalty` is 0.01.

        Raises:
            ValueError: the configuration has keys that are not fields of this class: a misspelt one would leave its
                option at the default without a word.
        """
        given: dict[str, Any] = dict(config if isinstance(config, Mapping) else vars(config))
        given |= getattr(config, "__pydantic_extra__", None) or {}  # keys that a pydantic model does not know
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(
                f"the loss_fn configuration has {', '.join(map(repr, unknown))}: {cls.__name__} knows "
                f"{', '.join(known)}; correct the spelling, or leave the key out"
            )
        return cls(**{"reference_policy_kl_penalty": 0.01} | given)

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type is bool:
                check_flag(field.name, getattr(self, field.name))
        names = ("reference_policy_kl_penalty", "ratio_clip_min", "ratio_clip_max", "positive_example_nll_weight")
        check_numbers(self, "at least 0", *names)
        check_number("ratio_clip_c", self.ratio_clip_c, "above 1", lambda x: x > 1, optional=True)
        check_numbers(self, "above 0", "kl_input_clamp_value", "kl_output_clamp_value", optional=True)
        one_of("reference_policy_kl_type", self.reference_policy_kl_type, get_args(pg.KLEstimator))
        self._check_levels()
        self._check_truncation()

    @property
    def loss_type(self) -> LossType:
        return LossType.TOKEN_LEVEL if self.token_level_loss else LossType.SEQUENCE_LEVEL

    @property
    def needs(self) -> tuple[str, ...]:
        keys = ["input_ids", "token_mask", "sample_mask", "advantages"]
        keys += ["prev_logprobs"] * (not self.force_on_policy_ratio)
        keys += ["reference_policy_logprobs"] * bool(self._kl_factor)
        keys += ["generation_logprobs"] * self._reads_generation
        keys += ["rewards"] * bool(self.positive_example_nll_weight)
        return tuple(keys)

    @property
    def metric_normalizations(self) -> dict[str, MetricNormalizer]:
        """Return the normalizers of metrics that are divided by another count than the loss."""
        of_rows = MetricNormalizer.SEQUENCES, MetricNormalizer.TOKENS
        extremes = ("probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped_min", "probs_ratio_clamped_max")
        tokens = ["probs_ratio", "probs_ratio_clamped", "clipped_fraction", "token_mult_prob_error", "gen_kl_error"]
        tokens += ["policy_kl_error", "js_divergence_error", "approx_entropy"]
        found = dict.fromkeys(tokens, MetricNormalizer.TOKENS)
        found |= dict.fromkeys((*extremes, "num_valid_samples", "positive_nll_loss"), MetricNormalizer.NONE)
        found["sampling_importance_ratio"] = of_rows[not self.sequence_level_importance_ratios]
        found["is_oob_ratio"] = of_rows[self.truncated_importance_sampling_type != "seq-mask-tis"]
        return found

    def __call__(
        self, log_probs_BS: Tensor, data: Mapping[str, Any], global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        mask_BS = token_weights(data)
        # Refuse a tensor of another shape: it would be broadcast to the tokens, or cut.
        per_token = [name for name in (*self.needs, "generation_logprobs") if name.endswith(("advantages", "logprobs"))]
        check_per_token(mask_BS.shape, **{name: data[name] for name in per_token if name in data})
        means = _Means(mask_BS, data["sample_mask"], global_valid_seqs, global_valid_toks)
        reduce = means.of_tokens if self.token_level_loss else means.of_rows
        advantages_BS = counted(data["advantages"], mask_BS)
        log_probs_BS = counted(log_probs_BS, mask_BS)
        prev_BS = log_probs_BS.detach() if self.force_on_policy_ratio else counted(data["prev_logprobs"], mask_BS)
        ratio_BS, clipped_BS = self._ratios(log_probs_BS, prev_BS, mask_BS)
        if self.use_cispo:
            loss_BS = pg.clipped_weight_loss(log_probs_BS, clipped_BS, advantages_BS)
        else:
            loss_BS = torch.maximum(-advantages_BS * ratio_BS, -advantages_BS * clipped_BS)
        if self.ratio_clip_c is not None:
            loss_BS = pg.dual_clipped(loss_BS, advantages_BS, self.ratio_clip_c)
        metrics: dict[str, Any] = _ratio_metrics(ratio_BS.detach(), clipped_BS.detach(), means)
        if "generation_logprobs" in data:
            drawn_BS = counted(data["generation_logprobs"], mask_BS)
            weights, more = self._sampling_weights(prev_BS.detach(), drawn_BS, means)
            metrics |= more | self._drift_metrics(log_probs_BS.detach(), prev_BS.detach(), drawn_BS, means)
            loss_BS = loss_BS * weights if self.use_importance_sampling_correction else loss_BS
        loss, kl = reduce(loss_BS), torch.zeros((), device=log_probs_BS.device)
        if self._kl_factor:
            kl = reduce(self._kl(counted(data.get("curr_logprobs_unfiltered", log_probs_BS), mask_BS), data, mask_BS))
            loss = loss + self._kl_factor * kl
        nll = torch.zeros((), device=log_probs_BS.device)
        if self.positive_example_nll_weight:
            right_BS = mask_BS * (data["rewards"] > 0).float()[:, None]
            nll = token_mean(-log_probs_BS, right_BS)
            loss = loss + self.positive_example_nll_weight * nll
        return loss, {
            "loss": loss.detach(),
            "kl_penalty": kl.detach(),
            "num_valid_samples": data["sample_mask"].sum(),
            "positive_nll_loss": nll.detach(),
            **metrics,
        }

    def _ratios(self, log_probs_BS: Tensor, prev_BS: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return the factors of the advantages, and the same clipped."""
        if self.force_on_policy_ratio:
            ratio_BS = (log_probs_BS - log_probs_BS.detach()).exp()
            return ratio_BS, ratio_BS
        if self.disable_ppo_ratio:
            return log_probs_BS, log_probs_BS
        level: pg.Level = "sequence" if self.sequence_level_importance_ratios else "token"
        ratio_BS = pg.probability_ratio(log_probs_BS, prev_BS, mask_BS, level).expand_as(mask_BS)
        return ratio_BS, ratio_BS.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)

    def _kl(self, log_probs_BS: Tensor, data: Mapping[str, Any], mask_BS: Tensor) -> Tensor:
        if self.use_on_policy_kl_approximation:
            drift_BS = counted(log_probs_BS - data["generation_logprobs"], mask_BS)
        else:
            drift_BS = log_probs_BS - log_probs_BS.detach()
        apart_BS = counted(data["reference_policy_logprobs"] - log_probs_BS, mask_BS)
        return pg.kl_estimate(
            apart_BS,
            self.reference_policy_kl_type,
            self.kl_input_clamp_value,
            self.kl_output_clamp_value,
            drift_BS.exp().nan_to_num(0.0, 0.0, 0.0),
        )

    def _sampling_weights(self, prev_BS: Tensor, drawn_BS: Tensor, means: "_Means") -> tuple[Tensor, dict[str, Tensor]]:
        by_row = self.sequence_level_importance_ratios
        kind = self.truncated_importance_sampling_type
        low, high = self.truncated_importance_sampling_ratio_min, self.truncated_importance_sampling_ratio
        low = 0.0 if kind == "tis" and low is None else low
        level: pg.Level = "sequence" if by_row else "token"
        weights, outside = pg.sampling_weights(prev_BS, drawn_BS, means.mask_BS, level, _TRUNCATIONS[kind], low, high)
        average = means.rows_alone if by_row else means.of_tokens
        metrics = {"sampling_importance_ratio": average(weights)}
        if kind is not None:
            average = means.rows_alone if kind == "seq-mask-tis" else means.of_tokens
            metrics["is_oob_ratio"] = average(outside.to(weights.dtype))
        return weights, metrics

    def _drift_metrics(self, log_probs_BS: Tensor, prev_BS: Tensor, drawn_BS: Tensor, means: "_Means"):
        """Estimate from the drawn tokens how far trainer and generator are apart."""
        apart_BS = prev_BS - drawn_BS
        mixture_BS = torch.logaddexp(prev_BS, drawn_BS) - math.log(2)
        halves_BS = [pg.kl_estimate(x - mixture_BS) for x in (prev_BS, drawn_BS)]
        kind = self.reference_policy_kl_type
        return {
            "token_mult_prob_error": means.of_tokens(apart_BS.abs().exp()),
            "gen_kl_error": means.of_tokens(pg.kl_estimate(apart_BS, kind)),
            "policy_kl_error": means.of_tokens(pg.kl_estimate(-apart_BS, kind)),
            "js_divergence_error": means.of_tokens((halves_BS[0] + halves_BS[1]) / 2),
            "approx_entropy": -means.of_tokens((log_probs_BS - drawn_BS).exp() * log_probs_BS),
        }

    @property
    def _kl_factor(self) -> float:
        return 0.0 if self.use_kl_in_reward else self.reference_policy_kl_penalty

    @property
    def _reads_generation(self) -> bool:
        return self.use_importance_sampling_correction or bool(self.use_on_policy_kl_approximation and self._kl_factor)

    def _check_levels(self) -> None:
        if self.sequence_level_importance_ratios and self.token_level_loss:
            raise ValueError(
                "sequence_level_importance_ratios with token_level_loss: one ratio for a row goes with a mean over "
                "rows; set token_level_loss to False"
            )
        if not self.use_cispo:
            return
        for name in ("disable_ppo_ratio", "force_on_policy_ratio", "sequence_level_importance_ratios", "ratio_clip_c"):
            if getattr(self, name):
                raise ValueError(f"use_cispo with {name}: CISPO weighs tokens by their clipped ratio; leave {name} out")
        if not self.token_level_loss:
            raise ValueError("use_cispo with token_level_loss=False: CISPO is a mean over tokens; set it to True")

    def _check_truncation(self) -> None:
        kind, name = self.truncated_importance_sampling_type, "truncated_importance_sampling_ratio"
        high, low = self.truncated_importance_sampling_ratio, self.truncated_importance_sampling_ratio_min
        if kind not in _TRUNCATIONS:
            known = ", ".join(repr(x) for x in _TRUNCATIONS)
            raise ValueError(f"truncated_importance_sampling_type is {kind!r}: it must be one of {known}")
        if kind is None:
            for given, bound in ((name, high), (f"{name}_min", low)):
                if bound is not None:
                    raise ValueError(
                        f"{given} is {bound} and truncated_importance_sampling_type None: set the type, or leave both "
                        f"out"
                    )
            return
        if not self.use_importance_sampling_correction:
            raise ValueError(
                f"truncated_importance_sampling_type is {kind!r} without use_importance_sampling_correction: there are "
                f"no weights to bound; set that to True"
            )
        check_number(name, high, f"above 0 with truncated_importance_sampling_type {kind!r}", lambda x: x > 0)
        check_number(f"{name}_min", low, "at least 0", optional=True)
        assert high is not None
        if low is None and kind != "tis":
            raise ValueError(f"{name}_min is None: {kind!r} needs the lower bound too; set it")
        if low is not None and low > high:
            raise ValueError(f"{name}_min is {low} and {name} {high}: the lower bound must not be above; exchange them")
        if kind == "seq-mask-tis" and self.sequence_level_importance_ratios:
            raise ValueError(
                "truncated_importance_sampling_type is 'seq-mask-tis' with sequence_level_importance_ratios: it weighs "
                "tokens; use 'tis' or 'icepop'"
            )


@dataclass(frozen=True)
class _Means:
    """Sums over this micro-batch, divided by the counts of the global batch."""

    mask_BS: Tensor
    sample_mask_B: Tensor
    rows: Tensor
    tokens: Tensor

    def of_tokens(self, x_BS: Tensor) -> Tensor:
        return token_mean(x_BS.expand_as(self.mask_BS), self.mask_BS, self.tokens)

    def of_rows(self, x_BS: Tensor) -> Tensor:
        """Average the means over each row's tokens."""
        return divide(row_means(x_BS.expand_as(self.mask_BS), self.mask_BS).sum(), self.rows)

    def rows_alone(self, x_B1: Tensor) -> Tensor:
        return divide((x_B1[:, 0] * self.sample_mask_B).sum(), self.rows)


def _ratio_metrics(ratio_BS: Tensor, clipped_BS: Tensor, means: _Means) -> dict[str, Tensor]:
    inside = means.mask_BS > 0
    metrics = {"clipped_fraction": means.of_tokens((ratio_BS != clipped_BS).to(ratio_BS.dtype))}
    for name, x_BS in (("probs_ratio", ratio_BS), ("probs_ratio_clamped", clipped_BS)):
        metrics[name] = means.of_tokens(x_BS)
        metrics[f"{name}_min"] = x_BS.where(inside, torch.inf).amin()
        metrics[f"{name}_max"] = x_BS.where(inside, -torch.inf).amax()
    return metrics

"""Losses of rows that are preferred or not, from hidden states: DPO, SimPO and ORPO of pairs, KTO of single rows.

Legend: B rows, P pairs, S positions. `c` and `r` are the log-probabilities of a pair's chosen and rejected row, each
the sum or the mean over its tokens.
"""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.head.checks import one_of
from megatron_ext.losses.checks import (
    check_number,
    check_numbers,
    check_tensor,
    first_fault,
    scalar_fault,
    shape_fault,
)
from megatron_ext.losses.from_hidden import LogProbLoss, Metrics
from megatron_ext.losses.reductions import divide, row_means, row_sums, token_mean

Pairs = Literal["halves", "interleaved"]


def preference_loss(margin: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return `-log sigmoid(margin)` (Bradley, Terry), with `label_smoothing` as the weight of the exchanged pair's."""
    return -F.logsigmoid(margin) * (1 - label_smoothing) - F.logsigmoid(-margin) * label_smoothing


def log_odds(mean_log_prob: Tensor) -> Tensor:
    """Return `log(p / (1 - p))` of `p = exp(mean_log_prob)`; at p = 1 a large finite value without gradient."""
    mean_log_prob = mean_log_prob.clamp(max=-torch.finfo(mean_log_prob.dtype).tiny)
    return mean_log_prob - (-torch.expm1(mean_log_prob)).log()


def _check_reference(reference_free: bool, reference_log_probs: Tensor | None) -> None:
    """Raise ValueError unless either `reference_log_probs` are given or the loss is `reference_free`."""
    if reference_free == (reference_log_probs is None):
        return
    if reference_free:
        raise ValueError("reference_log_probs are given with reference_free=True: leave out one of them")
    raise ValueError(
        "reference_log_probs is None: the loss compares the policy with a reference; pass the reference policy's "
        "log-probabilities of the same labels, or set reference_free=True for a loss without one"
    )


def split_pairs(rows: Tensor, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Return the chosen and the rejected rows: of "halves" the first and the second half, else each second row."""
    if pairs == "interleaved":
        return rows[0::2], rows[1::2]
    return rows[: len(rows) // 2], rows[len(rows) // 2 :]


@dataclass(frozen=True, kw_only=True)
class _PairLoss(LogProbLoss):
    """A loss of pairs of rows. A pair counts if both rows have a token that counts.

    Attributes:
        beta: factor of log-probabilities in the rewards; each loss says what else it does.
        pairs: the order of rows: "halves": all chosen rows, then the rejected ones in the same order, as in Liger and
            TRL; "interleaved": chosen, rejected, chosen, ..., as in NeMo-RL.
        label_smoothing: the probability that a pair is labelled the wrong way round.
        sft_weight: factor of the mean negative log-likelihood of the chosen rows' tokens, which is added.
    """

    beta: float = 0.1
    pairs: Pairs = "halves"
    label_smoothing: float = 0.0
    sft_weight: float = 0.0

    def __post_init__(self) -> None:
        check_numbers(self, "above 0", "beta")
        check_numbers(self, "at least 0", "sft_weight")
        one_of("pairs", self.pairs, get_args(Pairs))
        check_number("label_smoothing", self.label_smoothing, "in [0, 1)", lambda x: 0 <= x < 1)

    def _of_pairs(
        self,
        apart_B: Tensor,
        losses_P: Tensor,
        log_probs_BS: Tensor,
        mask_BS: Tensor,
        count: Tensor | float | None,
        sft_count: Tensor | float | None,
    ) -> tuple[Tensor, Metrics]:
        """Return the pairs' mean loss, or its sum over `count`, plus the chosen tokens' likelihood by `sft_weight`, and
        metrics. Rewards are `beta` times `apart_B`."""
        some_P = torch.stack(split_pairs((mask_BS > 0).any(1), self.pairs)).all(0)
        total = some_P.sum() if count is None else count

        def mean(x_P: Tensor) -> Tensor:
            return divide(x_P.where(some_P, 0.0).sum(), total)

        loss = mean(losses_P)
        chosen_P, rejected_P = split_pairs(self.beta * apart_B.detach(), self.pairs)
        metrics = {
            "rewards_chosen": mean(chosen_P),
            "rewards_rejected": mean(rejected_P),
            "accuracy": mean((chosen_P > rejected_P).to(chosen_P.dtype)),
        }
        if self.sft_weight:
            chosen_PS, mask_PS = (split_pairs(x, self.pairs)[0] for x in (log_probs_BS, mask_BS))
            sft = -token_mean(chosen_PS, mask_PS, sft_count)
            loss = loss + self.sft_weight * sft
            metrics["sft_loss"] = sft.detach()
        return loss, metrics

    def _fault(self, shape: torch.Size, given: Mapping[str, Any]) -> ValueError | None:
        fault = super()._fault(shape, given)
        count, sft_count = given.get("count"), given.get("sft_count")
        if self.sft_weight and (count is None) != (sft_count is None):
            passed, missing = ("count", "sft_count") if sft_count is None else ("sft_count", "count")
            raise ValueError(
                f"{passed} without {missing} with sft_weight {self.sft_weight}: the preference is divided by count, "
                f"the pairs of all micro-batches, the likelihood by sft_count, the tokens of their chosen rows; pass "
                f"both or neither"
            )
        rows = self._row_count(shape)
        if rows % 2:
            raise ValueError(f"{rows} rows: they come in pairs of a chosen and a rejected one; add the missing row")
        return fault


@dataclass(frozen=True, kw_only=True)
class DPOLoss(_PairLoss):
    """Direct preference optimisation (Rafailov et al., 2023), `-log sigmoid(beta ((c - c_ref) - (r - r_ref)))`.

    Attributes:
        beta: how strongly the policy is held to the reference.
        reference_free: there is no reference: `c_ref` and `r_ref` are 0, and `reference_log_probs` is left out.
        loss_type: "sigmoid", as above; with d for its difference of differences "hinge": `max(0, 1 - beta d)` (SLiC;
            Zhao et al., 2023); "ipo": `(d - 1 / (2 beta))^2` (Azar et al., 2023).
        average_log_prob: c and r are means instead of sums; with "ipo" they always are.
    """

    loss_type: Literal["sigmoid", "hinge", "ipo"] = "sigmoid"
    average_log_prob: bool = False
    reference_free: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("loss_type", self.loss_type, ("sigmoid", "hinge", "ipo"))
        if self.label_smoothing and self.loss_type != "sigmoid":
            raise ValueError(
                f"label_smoothing is {self.label_smoothing} with loss_type {self.loss_type!r}: only 'sigmoid' has it; "
                f"set it to 0"
            )

    def from_log_probs(
        self,
        log_probs: Tensor,
        mask: Tensor | None = None,
        reference_log_probs: Tensor | None = None,
        count: Tensor | float | None = None,
        sft_count: Tensor | float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Compute the loss, and over pairs the mean rewards, `beta (c - c_ref)` and `beta (r - r_ref)`, and how often
        the chosen row's is larger.

        Args:
            log_probs: of the labels, `[B, S]` (all per token `[S, B]` with `sequence_first`).
            mask: which tokens count, or their weights; None: all.
            reference_log_probs: of the reference policy, shaped like `log_probs`; they get no gradient. None only with
                `reference_free`.
            count: the divisor of the sum, the pairs of all micro-batches and ranks; None: those of this call.
            sft_count: the divisor of the likelihood's sum, the tokens of the chosen rows of all micro-batches and
                ranks; None: those of this call. With `sft_weight` pass both counts or neither.
        """
        given = {"mask": mask, "reference_log_probs": reference_log_probs, "count": count, "sft_count": sft_count}
        self._check(log_probs.shape, **given)
        log_probs_BS, mask_BS = self._inputs(log_probs, mask)
        apart_BS = self._apart(log_probs_BS, reference_log_probs)
        apart_B, losses_P = self.of_each_pair(apart_BS, mask_BS)
        return self._of_pairs(apart_B, losses_P, log_probs_BS, mask_BS, count, sft_count)

    def of_each_pair(self, apart_BS: Tensor, mask_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return each row's distance from the reference `[B]`, and each pair's loss `[P]`, from the differences of
        tokens' log-probabilities from the reference's."""
        average = self.average_log_prob or self.loss_type == "ipo"
        apart_B = row_means(apart_BS, mask_BS) if average else row_sums(apart_BS, mask_BS)
        chosen_P, rejected_P = split_pairs(apart_B, self.pairs)
        margin_P = chosen_P - rejected_P
        if self.loss_type == "ipo":
            return apart_B, (margin_P - 1 / (2 * self.beta)).square()
        if self.loss_type == "hinge":
            return apart_B, (1 - self.beta * margin_P).relu()
        return apart_B, preference_loss(self.beta * margin_P, self.label_smoothing)

    def _fault(self, shape: torch.Size, given: Mapping[str, Any]) -> ValueError | None:
        _check_reference(self.reference_free, given.get("reference_log_probs"))
        return super()._fault(shape, given)


@dataclass(frozen=True, kw_only=True)
class _MeansLoss(_PairLoss):
    """A loss of pairs without a reference, of the means of the rows' log-probabilities."""

    def from_log_probs(
        self,
        log_probs: Tensor,
        mask: Tensor | None = None,
        count: Tensor | float | None = None,
        sft_count: Tensor | float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Return the loss as `DPOLoss.from_log_probs` does; a row's reward is `beta c`."""
        self._check(log_probs.shape, mask=mask, count=count, sft_count=sft_count)
        log_probs_BS, mask_BS = self._inputs(log_probs, mask)
        means_B = row_means(log_probs_BS, mask_BS)
        # A row without tokens has infinite odds; its pair does not count, and must bring no NaN.
        safe_B = means_B.where((mask_BS > 0).any(1), -1.0)
        losses_P = self._of_each_pair(*split_pairs(safe_B, self.pairs))
        return self._of_pairs(means_B, losses_P, log_probs_BS, mask_BS, count, sft_count)

    @abstractmethod
    def _of_each_pair(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        """Return the loss of each pair, from its rows' mean log-probabilities."""


@dataclass(frozen=True, kw_only=True)
class SimPOLoss(_MeansLoss):
    """Preference without a reference (SimPO; Meng et al., 2024), `-log sigmoid(beta (c - r) - gamma)` of means.

    Attributes:
        beta, gamma: factor of the difference, and the margin by which the product should exceed 0.
    """

    gamma: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        check_numbers(self, "a number", "gamma")

    def _of_each_pair(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        return preference_loss(self.beta * (chosen_P - rejected_P) - self.gamma, self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class ORPOLoss(_MeansLoss):
    """Odds ratio preference (ORPO; Hong et al., 2024): `beta` times `-log sigmoid` of the difference of log odds of
    means, and the chosen rows' negative log-likelihood.

    Attributes:
        beta: factor of the preference; `sft_weight` of the likelihood.
    """

    sft_weight: float = 1.0

    def _of_each_pair(self, chosen_P: Tensor, rejected_P: Tensor) -> Tensor:
        return self.beta * preference_loss(log_odds(chosen_P) - log_odds(rejected_P), self.label_smoothing)


@dataclass(frozen=True, kw_only=True)
class KTOLoss(LogProbLoss):
    """Preference of single rows (KTO; Ethayarajh et al., 2024): `1 - sigmoid(beta (x - kl))` of those that are
    desirable, `1 - sigmoid(beta (kl - x))` of the others, x a row's log-probability less the reference's.

    Attributes:
        beta: how strongly the policy is held to the reference.
        desirable_weight, undesirable_weight: factors of the two kinds of rows.
        average_log_prob: x is a mean over tokens instead of a sum.
        reference_free: there is no reference: x is a row's log-probability, and `reference_log_probs` is left out.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    average_log_prob: bool = False
    reference_free: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, "above 0", "beta")
        check_numbers(self, "at least 0", "desirable_weight", "undesirable_weight")

    def from_log_probs(
        self,
        log_probs: Tensor,
        desirable: Tensor,
        mask: Tensor | None = None,
        reference_log_probs: Tensor | None = None,
        kl: Tensor | float = 0.0,
        count: Tensor | float | None = None,
    ) -> tuple[Tensor, Metrics]:
        """Compute the loss, a mean over rows, and the mean rewards `beta x` of each kind of rows.

        Args:
            log_probs, mask, reference_log_probs: as for `DPOLoss`.
            desirable: bool `[B]`.
            kl: how far the policy is from the reference: the mean of x over rows with answers to other prompts, taken
                as 0 if negative. It gets no gradient.
            count: the divisor of the sum, the rows of all micro-batches and ranks; None: the rows of this call that
                have a token that counts.
        """
        given = {"mask": mask, "reference_log_probs": reference_log_probs, "kl": kl, "count": count}
        self._check(log_probs.shape, desirable=desirable, **given)
        log_probs_BS, mask_BS = self._inputs(log_probs, mask)
        apart_BS = self._apart(log_probs_BS, reference_log_probs)
        apart_B = row_means(apart_BS, mask_BS) if self.average_log_prob else row_sums(apart_BS, mask_BS)
        sign_B = torch.where(desirable, 1.0, -1.0)
        weights_B = torch.where(desirable, self.desirable_weight, self.undesirable_weight)
        baseline = kl.detach().clamp(min=0) if isinstance(kl, Tensor) else max(kl, 0.0)
        losses_B = weights_B * (1 - torch.sigmoid(self.beta * (apart_B - baseline) * sign_B))
        some_B = (mask_BS > 0).any(1)
        loss = divide(losses_B.where(some_B, 0.0).sum(), some_B.sum() if count is None else count)
        rewards_B = self.beta * apart_B.detach()
        metrics = {
            name: divide((rewards_B * kind_B).sum(), kind_B.sum())
            for name, kind_B in (("rewards_chosen", some_B & desirable), ("rewards_rejected", some_B & ~desirable))
        }
        return loss, metrics

    def _fault(self, shape: torch.Size, given: Mapping[str, Any]) -> ValueError | None:
        fault = super()._fault(shape, given)
        rule = f"a tensor with a bool for each of {self._row_count(shape)} rows"
        desirable = given["desirable"]
        check_tensor("desirable", desirable, rule)
        if desirable.dtype != torch.bool:
            raise ValueError(
                f"desirable has dtype {desirable.dtype}: it must be torch.bool; compare numbers, as in desirable > 0"
            )
        _check_reference(self.reference_free, given.get("reference_log_probs"))
        of_rows = shape_fault("desirable", desirable, [(self._row_count(shape),)], rule)
        return first_fault(of_rows, scalar_fault("kl", given.get("kl", 0.0)), fault)

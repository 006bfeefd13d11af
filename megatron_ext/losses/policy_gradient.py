"""Terms of policy gradient losses, token by token, from log-probabilities. No head, no reduction.

Legend: B rows, S positions. Log-probabilities are `[B, S]`; masks are 0 where a token does not count. Values at such
tokens may be anything: they are set to 0 before an exponential could overflow.
"""

from typing import Literal

import torch
from torch import Tensor

from megatron_ext.losses.reductions import counted, row_means

Level = Literal["token", "sequence"]
Truncation = Literal["truncate", "mask", "mean mask"]
KLEstimator = Literal["k1", "k2", "k3"]


def probability_ratio(log_probs_BS: Tensor, old_BS: Tensor, mask_BS: Tensor, level: Level = "token") -> Tensor:
    """Return the ratio `exp(log_prob - old)`, `[B, S]`, 1 at tokens that do not count.

    On level "sequence" it is the geometric mean over a row's tokens, `[B, 1]` (GSPO; Zheng et al., 2025).
    """
    change_BS = counted(log_probs_BS - old_BS, mask_BS)
    return change_BS.exp() if level == "token" else row_means(change_BS, mask_BS).exp().unsqueeze(1)


def clipped_surrogate(ratio: Tensor, advantages: Tensor, low: float, high: float, ceiling: float | None = None):
    """PPO's loss of a token (Schulman et al., 2017): the larger of `-A r` and `-A clip(r, low, high)`.

    `ceiling`: upper bound of the first r (two-sided clipping; INTELLECT-2, 2025).
    """
    clipped = ratio.clamp(low, high)
    ratio = ratio if ceiling is None else ratio.clamp(max=ceiling)
    return torch.maximum(-advantages * ratio, -advantages * clipped)


def dual_clipped(loss: Tensor, advantages: Tensor, bound: float) -> Tensor:
    """Bound the loss by `-bound A` where the advantage A is negative (Ye et al., 2020)."""
    return torch.minimum(loss, -advantages * bound).where(advantages < 0, loss)


def clipped_weight_loss(log_probs: Tensor, clipped_ratio: Tensor, advantages: Tensor) -> Tensor:
    """CISPO's loss of a token (MiniMax-M1, 2025): the clipped ratio is a weight without a gradient."""
    return -clipped_ratio.detach() * advantages * log_probs


def soft_gated_surrogate(ratio: Tensor, advantages: Tensor, positive: float, negative: float) -> Tensor:
    """SAPO's loss of a token (2025): `-A 4/t sigmoid(t (r - 1))`, with the temperature t of the advantage's sign."""
    temperature = torch.where(advantages > 0, positive, negative)
    return -torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature * advantages


def sampling_weights(
    old_BS: Tensor,
    sampled_BS: Tensor,
    mask_BS: Tensor,
    level: Level = "token",
    truncation: Truncation | None = None,
    low: float | None = None,
    high: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the importance weights of samples whose generator computed other log-probabilities than the trainer.

    Weights are `exp(old - sampled)` of each token, `[B, S]`, on level "sequence" their product over a row, `[B, 1]`.
    Weights that overflow are 0. Truncation, by bounds of which either may be None:
        "truncate": weights are clamped to the bounds (TIS);
        "mask": weights outside are 0 (IcePop);
        "mean mask": all weights are 0 of rows whose geometric mean of token weights lies outside.

    Returns:
        The weights, and which lie outside: bool of their shape, with "mean mask" `[B, 1]`. No gradient.
    """
    with torch.no_grad():
        drift_BS = counted(old_BS - sampled_BS, mask_BS)
        log_weights = drift_BS if level == "token" else (drift_BS * mask_BS).sum(1, keepdim=True)
        weights = log_weights.exp().nan_to_num(0.0, 0.0, 0.0)
        judged = weights
        if truncation == "mean mask":
            judged = row_means(drift_BS.nan_to_num(0.0, 0.0, 0.0), mask_BS).exp().unsqueeze(1)
        low, high = -torch.inf if low is None else low, torch.inf if high is None else high
        outside = (judged < low) | (judged > high)
        if truncation == "truncate":
            weights = weights.clamp(low, high)
        elif truncation is not None:
            weights = weights.where(~outside, 0.0)
        return weights, outside


def kl_estimate(
    apart: Tensor,
    kind: KLEstimator = "k3",
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Schulman's estimates (2020) of KL(policy | reference) at tokens that the policy drew.

    With `d = reference - log_prob`: k1 `-d`, k2 `d^2 / 2`, k3 `exp(d) - d - 1`.

    Args:
        apart: d of each token.
        input_clamp, output_clamp: bounds of the size of d, and of the result; None: not bounded.
        weights: importance weights; they get no gradient where d is clamped.
    """
    if input_clamp is not None:
        bounded = apart.clamp(-input_clamp, input_clamp)
        weights = None if weights is None else weights.where(apart == bounded, weights.detach())
        apart = bounded
    kl = -apart if kind == "k1" else apart.square() / 2 if kind == "k2" else apart.exp() - apart - 1
    kl = kl if weights is None else weights * kl
    return kl if output_clamp is None else kl.clamp(-output_clamp, output_clamp)

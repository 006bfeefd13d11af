"""The gradient of every read-out, in one form.

    dz_v = p_v (a + c (z_v - E_p[z])) + b [v == y] + d

with per-token a, b, c, d, whatever was read out and whatever gradients came back. docs/head.md derives it.

Legend: T tokens; everything is `[T]`, in fp64 until it is given to a pass over logits. p_y: the label's probability.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.head.engine.options import HeadOptions
from megatron_ext.head.engine.statistics import Statistics, log_prob, lse, smoothing


class Coefficients(NamedTuple):
    """a, c and d of the form above, the temperature's factor in them; all 0 for tokens that do not count.

    `target` is the gradient of the label's logit without d, `p_y (a + c (z_y - E_p[z])) + b`: b alone would be
    cancelled by p_y a where the model is sure. `alpha` turns this shard's exponentials into probabilities.
    """

    a: Tensor
    c: Tensor | None
    d: Tensor | None
    target: Tensor
    alpha: Tensor


class PassCoefficients(NamedTuple):
    """What `row_gradient` takes, in its dtype: `exp(u) (scale + slope u) + offset`, u = z - this shard's maximum."""

    scale: Tensor
    slope: Tensor | None
    offset: Tensor | None


def coefficients(
    stats: Statistics, kept_T: Tensor, grad_loss_T: Tensor | None, grad_entropy_T: Tensor | None, options: HeadOptions
) -> Coefficients:
    """What the gradients of `statistics.loss` and `statistics.entropy` mean for the logits (before the softcap)."""
    dtype, factor = stats.log_sum.dtype, 1.0 / options.temperature

    def pulled(grad_T: Tensor | None) -> Tensor:
        if grad_T is None:
            return torch.zeros_like(stats.log_sum)
        return (grad_T.to(dtype) * factor).where(kept_T, 0.0)

    g = pulled(grad_loss_T)
    log_p = log_prob(stats).where(kept_T, 0.0)
    p_y = log_p.exp()
    a, target = g, g * torch.expm1(log_p)
    if options.z_loss:
        bend = g * (2 * options.z_loss) * lse(stats).where(kept_T, 0.0)
        a, target = a + bend, target + bend * p_y
    c = d = None
    if stats.columns is not None:
        e = smoothing(stats, options)
        target = target + g * e
        d = -g * e / stats.columns.clamp(min=1)
    if grad_entropy_T is not None:
        assert stats.expected is not None
        c = -pulled(grad_entropy_T)
        away = (stats.target - stats.expected).clamp(min=-1e4).where(kept_T, 0.0)  # p_y is 0 further away
        target = target + c * p_y * away
    # Above 0 only where this shard has no finite logit: its shift is 0 then, and its probabilities are 0 anyway.
    alpha = (stats.shift - stats.largest - stats.log_sum).clamp(max=0).exp().where(kept_T, 0.0)
    return Coefficients(a, c, d, target, alpha)


def target_bend(stats: Statistics) -> Tensor | float:
    """The softcap's slope at the label's logit, where this shard owns it."""
    return 1.0 if stats.bend is None else stats.bend


def pass_coefficients(stats: Statistics, coef: Coefficients, unit_T: Tensor | None = None) -> PassCoefficients:
    """`coef` as `row_gradient` wants it, divided by `unit_T` if given."""
    a, c, d, _, alpha = coef
    if unit_T is not None:
        a, c, d = a / unit_T, None if c is None else c / unit_T, None if d is None else d / unit_T
    dtype, scale, slope = stats.shift.dtype, alpha * a, None
    if c is not None:
        assert stats.expected is not None
        away = (stats.shift - stats.largest - stats.expected).where(alpha > 0, 0.0)
        scale, slope = alpha * (a + c * away), (alpha * c).to(dtype)
    return PassCoefficients(scale.to(dtype), slope, None if d is None else d.to(dtype))

"""The gradient of every function of a row's softmax, in one form.

    dz_v = p_v (a + c (z_v - E_p[z])) + b [v == y] + d

with per-token a, b, c, d, whatever was read out and whatever gradients came back. docs/head.md derives it.

Legend: T tokens; everything is `[T]`, in fp64 until it is given to a pass over logits. p_y: the label's probability.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import Statistics


class Basis(NamedTuple):
    """Gradients of the statistics that read-outs are functions of, `[T]` each, 0 where a token does not count; None:
    none.

    Attributes:
        log_prob: of the label's log-probability.
        lse: of the log of the sum of all exponentials.
        mean: of the mean logit of the columns that count.
        entropy: of the entropy.
    """

    log_prob: Tensor | None = None
    lse: Tensor | None = None
    mean: Tensor | None = None
    entropy: Tensor | None = None


def basis_of(
    readouts: Iterable[Any], stats: Statistics, saved: Iterable[list[Tensor]], grads: Iterable[Tensor | None]
) -> Basis:
    """The gradients of all read-outs together, of those of their first results; `saved`: what each has of forward."""
    total: Basis | None = None
    for r, each, grad in zip(readouts, saved, grads, strict=True):
        part = None if grad is None else r.basis(stats, each, grad)
        if part is not None:
            total = part if total is None else Basis(*map(_added, total, part))
    return total or Basis()


def _added(x_T: Tensor | None, y_T: Tensor | None) -> Tensor | None:
    return y_T if x_T is None else x_T if y_T is None else x_T + y_T


class PassCoefficients(NamedTuple):
    """Coefficients of `row_gradient`, in the order of its arguments: `exp(u) (scale + slope u) + offset`, u = z - this
    shard's maximum."""

    scale: Tensor
    slope: Tensor | None
    offset: Tensor | None

    def to(self, dtype: torch.dtype) -> "PassCoefficients":
        """Rounded to the dtype of the pass."""
        scale, slope, offset = (None if x is None else x.to(dtype) for x in self)
        assert scale is not None
        return PassCoefficients(scale, slope, offset)


def coefficients(
    stats: Statistics, kept_T: Tensor | None, basis: Basis, temperature: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return the coefficients that the gradients of `basis` mean for the logits before the softcap: a, c and d of the
    form above, the temperature's factor in them, `target` and `alpha`; all 0 for tokens that do not count.

    `target` is the gradient of the label's logit without d, `p_y (a + c (z_y - E_p[z])) + b`: b alone would be
    cancelled by p_y a where the model is sure. `alpha` turns this shard's exponentials into probabilities.

    `kept_T`: bool, tokens with a gradient; None: all.
    """
    left_out_T = None if kept_T is None else ~kept_T

    def kept(x_T: Tensor) -> Tensor:
        return x_T if left_out_T is None else x_T.masked_fill(left_out_T, 0.0)

    def pulled(grad_T: Tensor) -> Tensor:
        return kept(grad_T.double() if temperature == 1.0 else grad_T.double() * (1.0 / temperature))

    log_p = kept(stats.target - stats.log_sum)
    a = target = None
    if basis.log_prob is not None:
        a = -pulled(basis.log_prob)
        target = a * torch.expm1(log_p)
    if basis.lse is not None:
        g, p_y = pulled(basis.lse), log_p.exp()
        a, target = (g, g * p_y) if a is None or target is None else (a + g, target + g * p_y)
    if a is None or target is None:
        a, target = torch.zeros_like(log_p), torch.zeros_like(log_p)
    c = d = None
    if basis.mean is not None:
        assert stats.columns is not None
        d = pulled(basis.mean) / stats.columns.clamp(min=1)
    if basis.entropy is not None:
        assert stats.expected is not None
        c = -pulled(basis.entropy)
        away = kept((stats.target - stats.expected).clamp(min=-1e4))  # p_y is 0 further away
        target = target + c * log_p.exp() * away
    # Above 0 only where this shard has no finite logit: its shift is 0 then, and its probabilities are 0 anyway.
    alpha = kept((stats.shift - stats.largest).sub_(stats.log_sum).clamp_(max=0).exp_())
    return a, c, d, target, alpha


def bent_at_target(x_T: Tensor, stats: Statistics) -> Tensor:
    """`x` times the softcap's slope at the label's logit, where this shard owns it."""
    return x_T if stats.bend is None else x_T * stats.bend


def pass_coefficients(
    stats: Statistics, a: Tensor, c: Tensor | None, d: Tensor | None, alpha: Tensor
) -> PassCoefficients:
    """The coefficients as `row_gradient` wants them, in fp64."""
    if c is None:
        return PassCoefficients(alpha * a, None, d)
    assert stats.expected is not None
    below_expected = (stats.shift - stats.largest - stats.expected).where(alpha > 0, 0.0)  # 0 without probability here
    return PassCoefficients(alpha * (a + c * below_expected), alpha * c, d)


class GradientParts(NamedTuple):
    """The logits' gradient `[T, V]` by its parts: `scale * G`, plus `target` at the label, plus `offset` everywhere.

    G is E (`inside` is None), or where entropy or softcap bend it what `row_gradient` makes of `inside`. Scales stay
    outside of G: it is rounded to 16 bits once, the scaled operand of dW once, and dx is scaled in fp32.
    """

    inside: PassCoefficients | None
    scale: Tensor
    shift: Tensor  # of E
    target: Tensor  # 0 where another rank owns the label
    offset: Tensor | None


def token_gradient(
    stats: Statistics, kept_T: Tensor | None, target_T: Tensor, basis: Basis, call: ResolvedHead, labelled: bool = False
) -> GradientParts:
    """The parts of the gradient, in the dtype of the passes.

    Args:
        kept_T: bool, the tokens that have a gradient; None: all.
        target_T: the label's column, -1 if not this rank's.
        basis: the gradients of what was read out.
        labelled: the caller knows that every label is this rank's.
    """
    a, c, offset, target, alpha = coefficients(stats, kept_T, basis, call.temperature)
    inside, through, dtype = None, None, stats.shift.dtype
    if call.softcap is not None:  # its slope differs from column to column: the constant goes through the pass
        target = bent_at_target(target if offset is None else target + offset, stats)
        offset, through = None, offset
    if c is None and call.softcap is None:
        scale = a * alpha
    else:
        # G's entries stay near probabilities, which 16 bits hold whatever the loss scale; where a rules, a certain
        # token's is 1, which no rounding touches.
        others = [x.abs() / 256 for x in (c, through) if x is not None]
        scale = torch.stack([a.abs(), *others]).amax(0)
        unit = scale.where(scale > 0, 1.0)
        c, through = (None if x is None else x / unit for x in (c, through))
        inside = pass_coefficients(stats, a / unit, c, through, alpha).to(dtype)
    if not labelled:
        target = target.masked_fill(target_T < 0, 0.0)
    offset = None if offset is None else offset.to(dtype)
    return GradientParts(inside, scale.to(dtype), stats.shift, target.to(dtype), offset)

"""The gradient of every function of a row's softmax, in one form.

    dz_v = p_v (a + c (z_v - E_p[z])) + b [v == y] + d

with a, b, c, d per token, for any read-outs of the softmax and any upstream gradients. docs/head.md derives it.

Legend: T tokens; all tensors are `[T]`, in fp64 until a pass over logits takes them. p_y: the label's probability.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import Statistics


class Basis(NamedTuple):
    """Gradients with respect to the functions of the softmax that read-outs are made of, `[T]` each, 0 where a token
    does not count; None: no gradient.

    Attributes:
        log_prob: with respect to the label's log-probability.
        lse: with respect to the log of the sum of all exponentials.
        mean: with respect to the mean logit of the columns that count.
        entropy: with respect to the entropy.
    """

    log_prob: Tensor | None = None
    lse: Tensor | None = None
    mean: Tensor | None = None
    entropy: Tensor | None = None


def basis_of(
    readouts: Iterable[Any], stats: Statistics, saved: Iterable[list[Tensor]], grads: Iterable[Tensor | None]
) -> Basis:
    """Return the sum of all read-outs' gradients, given those of their first results; `saved`: tensors from forward."""
    total: Basis | None = None
    for r, each, grad in zip(readouts, saved, grads, strict=True):
        part = None if grad is None else r.basis(stats, each, grad)
        if part is not None:
            total = part if total is None else Basis(*map(_added, total, part))
    return total or Basis()


def _added(x_T: Tensor | None, y_T: Tensor | None) -> Tensor | None:
    return y_T if x_T is None else x_T if y_T is None else x_T + y_T


class PassCoefficients(NamedTuple):
    """Coefficients of `row_gradient`, in its order: `exp(u) (scale + slope u) + offset`, u = z - this shard's shift."""

    scale: Tensor
    slope: Tensor | None
    offset: Tensor | None

    def to(self, dtype: torch.dtype) -> "PassCoefficients":
        """Round the coefficients to the dtype of the pass."""
        scale, slope, offset = (None if x is None else x.to(dtype) for x in self)
        assert scale is not None
        return PassCoefficients(scale, slope, offset)


def coefficients(
    stats: Statistics, kept_T: Tensor | None, basis: Basis, temperature: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Return a, c and d of the form above, with the temperature's factor and without the softcap's slope; `target`; and
    `alpha`; all 0 for tokens that do not count.

    `target` is the gradient of the label's logit without d, `p_y (a + c (z_y - E_p[z])) + b`, not b alone, since p_y a
    and b cancel where p_y is near 1. `alpha` turns this shard's exponentials into probabilities.

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
    # The exponent is above 0 only where this shard has no finite logit: its shift is 0 there, and so are exponentials.
    alpha = kept((stats.shift - stats.largest).sub_(stats.log_sum).clamp_(max=0).exp_())
    return a, c, d, target, alpha


def bent_at_target(x_T: Tensor, stats: Statistics) -> Tensor:
    """Return `x` times the softcap's slope at the label's logit, if there is a softcap."""
    return x_T if stats.bend is None else x_T * stats.bend


def pass_coefficients(
    stats: Statistics, a: Tensor, c: Tensor | None, d: Tensor | None, alpha: Tensor
) -> PassCoefficients:
    """Return the coefficients of `row_gradient`, in fp64."""
    if c is None:
        return PassCoefficients(alpha * a, None, d)
    assert stats.expected is not None
    below_expected = (stats.shift - stats.largest - stats.expected).where(alpha > 0, 0.0)  # 0 without probability here
    return PassCoefficients(alpha * (a + c * below_expected), alpha * c, d)


class GradientParts(NamedTuple):
    """Parts of the logits' gradient `[T, V]`: `scale * G`, plus `target` at the label, plus `offset` in all columns.

    G is E if `inside` is None; with an entropy's gradient or a softcap `row_gradient` makes G with the coefficients
    `inside`. `scale` is no part of G: G is rounded to 16 bits once, the scaled operand of dW once, and dx is fp32.
    """

    inside: PassCoefficients | None
    scale: Tensor
    shift: Tensor  # of E
    target: Tensor  # 0 where another rank owns the label
    offset: Tensor | None


def token_gradient(
    stats: Statistics, kept_T: Tensor | None, target_T: Tensor, basis: Basis, call: ResolvedHead, labelled: bool = False
) -> GradientParts:
    """Return the parts of the logits' gradient, in the dtype of the passes.

    Args:
        kept_T: bool, the tokens that have a gradient; None: all.
        target_T: the label's column, -1 if another rank has it.
        basis: the gradients of the read-outs.
        labelled: the caller knows that every label is this rank's.
    """
    a, c, offset, target, alpha = coefficients(stats, kept_T, basis, call.temperature)
    inside, through, dtype = None, None, stats.shift.dtype
    if call.softcap is not None:  # its slope differs by column, so the pass adds the offset
        target = bent_at_target(target if offset is None else target + offset, stats)
        offset, through = None, offset
    if c is None and call.softcap is None:
        scale = a * alpha
    else:
        # G is divided by `scale`: its entries stay near probabilities, in the range of 16 bits at any loss scale. If a
        # is the largest, the entry of a column with probability 1 is 1, which is exact.
        others = [x.abs() / 256 for x in (c, through) if x is not None]
        scale = torch.stack([a.abs(), *others]).amax(0)
        unit = scale.where(scale > 0, 1.0)
        c, through = (None if x is None else x / unit for x in (c, through))
        inside = pass_coefficients(stats, a / unit, c, through, alpha).to(dtype)
    if not labelled:
        target = target.masked_fill(target_T < 0, 0.0)
    offset = None if offset is None else offset.to(dtype)
    return GradientParts(inside, scale.to(dtype), stats.shift, target.to(dtype), offset)

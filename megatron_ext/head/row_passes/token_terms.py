"""Per-token results of the combined statistics in forward, and per-token coefficients of the gradient in backward.

A few numbers per token, in fp64 and rounded once. `kernels/token_terms.py` has the same two functions in Triton: one
launch each, where these take some thirty. No groups, no autograd.

Legend: T tokens, K statistics of a shard (see `logit_passes.py`), R ranks; E: this rank's exponentials.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.head.engine import logit_gradient, statistics
from megatron_ext.head.engine.options import HeadOptions
from megatron_ext.head.engine.statistics import Statistics


class Results(NamedTuple):
    """`[T]`, in the dtype of the passes, 0 where a token does not count; `hits` bool."""

    loss: Tensor
    entropy: Tensor | None
    hits: Tensor | None
    z_loss: Tensor | None


class Gradient(NamedTuple):
    """The logits' gradient `[T, V]` by its parts: `scale * G`, plus `target` at the label, plus `offset` everywhere.

    G is E (`inside` is None), or where entropy or softcap bend it what `row_gradient` makes of `inside`. Scales stay
    outside of G: it is rounded to 16 bits once, the scaled operand of dW once, and dx is scaled in fp32.
    """

    inside: logit_gradient.PassCoefficients | None
    scale: Tensor
    shift: Tensor  # of E
    target: Tensor  # 0 where another rank owns the label
    offset: Tensor | None


def token_results(
    stats_RKT: Tensor, own_KT: Tensor, shift_T: Tensor, kept_T: Tensor, options: HeadOptions
) -> tuple[Statistics, Results]:
    """The statistics of all shards together (see `statistics.combine`), and what the call returns."""
    stats = statistics.combine(stats_RKT, own_KT, options, shift_T)
    entropy = statistics.entropy(stats, kept_T) if options.entropy else None
    return stats, Results(statistics.loss(stats, kept_T, options), entropy, *statistics.marks(stats, kept_T, options))


def token_gradient(
    stats: Statistics,
    kept_T: Tensor,
    target_T: Tensor,
    grad_loss_T: Tensor | None,
    grad_entropy_T: Tensor | None,
    options: HeadOptions,
) -> Gradient:
    """The parts of the gradient, in the dtype of the passes. `target_T`: the label's column, -1 if not this rank's."""
    coef = logit_gradient.coefficients(stats, kept_T, grad_loss_T, grad_entropy_T, options)
    owned_T = target_T >= 0
    if coef.c is None and options.softcap is None:
        return _rounded(None, coef.a * coef.alpha, stats.shift, coef.target.where(owned_T, 0.0), coef.d)
    target, through = coef.target, None
    if options.softcap is not None:  # its slope differs from column to column: the constant goes through the pass
        target, through = (target if coef.d is None else target + coef.d), coef.d
        target = target * logit_gradient.target_bend(stats)
    # G's entries stay near probabilities, which 16 bits hold whatever the loss scale; where a rules, a certain token's
    # is 1, which no rounding touches.
    others = [x.abs() / 256 for x in (coef.c, through) if x is not None]
    unit = torch.stack([coef.a.abs(), *others]).amax(0)
    inside = logit_gradient.pass_coefficients(stats, coef._replace(d=through), unit.where(unit > 0, 1.0))
    return _rounded(inside, unit, stats.shift, target.where(owned_T, 0.0), coef.d if through is None else None)


def _rounded(inside, scale, shift, target, offset) -> Gradient:
    """What is known in fp64, once rounded to the dtype of the passes."""
    offset = None if offset is None else offset.to(shift.dtype)
    return Gradient(inside, scale.to(shift.dtype), shift, target.to(shift.dtype), offset)

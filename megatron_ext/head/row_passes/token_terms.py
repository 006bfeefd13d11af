"""The statistics of all shards combined in forward, and per-token coefficients of the gradient in backward.

A few numbers per token, in fp64 and rounded once. `kernels/token_terms.py` has the same two functions in Triton: one
launch each, where these take some thirty. No groups, no autograd.

Legend: T tokens, K statistics of a shard (see `logit_passes.py`), R ranks; E: this rank's exponentials.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_ext.head.engine import logit_gradient, statistics
from megatron_ext.head.engine.logit_gradient import Basis
from megatron_ext.head.engine.resolved_head import ResolvedHead
from megatron_ext.head.engine.statistics import Statistics


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


def combined(stats_RKT: Tensor, own_KT: Tensor, shift_T: Tensor, call: ResolvedHead) -> Statistics:
    """The statistics of all shards together (see `statistics.combine`)."""
    return statistics.combine(stats_RKT, own_KT, call, shift_T)


def token_gradient(
    stats: Statistics, kept_T: Tensor | None, target_T: Tensor, basis: Basis, call: ResolvedHead, labelled: bool = False
) -> Gradient:
    """The parts of the gradient, in the dtype of the passes.

    Args:
        kept_T: bool, the tokens that have a gradient; None: all.
        target_T: the label's column, -1 if not this rank's.
        basis: the gradients of what was read out.
        labelled: the caller knows that every label is this rank's.
    """
    coef = logit_gradient.coefficients(stats, kept_T, basis, call.temperature)

    def own(x_T: Tensor) -> Tensor:
        return x_T if labelled else x_T.masked_fill(target_T < 0, 0.0)

    if coef.c is None and call.softcap is None:
        return _rounded(None, coef.a * coef.alpha, stats.shift, own(coef.target), coef.d)
    target, through = coef.target, None
    if call.softcap is not None:  # its slope differs from column to column: the constant goes through the pass
        target, through = (target if coef.d is None else target + coef.d), coef.d
        target = logit_gradient.bent_at_target(target, stats)
    # G's entries stay near probabilities, which 16 bits hold whatever the loss scale; where a rules, a certain token's
    # is 1, which no rounding touches.
    others = [x.abs() / 256 for x in (coef.c, through) if x is not None]
    unit = torch.stack([coef.a.abs(), *others]).amax(0)
    inside = logit_gradient.pass_coefficients(stats, coef._replace(d=through), unit.where(unit > 0, 1.0))
    inside = inside.to(stats.shift.dtype)
    return _rounded(inside, unit, stats.shift, own(target), coef.d if through is None else None)


def _rounded(inside, scale, shift, target, offset) -> Gradient:
    """Make the gradient's terms, known in fp64, in the dtype of the passes."""
    offset = None if offset is None else offset.to(shift.dtype)
    return Gradient(inside, scale.to(shift.dtype), shift, target.to(shift.dtype), offset)

"""The words in which two losses differ: a factor, fewer columns, other tokens, another term."""

from typing import NamedTuple

import torch
from torch import Tensor


class Sides(NamedTuple):
    """One way's losses, `[...]` or one number, and its gradients by name, of which each row is compared as a whole.

    The first gradient is that of the hidden states, the second that of the parameter with a row for each column of the
    logits, if there is one that trains. `underflow`: what a gradient may be that is 0 on the other side. `dtype`: that
    of the losses before they became fp64 here. `unreached`: they have gradients, none of which reaches the head, as one
    that is called in a reentrant checkpoint.
    """

    losses: Tensor
    gradients: dict[str, Tensor]
    underflow: float = 0.0
    dtype: torch.dtype = torch.float64
    unreached: bool = False


def relative(own: Tensor, fused: Tensor, scale: float = 0.0) -> float:
    """The norm of the difference over that of `own`, or over `scale` for each number where that is more.

    What is the same infinity on both sides does not differ; what is NaN on both does: nothing is known of it.
    """
    same = own == fused
    difference = torch.where(same, 0.0, own - fused).norm().item()
    least = max(torch.where(own.isinf(), 0.0, own).norm().item(), scale * own.numel() ** 0.5)
    return difference / least if least > 0 else (float("inf") if difference > 0 else difference)


def why_different(own: Sides, fused: Sides, of_losses: float, of_gradients: float) -> str:
    """One sentence's worth of words about how the model's own, `own`, differs from the fused."""
    if not bool(own.losses.isfinite().all()):
        return "its loss of a sample is not finite"
    if not bool(fused.losses.isfinite().all()):
        return "the fused loss of a sample is not finite"
    if own.unreached:
        return "its gradients do not reach what goes into its lm head, where they would be compared"
    if (ratio := _factor(own.losses, fused.losses, of_losses)) is not None:
        return f"differs by a factor {ratio:.6g}"
    if missing := columns_missing(own, fused):
        return f"the model's own has fewer columns: {missing} have no gradient"
    if (constant := _constant(own, fused, of_losses, of_gradients)) is not None:
        return f"another term: differs by a constant {constant:.6g}"
    if (tokens := _other_tokens(own.losses, fused.losses)) is not None:
        return tokens
    differences = {"its loss": relative(own.losses, fused.losses)}
    differences |= {
        f"its gradient of {name}": relative(gradient, fused.gradients[name]) for name, gradient in own.gradients.items()
    }
    largest = max(differences, key=lambda name: differences[name])
    stopped = [name for name, x in own.gradients.items() if not bool(x.any()) and bool(fused.gradients[name].any())]
    if stopped and relative(own.losses, fused.losses) <= of_losses:
        return f"it gives no gradient to {stopped[0]}"
    return f"{largest} differs by {differences[largest]:.2g} of its size"


def _factor(own: Tensor, fused: Tensor, tolerance: float) -> float | None:
    """The number other than 1 by which all losses differ, if there is one. Of one loss alone any ratio would do."""
    square = (fused * fused).sum().item()
    if square == 0:
        return None
    ratio = ((own * fused).sum() / square).item()
    if own.numel() == 1:
        simple = [n for n in range(2, 9) if min(abs(ratio / n - 1), abs(ratio * n - 1)) <= tolerance]
        return ratio if simple else None
    far = abs(ratio - 1) > tolerance
    return ratio if far and relative(own, ratio * fused) <= tolerance else None


def columns_missing(own: Sides, fused: Sides) -> int:
    """The number of columns of the logits that have a gradient in the fused loss alone, more than one that underflows.

    They may be as unlikely as they like, so that no other difference shows them.
    """
    name = next(iter([*own.gradients][1:]), None)
    if name is None or not bool(own.gradients[name].any()):
        return 0
    mine, ours = (side.gradients[name].abs().sum(-1) for side in (own, fused))
    return int(((mine == 0) & (ours > fused.underflow)).sum())


def _other_tokens(own: Tensor, fused: Tensor) -> str | None:
    """Tokens that have a loss on one side alone."""
    if own.numel() == 1:
        return None
    alone = int(((own == 0) != (fused == 0)).sum())
    return f"other tokens count: {alone} of {own.numel()} have a loss on one side alone" if alone else None


def _constant(own: Sides, fused: Sides, of_losses: float, of_gradients: float) -> float | None:
    """The number by which losses differ, if it is one for all tokens, and gradients do not differ."""
    difference = own.losses - fused.losses
    constant = difference.mean()
    scale = relative(own.losses, own.losses - (difference - constant))
    gradients = (relative(x, fused.gradients[name]) for name, x in own.gradients.items())
    return constant.item() if scale <= of_losses and all(each <= of_gradients for each in gradients) else None

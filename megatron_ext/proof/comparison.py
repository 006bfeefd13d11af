"""Comparison of two losses of the same hidden states, with gradients, within the rounding of their dtypes; if they
differ, a diagnosis in words: a factor, fewer columns, other tokens, another term.

Legend: T tokens of the sample, D hidden size, V vocabulary.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megatron_ext.proof.proofs import Proof, error_words

LossOfHidden = Callable[[Tensor], Tensor]

_PROJECTED = 16  # columns to which wider gradients are projected: two of the vocabulary's size never exist at a time
_ROWS = 4096  # rows of a gradient that are in fp32 at a time
_STATE = (bool, int, float, type(None), Tensor)
_CONTAINERS = (list, dict, set, deque, defaultdict)
_OF_MODULES = frozenset(vars(nn.Module()))  # names of torch's own attributes of modules
_LARGEST_STATE = 2**20  # the most numbers of a buffer that is put back; larger ones hold weights, or tables


class _Tolerance(NamedTuple):
    """Tolerances: of relative differences of losses, and of gradients; absolute, of the loss of a token."""

    losses: float
    gradients: float
    of_a_token: float


# Rounding to 16 bits changes a logit of 30 by up to 0.06, and by as large a share the gradient of a token that the
# model predicts well. A caller that compares in fp32 finds smaller differences.
_TOLERANCES = {
    torch.float64: _Tolerance(1e-9, 1e-8, 1e-10),
    torch.float32: _Tolerance(2e-5, 2e-4, 2e-6),
    torch.float16: _Tolerance(5e-3, 2e-2, 1e-2),
    torch.bfloat16: _Tolerance(2e-2, 1e-1, 6e-2),
}
_TF32 = _Tolerance(5e-3, 2e-2, 1e-2)


class LossAndGradients(NamedTuple):
    """One side's losses, `[...]` or one number, and its gradients by name, projected to few columns.

    The first gradient is that of the hidden states, the second that of the parameter with a row for each column of the
    logits, if that parameter trains. `underflow`: the largest gradient that may be 0 on the other side. `dtype`: the
    dtype of the losses before they became fp64 here. `unreached`: the losses need gradients, but none reaches the
    head's operands, as inside of a reentrant checkpoint.
    """

    losses: Tensor
    gradients: dict[str, Tensor]
    underflow: float = 0.0
    dtype: torch.dtype = torch.float64
    unreached: bool = False


def compare(own: LossOfHidden, fused: LossOfHidden, hidden: Tensor, parameters: Mapping[str, Tensor]) -> Proof:
    """Run both functions on the same hidden states, and compare losses and gradients.

    Args:
        own: from hidden states to the model's own loss, `[...]` for each token or one number.
        fused: from hidden states to the same loss by the fused head; called second.
        hidden: a small sample of the inputs of the model's own head, any shape with D last (32 to 64 tokens are
            enough). It is detached here.
        parameters: the head's parameters by name; the first has a row for each column of the logits. The gradients of
            trainable ones are compared, and left neither in `.grad` nor in `main_grad`.

    Returns:
        A proof: refused, with a diagnosis, if losses or gradients differ; not comparable if `own` raises. Errors of
        `fused` are raised.

    Communicates: what both functions do, forward and backward. RNG states are restored.
    """
    hidden = hidden.detach().requires_grad_()
    tokens = hidden[..., 0].numel()
    kept = {name: x for name, x in parameters.items() if x.requires_grad}
    with rng_put_back(hidden.device):
        try:
            mine = _loss_and_gradients(own, hidden, kept)
        except Exception as error:  # a model's own code may raise anything
            return Proof.not_comparable(f"on a sample it raised {error_words(error)}")
    with rng_put_back(hidden.device):
        ours = _loss_and_gradients(fused, hidden, kept)
    if mine.losses.shape != ours.losses.shape:
        return Proof.refused(
            f"it has the shape {list(mine.losses.shape)}, the fused one {list(ours.losses.shape)}", tokens
        )
    allowed = _tolerance([hidden, *kept.values()], mine.dtype)
    losses = relative(mine.losses, ours.losses, allowed.of_a_token / allowed.losses)
    gradients = {name: relative(mine.gradients[name], ours.gradients[name]) for name in mine.gradients}
    largest = max(losses, *gradients.values())
    # With a NaN these comparisons are False, so that it proves nothing.
    equal = losses <= allowed.losses and all(difference <= allowed.gradients for difference in gradients.values())
    if equal and not columns_missing(mine, ours) and not mine.unreached:
        return Proof("proved", tokens=tokens, largest_difference=largest)
    return Proof.refused(why_different(mine, ours, allowed.losses, allowed.gradients), tokens, largest)


def _loss_and_gradients(way: LossOfHidden, hidden: Tensor, parameters: Mapping[str, Tensor]) -> LossAndGradients:
    # A checkpoint around the call counts saved tensors, and must not count those of the comparison.
    as_they_are = torch.autograd.graph.saved_tensors_hooks(_kept, lambda x: x)
    with torch.inference_mode(False), torch.enable_grad(), as_they_are, main_grads_aside(parameters) as main_grads:
        losses = way(hidden)
        # Each token has a weight of its own, so that exchanged tokens change the gradients.
        weights = torch.linspace(0.5, 1.5, losses.numel(), device=losses.device, dtype=torch.float64)
        total = (losses.double() * weights.view(losses.shape)).sum() if losses.numel() > 1 else losses.double().sum()
        asked = [hidden, *parameters.values()]
        found: Sequence[Tensor | None] = [None] * len(asked)
        if total.requires_grad:
            found = torch.autograd.grad(total, asked, allow_unused=True)
        names = ["hidden states", *parameters]
        gradients = {}
        for name, x, gradient in zip(names, asked, found, strict=True):
            if name in main_grads:  # if backward added the gradient to `main_grad`, autograd's is a dummy
                added = getattr(x, "grad_added_to_main_grad", False)
                gradient = main_grads[name] if added or gradient is None else gradient + main_grads[name]
            gradients[name] = _projected(gradient, x)
        underflow = max(1e3 * torch.finfo(x.dtype).tiny for x in asked)
        unreached = total.requires_grad and all(x is None for x in found)
        return LossAndGradients(losses.detach().double(), gradients, underflow, losses.dtype, unreached)


def _kept(x: Tensor) -> Tensor:
    """Return `x` without its graph: a node that saves its own result would keep itself alive."""
    return x if x.is_leaf else x.detach().requires_grad_()


@contextmanager
def main_grads_aside(parameters: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Give parameters a zero `main_grad` inside the context, for Megatron's fused accumulation; yield these by name."""
    before = {name: dict(vars(x)) for name, x in parameters.items() if getattr(x, "main_grad", None) is not None}
    aside = {}
    for name in before:
        x = parameters[name]
        aside[name] = torch.zeros_like(x.main_grad)  # type: ignore[attr-defined]
        x.main_grad = aside[name]  # type: ignore[attr-defined]
        x.grad_added_to_main_grad = False  # type: ignore[attr-defined]
    try:
        yield aside
    finally:
        for name, attributes in before.items():
            vars(parameters[name]).clear()
            vars(parameters[name]).update(attributes)


def _projected(gradient: Tensor | None, of: Tensor) -> Tensor:
    """Project a gradient `[rows, D]` to fp64 `[rows, 16]`: random sums of its columns, the same on both sides."""
    local = of.to_local() if hasattr(of, "to_local") else of
    rows = local.detach().reshape(-1, local.shape[-1]) if local.dim() > 1 else local.detach().reshape(-1, 1)
    if gradient is None:
        return rows.new_zeros(rows.shape[0], min(rows.shape[1], _PROJECTED), dtype=torch.float64)
    gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    gradient = gradient.detach().reshape(rows.shape)
    if rows.shape[1] <= _PROJECTED:
        return gradient.double()
    generator = torch.Generator().manual_seed(1)
    wide = torch.promote_types(gradient.dtype, torch.float32)
    directions = torch.randn(rows.shape[1], _PROJECTED, generator=generator, dtype=wide).to(gradient.device)
    with torch.autocast(gradient.device.type, enabled=False):
        return torch.cat([part.to(wide) @ directions for part in gradient.split(_ROWS)]).double()


def _tolerance(tensors: list[Tensor], of_losses: torch.dtype) -> _Tolerance:
    """Return the tolerance of the coarsest dtype among the tensors, under autocast or TF32 also of theirs.

    `of_losses`: the dtype of the model's own losses. Losses of any dtype but fp64 add the tolerance of fp32, to which a
    model in fp64 may round its logits. Losses in 16 bits add no more: the fused losses are fp32.
    """
    dtypes = [x.dtype for x in tensors]
    device = tensors[0].device.type
    if torch.is_autocast_enabled(device):
        dtypes.append(torch.get_autocast_dtype(device))
    tolerances = [_TOLERANCES.get(dtype, _TOLERANCES[torch.bfloat16]) for dtype in dtypes]
    if torch.float32 in dtypes and device == "cuda" and torch.backends.cuda.matmul.allow_tf32:
        tolerances.append(_TF32)
    if of_losses != torch.float64:
        tolerances.append(_TOLERANCES[torch.float32])
    return max(tolerances)


@contextmanager
def rng_put_back(device: torch.device) -> Iterator[None]:
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices, enabled=True):
        yield


@contextmanager
def state_put_back(module: nn.Module) -> Iterator[None]:
    """Restore, when the context ends, the state that calls change in `module`: counters, statistics, containers."""
    held = [(own, dict(own)) for each in module.modules() for own in (vars(each), vars(each)["_buffers"])]
    small = [x for own, _ in held for x in own.values() if isinstance(x, Tensor) and x.numel() <= _LARGEST_STATE]
    kept = [x for each in module.modules() for name, x in vars(each).items() if name not in _OF_MODULES]
    kept += [inner for x in kept if isinstance(x, dict) for inner in x.values()]
    entries = [(x, x.copy()) for x in kept if type(x) in _CONTAINERS]
    values = [(x, x._version, x.detach().clone()) for x in small if not x.is_inference() and not x.requires_grad]
    try:
        yield
    finally:
        for own, before in held:
            own.update({name: x for name, x in before.items() if isinstance(x, _STATE) and own.get(name) is not x})
        for x, version, value in values:
            if x._version != version:
                x.copy_(value)
        for x, before in entries:
            if [*map(id, _entries(x))] != [*map(id, _entries(before))]:
                x.clear()
                (x.extend if isinstance(x, list | deque) else x.update)(before)


def _entries(x: Any) -> list[Any]:
    return [*x, *x.values()] if isinstance(x, dict) else [*x]


def relative(own: Tensor, fused: Tensor, scale: float = 0.0) -> float:
    """Divide the norm of the difference by that of `own`, or of a tensor filled with `scale` if that norm is larger.

    Equal infinities do not differ. NaN on both sides is a difference, as nothing is known of the value.
    """
    same = own == fused
    difference = torch.where(same, 0.0, own - fused).norm().item()
    least = max(torch.where(own.isinf(), 0.0, own).norm().item(), scale * own.numel() ** 0.5)
    return difference / least if least > 0 else (float("inf") if difference > 0 else difference)


def why_different(own: LossAndGradients, fused: LossAndGradients, of_losses: float, of_gradients: float) -> str:
    """Say, in words for the middle of a sentence, how the model's own loss differs from the fused one."""
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
    """Return the factor other than 1 by which all losses differ, or None. A single loss has a factor in any case, so
    that only whole numbers up to 8 and their inverses count."""
    square = (fused * fused).sum().item()
    if square == 0:
        return None
    ratio = ((own * fused).sum() / square).item()
    if own.numel() == 1:
        simple = [n for n in range(2, 9) if min(abs(ratio / n - 1), abs(ratio * n - 1)) <= tolerance]
        return ratio if simple else None
    far = abs(ratio - 1) > tolerance
    return ratio if far and relative(own, ratio * fused) <= tolerance else None


def columns_missing(own: LossAndGradients, fused: LossAndGradients) -> int:
    """Count the columns of the logits that have a gradient above `underflow` in the fused loss, and none in the own.

    Such columns may be so unlikely that no other difference shows them.
    """
    name = next(iter([*own.gradients][1:]), None)
    if name is None or not bool(own.gradients[name].any()):
        return 0
    mine, ours = (side.gradients[name].abs().sum(-1) for side in (own, fused))
    return int(((mine == 0) & (ours > fused.underflow)).sum())


def _other_tokens(own: Tensor, fused: Tensor) -> str | None:
    """Say how many tokens have a loss on one side alone; None if no token does."""
    if own.numel() == 1:
        return None
    alone = int(((own == 0) != (fused == 0)).sum())
    return f"other tokens count: {alone} of {own.numel()} have a loss on one side alone" if alone else None


def _constant(own: LossAndGradients, fused: LossAndGradients, of_losses: float, of_gradients: float) -> float | None:
    """Return the constant by which the losses of all tokens differ, if gradients do not differ; else None."""
    difference = own.losses - fused.losses
    constant = difference.mean()
    scale = relative(own.losses, own.losses - (difference - constant))
    gradients = (relative(x, fused.gradients[name]) for name, x in own.gradients.items())
    return constant.item() if scale <= of_losses and all(each <= of_gradients for each in gradients) else None

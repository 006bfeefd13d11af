"""The losses that `benchmarks.losses` measures, each computed by us, by Liger, and by plain PyTorch.

Liger's losses run with their own chunks, not compiled, and with the options that make them the same loss. The reference
model is part of a loss on both sides: Liger computes its log-probabilities inside, our losses get them from
`linear_log_probs`.

Legend: B rows, S positions, D hidden size, V vocabulary, P pairs.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_ext import linear_log_probs, reference
from megatron_ext.losses import DistillationLoss, DPOLoss, GRPOLoss, KTOLoss, ORPOLoss, SimPOLoss

GRPO_BETA = 0.04
BETA = 0.1
GAMMA = 0.5
KL = 0.5  # KTO's KL term, which is subtracted from a row's log-ratio
IGNORED = -100


class Inputs(NamedTuple):
    """The leaves (hidden states, weight), the inputs of each token, and the other model's hidden states and weight."""

    hidden_BSD: Tensor
    weight_VD: Tensor
    labels_BS: Tensor
    mask_BS: Tensor
    advantages_B: Tensor
    old_BS: Tensor
    ref_BS: Tensor
    other_hidden_BSD: Tensor
    other_weight_VD: Tensor

    @property
    def targets_BS(self) -> Tensor:
        """Return the labels, `IGNORED` where the mask is 0."""
        return self.labels_BS.where(self.mask_BS > 0, IGNORED)

    @property
    def desirable_B(self) -> Tensor:
        return torch.arange(len(self.labels_BS)) % 2 == 0


LossOfInputs = Callable[[Inputs], Tensor]


def inputs(sizes: tuple[int, int, int, int]) -> Inputs:
    rows, positions, width, vocab = sizes
    generator = torch.Generator().manual_seed(0)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = randn(rows, positions, width), randn(vocab, width) / width**0.5
    labels = torch.randint(vocab, (rows, positions), generator=generator)
    mask = (torch.rand(rows, positions, generator=generator) < 0.9).float()
    own = linear_log_probs(hidden, weight, labels)
    assert isinstance(own, Tensor)
    old, ref = own + 0.2 * randn(rows, positions), own + 0.2 * randn(rows, positions)
    leaves = hidden.requires_grad_(), weight.requires_grad_()
    other = (hidden + 0.3 * randn(rows, positions, width)).detach(), weight.detach().clone()
    return Inputs(*leaves, labels, mask, randn(rows), old, ref, *other)


def log_probs_alone(given: Inputs) -> Tensor:
    """Return the masked sum of log-probabilities, the least work of a loss of log-probabilities and its gradient."""
    found = linear_log_probs(given.hidden_BSD, given.weight_VD, given.labels_BS, cache=1)
    assert isinstance(found, Tensor)
    return (found * given.mask_BS).sum()


class LossCase(NamedTuple):
    """One loss.

    Attributes:
        name: the loss's name without "loss".
        true: the loss computed from whole logits.
        ours: our loss, which takes options too.
        options: sets of options beside the defaults, by the name of each set.
        liger: a function of `liger_kernel.chunked_loss` to Liger's losses, by the ending of their names.
        base: the function by whose CPU time others are divided; None: no ratio.
    """

    name: str
    true: LossOfInputs
    ours: Callable[..., Tensor]
    options: dict[str, dict[str, Any]]
    liger: Callable[[Any], dict[str, LossOfInputs]]
    base: LossOfInputs | None = log_probs_alone


CACHES: dict[str, dict[str, Any]] = {
    "cache=1": {"cache": 1},
    "cache=0, 256 tokens at a time": {"cache": 0, "chunk_tokens": 256},
}
CHUNKED: dict[str, dict[str, Any]] = {"256 tokens at a time": {"chunk_tokens": 256}}


def _whole(given: Inputs, of_other: bool = False) -> Tensor:
    """Return log-probabilities from whole logits, of the model or the other model."""
    return reference.log_probs(reference.logits(*(given[-2:] if of_other else given[:2])), given.targets_BS)


def _liger_grpo(liger: Any) -> dict[str, LossOfInputs]:
    loss = liger.LigerFusedLinearGRPOLoss(beta=GRPO_BETA, loss_type="dapo", compiled=False, use_ref_model=True)

    def way(given: Inputs) -> Tensor:
        head = given.hidden_BSD, given.weight_VD, given.labels_BS, given.mask_BS, given.advantages_B
        return loss(*head, ref_per_token_logps=given.ref_BS, old_per_token_logps=given.old_BS)[0]

    return {"": way}


def _of_reference_model(given: Inputs) -> Tensor:
    with torch.no_grad():
        found = linear_log_probs(*given[-2:], given.targets_BS, cache=0, chunk_tokens=256)
    assert isinstance(found, Tensor)
    return found


# A function that returns a loss's arguments beside the head and the labels, (by position, by name), from the inputs and
# a function that computes the log-probabilities of the reference model.
Arguments = Callable[[Inputs, LossOfInputs], tuple[tuple[Tensor, ...], dict[str, Any]]]


def _of_log_probs(
    name: str, kind: Any, liger: Callable[[Any], dict[str, LossOfInputs]], arguments: Arguments, **fixed: Any
) -> LossCase:
    """Return the case of one of our losses of log-probabilities, from the fused head or from whole logits."""

    def ours(given: Inputs, **options: Any) -> Tensor:
        placed, named = arguments(given, _of_reference_model)
        return kind(**fixed, **options)(*given[:2], given.targets_BS, *placed, **named)[0]

    def true(given: Inputs) -> Tensor:
        placed, named = arguments(given, functools.partial(_whole, of_other=True))
        return kind(**fixed).from_log_probs(_whole(given), *placed, mask=given.mask_BS, **named)[0]

    return LossCase(name, true, ours, CACHES, liger)


# Options of Liger's losses that differ from their defaults: use the reference model, add no likelihood.
_LIGER_OPTIONS: dict[str, dict[str, Any]] = {"KTO": {"use_ref_model": True}, "SimPO": {"compute_nll_loss": False}}


def _liger_preference(name: str, with_reference: bool, liger: Any) -> dict[str, LossOfInputs]:
    options = _LIGER_OPTIONS.get(name, {})
    loss = getattr(liger, f"LigerFusedLinear{name}Loss")(beta=BETA, compiled=False, **options)

    def way(given: Inputs) -> Tensor:
        other = {"ref_input": given.other_hidden_BSD, "ref_weight": given.other_weight_VD} if with_reference else {}
        if name == "KTO":
            labels = {"preference_labels": given.desirable_B, "kl": torch.tensor(KL)}
            return loss(given.hidden_BSD, given.weight_VD, given.targets_BS, **labels, **other)[0]
        return loss(given.weight_VD, given.hidden_BSD, given.targets_BS, **other)[0]

    return {"": way}


def _distillation(divergence: str, given: Inputs, **options: Any) -> Tensor:
    loss = DistillationLoss(divergence=divergence, **options)  # type: ignore[arg-type]
    return loss(*given[:2], *given[-2:], mask=given.mask_BS)[0]


def _true_distillation(divergence: str, given: Inputs) -> Tensor:
    student, teacher = (reference.logits(*head).log_softmax(-1) for head in (given[:2], given[-2:]))

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p.exp() * (p - q)).sum(-1)

    if divergence == "jsd":
        middle = torch.logaddexp(student, teacher) - torch.tensor(2.0).double().log()
        found = (kl(student, middle) + kl(teacher, middle)) / 2
    else:
        found = kl(teacher, student) if divergence == "forward" else kl(student, teacher)
    return (found * given.mask_BS).sum() / given.mask_BS.sum()


def _liger_distillation(beta: float, liger: Any) -> dict[str, LossOfInputs]:
    def way(loss: Any, given: Inputs) -> Tensor:
        student, teacher = given.hidden_BSD.flatten(0, 1), given.other_hidden_BSD.flatten(0, 1)
        return loss(student, given.weight_VD, teacher, given.other_weight_VD, given.targets_BS.flatten())

    alone = functools.partial(
        liger.LigerFusedLinearJSDLoss, weight_hard_loss=0.0, weight_soft_loss=1.0, beta=beta, compiled=False
    )
    chunked = functools.partial(way, alone(chunk_size=256))
    return {"": functools.partial(way, alone()), ", 256 tokens at a time": chunked}


def _of_pairs(name: str, kind: Any, with_reference: bool = False, **fixed: Any) -> LossCase:
    def arguments(given: Inputs, of_reference: LossOfInputs) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        return (), {"reference_log_probs": of_reference(given)} if with_reference else {}

    liger = functools.partial(_liger_preference, name, with_reference)
    return _of_log_probs(name, kind, liger, arguments, beta=BETA, **fixed)


def _apart(name: str, divergence: str, beta: float) -> LossCase:
    ours, true = (functools.partial(f, divergence) for f in (_distillation, _true_distillation))
    return LossCase(name, true, ours, CHUNKED, functools.partial(_liger_distillation, beta), None)


GRPO = _of_log_probs(
    "GRPO",
    GRPOLoss,
    _liger_grpo,
    lambda given, _: ((given.advantages_B,), {"old_log_probs": given.old_BS, "reference_log_probs": given.ref_BS}),
    beta=GRPO_BETA,
)
KTO = _of_log_probs(
    "KTO",
    KTOLoss,
    functools.partial(_liger_preference, "KTO", True),
    lambda given, of_reference: ((given.desirable_B,), {"reference_log_probs": of_reference(given), "kl": KL}),
    beta=BETA,
)
CASES = [
    GRPO._replace(options=CACHES | {"cache=3/16": {"cache": 3 / 16}}),
    _of_pairs("DPO", DPOLoss, with_reference=True),
    KTO,
    _of_pairs("ORPO", ORPOLoss),
    _of_pairs("SimPO", SimPOLoss, gamma=GAMMA),
    _apart("Forward KL", "forward", 0.0),
    _apart("Reverse KL", "reverse", 1.0),
    _apart("JSD", "jsd", 0.5),
]

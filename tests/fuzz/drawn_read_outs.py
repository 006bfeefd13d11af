"""Read-outs, of which one call of a head or of logits takes several, each with its true results in fp64."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import head, reference
from tests.fuzz.cross_entropy import labels_and_mask
from tests.fuzz.distillation import Divergence
from tests.fuzz.draw import Draw, Vocabulary

Arranged = Callable[[Tensor], Tensor]


def as_they_are(x: Tensor) -> Tensor:
    return x


@dataclass
class Made:
    """One read-out.

    Attributes:
        read_out: function of (teacher, arrangement) to the read-out. An arrangement is a function from a tensor of all
            tokens to the tensor of those that are read, and returns the same object for the same tensor.
        true: function of the transformed fp64 logits of student and teacher to the results.
        shapes: the shape of each result, None for a result without gradient.
    """

    read_out: Callable[[Any, Arranged], Any]
    true: Callable[[Tensor, Tensor], list[Tensor]]
    shapes: list[tuple[int, ...] | None]


class Tokens:
    """Arguments that read-outs share: labels, a mask of those that count, the vocabulary's size, the temperature."""

    def __init__(self, draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, temperature: float = 1.0):
        self.draw, self.lead, self.temperature = draw, lead, temperature
        self.vocabulary, self.size = vocabulary, vocabulary.size
        self.labels = labels_and_mask(draw, lead, vocabulary, -100)[0].long()
        self.counts = self.labels != -100

    def counted(self, x: Tensor) -> Tensor:
        return x.where(self.counts, 0.0)


def _loss(t: Tokens) -> Made:
    o = t.draw.options(
        label_smoothing=(0.0, 0.1), z_loss=(0.0, 1e-3), smooth_others=(False, True), z_apart=(False, True)
    )
    smoothing, factor = o.get("label_smoothing", 0.0), o.get("z_loss", 0.0)
    if t.size == 1:  # no others
        o.pop("smooth_others", None)
    if o.get("smooth_others"):
        smoothing *= t.size / (t.size - 1)

    def true(z: Tensor, p: Tensor) -> list[Tensor]:
        loss = reference.cross_entropy(z, t.labels, t.size, -100, smoothing, factor)
        if not o.get("z_apart"):
            return [loss]
        apart = t.counted(factor * reference.counted(z, t.size).logsumexp(-1).square()).detach()
        return [loss - apart, apart]

    shapes = [t.lead, None] if o.get("z_apart") else [t.lead]
    return Made(lambda teacher, of: head.CrossEntropy(of(t.labels), **o), true, shapes)


def _log_prob(t: Tokens) -> Made:
    return Made(
        lambda teacher, of: head.LogProbs(of(t.labels)),
        lambda z, p: [reference.log_probs(z, t.labels, t.size)],
        [t.lead],
    )


def _hits(t: Tokens) -> Made:
    return Made(
        lambda teacher, of: head.IsArgmax(of(t.labels)),
        lambda z, p: [(z[..., : t.size].detach().argmax(-1) == t.labels) & t.counts],
        [None],
    )


def _of_rows(read_out: type, true: Callable[[Tensor], Tensor]) -> Callable[[Tokens], Made]:
    def make(t: Tokens) -> Made:
        given = (t.counts,) if t.draw.chance(0.3) else ()
        counted = t.counted if given else lambda x: x
        return Made(
            lambda teacher, of: read_out(*map(of, given)), lambda z, p: [counted(true(z[..., : t.size]))], [t.lead]
        )

    return make


def _gather(t: Tokens) -> Made:
    ids, normalised = t.draw.ids((*t.lead, t.draw.integer(1, 5)), t.size), t.draw.chance(0.5)

    def true(z: Tensor, p: Tensor) -> list[Tensor]:
        z = reference.counted(z, t.size)
        return [(z.log_softmax(-1) if normalised else z * t.temperature).gather(-1, ids.long())]

    return Made(lambda teacher, of: head.Gather(of(ids), normalised), true, [tuple(ids.shape)])


def _top_k(t: Tokens) -> Made:
    k, normalised = t.draw.random.choice([1, min(3, t.size), t.size]), t.draw.chance(0.5)

    def true(z: Tensor, p: Tensor) -> list[Tensor]:
        z = z[..., : t.size]
        order = z.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]
        return [(z.log_softmax(-1) if normalised else z * t.temperature).gather(-1, order), order]

    return Made(lambda teacher, of: head.TopK(k, normalised), true, [(*t.lead, k), None])


def _kept(read_out: type) -> Callable[[Tokens], Made]:
    """Return the maker of a read-out over the ids that a sampler kept: the label's and any others."""

    def make(t: Tokens) -> Made:
        kept = torch.rand((*t.lead, t.size), generator=t.draw.generator) < t.draw.random.choice([0.1, 0.5, 1.0])
        safe = t.labels.where(t.counts, 0).unsqueeze(-1)
        kept = (kept | torch.zeros_like(kept).scatter(-1, safe, True)) & t.counts.unsqueeze(-1)
        there = kept | ~t.counts.unsqueeze(-1)

        def true(z: Tensor, p: Tensor) -> list[Tensor]:
            z = z[..., : t.size].masked_fill(~there, -torch.inf)
            return [reference.log_probs(z, t.labels) if read_out is head.Kept else t.counted(reference.entropy(z))]

        def made(teacher: Any, of: Arranged) -> Any:
            rows = of(kept).reshape(-1, t.size)
            return read_out(of(t.labels), F.pad(rows.sum(1).cumsum(0), (1, 0)), rows.nonzero()[:, 1])

        return Made(made, true, [t.lead])

    return make


def _sampled(t: Tokens) -> Made:
    top_k, top_p = t.draw.random.choice([1, 3, 100, 5000, None]), t.draw.random.choice([1.0, 0.9, 0.537])

    def true(z: Tensor, p: Tensor) -> list[Tensor]:
        found = reference.sampled_log_probs(z, t.labels, top_k, top_p if top_p < 1 else torch.inf, t.size)
        return [found.where(found > -torch.inf, found.detach())]

    return Made(lambda teacher, of: head.Sampled(of(t.labels), top_k, top_p), true, [t.lead])


def _divergence(
    make: Callable[..., Any], formula: Callable[[Tensor, Tensor], Tensor], **named: Any
) -> Callable[[Tokens], Made]:
    def made(t: Tokens) -> Made:
        return Made(
            lambda teacher, of: make(teacher, **named),
            lambda z, p: [formula(*(x[..., : t.size].log_softmax(-1) for x in (z, p)))],
            [t.lead],
        )

    return made


def _jensen_shannon(t: Tokens) -> Made:
    named = t.draw.options(beta=(0.5, 0.1, 0.9))
    return _divergence(head.JensenShannon, Divergence("jsd", **named).of, **named)(t)


# By name. Those of the softmax alone need no logits in backward.
OF_SOFTMAX: dict[str, Callable[[Tokens], Made]] = {
    "loss": _loss,
    "log-probability": _log_prob,
    "hits": _hits,
    "entropy": _of_rows(head.Entropy, reference.entropy),
    "mean logit": _of_rows(head.MeanLogit, lambda z: z.mean(-1)),
    "log-sum-exp": _of_rows(head.LogSumExp, lambda z: z.logsumexp(-1)),
    "z-loss": _of_rows(head.ZLoss, lambda z: z.logsumexp(-1).square()),
}
OTHERS: dict[str, Callable[[Tokens], Made]] = {
    "sum of squares": _of_rows(head.SumOfSquares, lambda z: z.softmax(-1).square().sum(-1)),
    "gather": _gather,
    "top-k": _top_k,
    "kept": _kept(head.Kept),
    "kept entropy": _kept(head.KeptEntropy),
    "sampled": _sampled,
    "KL": _divergence(head.KL, Divergence("forward").of),
    "reverse KL": _divergence(head.KL, Divergence("reverse").of, direction="reverse"),
    "soft cross entropy": _divergence(
        lambda teacher: head.KL(teacher, "cross entropy"), lambda q, p: -(p.exp() * q).sum(-1)
    ),
    "JS": _jensen_shannon,
    "total variation": _divergence(head.TotalVariation, lambda q, p: (q.exp() - p.exp()).abs().sum(-1) / 2),
    "acceptance": _divergence(head.AcceptanceRate, lambda q, p: torch.minimum(q, p).exp().sum(-1)),
}
BY_NAME = OF_SOFTMAX | OTHERS
# Whose results a rounding may change altogether, where logits are equal or nearly so.
OF_ORDER = {"hits", "top-k", "sampled"}
OF_KINKS = {"total variation", "acceptance"}
OF_A_TEACHER = {"KL", "reverse KL", "soft cross entropy", "JS", "total variation", "acceptance"}


def names(draw: Draw) -> list[str]:
    """Draw one to four names, half of the time only of softmax read-outs; with `exact` numbers, which may be equal, no
    read-out whose gradient jumps there."""
    among = [name for name in (OF_SOFTMAX if draw.chance(0.5) else BY_NAME) if not (draw.exact and name in OF_KINKS)]
    found = draw.random.sample(among, draw.integer(1, min(4, len(among))))
    draw.record["read-outs"] = found
    return found


def read(tokens: Tokens, names: list[str]) -> tuple[list[Made], bool, list[Tensor | None]]:
    """Return the read-outs of these names, whether any has a teacher, and each result's upstream gradient or None."""
    made = [BY_NAME[name](tokens) for name in names]
    shapes = [shape for one in made for shape in one.shapes]
    slopes = [None if shape is None else tokens.draw.upstream(*shape) for shape in shapes]
    return made, bool(OF_A_TEACHER & set(names)), slopes


def flat(found: Any, several: bool) -> list[Tensor]:
    each = found if several else (found,)
    return [x for one in each for x in (one if isinstance(one, tuple) else (one,))]

"""Cases of `LmHead.read` and `Logits.read`: several read-outs in one call with any options, and refused combinations.

In 16 and 32 bits tensors hold small integers and logits are exact: else a rounding may change which id is likeliest.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_ext import reference
from megatron_ext.head import (
    KL,
    CrossEntropy,
    DraftVocabulary,
    Entropy,
    IsArgmax,
    LmHead,
    Logits,
    LoRA,
    Teacher,
    TopK,
    batch_invariant_mode,
)
from tests.fuzz import drawn_read_outs
from tests.fuzz.case import START, Case, Cut, eps, whole
from tests.fuzz.cross_entropy import bent, group, labels_and_mask, most_of_a_slice, results_dtype, slices
from tests.fuzz.draw import Draw, Vocabulary
from tests.fuzz.drawn_read_outs import Tokens, as_they_are
from tests.head.test_quantised import Packed

ROUNDINGS = 16


class _Packed(Packed):
    """A weight of eight bits a number with one scale, which is exact for numbers of `_packable`."""

    def __init__(self, numbers: Tensor, dtype: torch.dtype):
        self.scale, self.made = torch.tensor(1 / 32), []
        self.bytes = (numbers / self.scale).round().to(torch.int8)


def _packable(numbers: Tensor) -> Tensor:
    return (numbers * 32).round().clamp(-127, 127) / 32


@dataclass
class Side:
    """The unsharded head of the student or of the teacher, with its hidden states.

    Attributes:
        hidden, weight: the factors of the logits, to which `bias` and `adapters` (A, B, scaling) add.
        facts: options of `LmHead` that change the logits.
        packed: whether the weight is quantised and frozen.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    adapters: list[tuple[Tensor, Tensor, float]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    packed: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        """Return the arguments of `logits` and `head` after the hidden states; all but the A are sharded by rows."""
        beside = [] if self.bias is None else [self.bias]
        return [self.weight, *beside, *(x for a, b, _ in self.adapters for x in (a, b))]

    def cuts(self, rows: Cut) -> list[Cut]:
        return [rows] * (2 if self.bias is not None else 1) + [whole, rows] * len(self.adapters)

    def split(self, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor | None, list[tuple[Tensor, Tensor, float]]]:
        weight, *rest = tensors
        bias = rest.pop(0) if self.bias is not None else None
        scalings = [scaling for _, _, scaling in self.adapters]
        return weight, bias, list(zip(rest[0::2], rest[1::2], scalings, strict=True))

    def logits(self, hidden: Tensor, *tensors: Tensor) -> Tensor:
        """Return the logits in fp64, scaled, capped and divided by the temperature."""
        w, bias, adapters = self.split(tensors)
        z = reference.logits(hidden, w, bias)
        for a, b, scaling in adapters:
            z = z + scaling * (hidden @ a.t() @ b.t())
        return bent(self.facts.get("logit_scale", 1.0) * z, self.facts)

    def head(self, tensors: Sequence[Tensor], *arguments: Any, **options: Any) -> LmHead:
        w, bias, adapters = self.split(tensors)
        packed: Any = _Packed(w.detach(), w.dtype) if self.packed else w
        lora = [LoRA(a, b, scaling) for a, b, scaling in adapters] or None
        return LmHead(packed, *arguments, bias=bias, lora=lora, **self.facts, **options)

    def largest(self) -> float:
        """Return about the largest possible logit."""
        sizes = [max(x.double().abs().max().item(), 1.0) if x.numel() else 1.0 for x in (self.hidden, self.weight)]
        found = self.weight.shape[1] * sizes[0] * sizes[1] * (1 + 8 * len(self.adapters))
        found = (found + 4) * self.facts.get("logit_scale", 1.0)
        return min(found, self.facts.get("softcap", found)) / self.facts.get("temperature", 1.0)


def _side(
    draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, dtype: torch.dtype, weight_dtype: torch.dtype, caps: bool
) -> Side:
    width = draw.integer(1, 8)
    hidden = draw.strided(draw.normal(*lead, width, dtype=dtype))
    packed = weight_dtype == dtype and draw.chance(0.15)
    weight = draw.words(draw.normal(vocabulary.columns, width, dtype=weight_dtype))
    adapters = []
    for _ in range(draw.random.choice([0, 0, 0, 1, 2])):
        r, scaling = draw.integer(1, 2), draw.random.choice([1.0, 2.0])
        pair = [draw.normal(r, width, dtype=weight_dtype), draw.normal(vocabulary.columns, r, dtype=weight_dtype)]
        adapters.append((*(x.clamp(-1, 1) if draw.exact else x for x in pair), scaling))
    bias = draw.normal(vocabulary.columns, dtype=weight_dtype) if draw.chance(0.3) else None
    facts = draw.options(logit_scale=(1.0, 0.5, 2.0), **({"softcap": (None, 5.0, 30.0)} if caps else {}))
    draw.record |= {"width": width, "packed": packed, "lora": [(len(a), s) for a, _, s in adapters]}
    draw.record |= {"bias": bias is not None}
    return Side(hidden, _packable(weight) if packed else weight, bias, adapters, facts, packed)


def _counted(counts: Tensor, found: list[Tensor]) -> list[Tensor]:
    """Return results with 0 for tokens that do not count."""
    return [x.masked_fill(~counts.reshape(counts.shape + (1,) * (x.dim() - counts.dim())), 0) for x in found]


def read(draw: Draw, several: float = 0.2) -> Case:
    """Draw a case of `LmHead.read`; `several`: how probably a teacher's token has several of the student's."""
    layout = draw.one_of("layout", "replicated", "sequence")
    lead = draw.leading(layout == "sequence")
    dtype = draw.dtype(*((torch.float64, torch.float32, torch.bfloat16) if draw.exact else (torch.float64,)))
    fp32_head = dtype == torch.bfloat16 and draw.one_of("fp32 weight", False, True)
    autocast = dtype == torch.float32 and draw.one_of("autocast", False, False, True)
    names = drawn_read_outs.names(draw)
    vocabulary = draw.vocabulary(equal_width="sampled" in names)
    weight_dtype = torch.float32 if fp32_head else dtype
    # Of logits that are equal a softcap may make others, by an ulp: it depends on the element's place.
    caps = dtype == torch.float64 and not (draw.exact and drawn_read_outs.OF_ORDER & set(names))
    student = _side(draw, lead, vocabulary, dtype, weight_dtype, caps)
    student.facts |= draw.options(temperature=(1.0, 0.5, 2.0))
    settings = draw.options(
        cache=("bounded", 0, 0.3, 1, 5000), chunk_tokens=(None, 1, 3), bits=("fast", "fast", "batch")
    )
    if dtype == torch.bfloat16 and not fp32_head:
        settings |= draw.options(logit_dtype=(None, torch.bfloat16))
    frozen, mode = draw.chance(0.2) or student.packed, draw.chance(0.1)
    fused = draw.chance(0.2) and not frozen
    draw.record |= {"frozen": frozen, "fused": fused, "mode": mode}
    tokens = Tokens(draw, lead, vocabulary, student.facts.get("temperature", 1.0))
    made, taught, upstream = drawn_read_outs.read(tokens, names)
    drafts = taught and len(lead) > 1 + (layout == "sequence") and draw.chance(several)  # of one target
    theirs = _side(draw, lead[:-1] if drafts else lead, vocabulary, dtype, dtype, caps) if taught else None
    skip = draw.one_of("counts", None, None, "all that count", "a bound", "too small a bound")
    most = most_of_a_slice(tokens.counts, draw.ranks if layout == "sequence" else 1)
    bound = {"a bound": most + draw.integer(0, 2), "too small a bound": max(1, most - 1)}.get(skip)
    cut, rows = slices(draw, layout), vocabulary.rows

    def truth(x: Tensor, *tensors: Tensor) -> list[Tensor]:
        z, p = student.logits(x, *tensors), torch.zeros(0)
        if theirs is not None:
            p = theirs.logits(*(t.double() for t in (theirs.hidden, *theirs.tensors))) / tokens.temperature
            p = p.unsqueeze(-2).expand_as(z) if drafts else p
        found = [x for one in made for x in one.true(z, p)]
        return found if skip is None else _counted(tokens.counts, found)

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        x, *tensors = mine
        if fused:
            tensors[0].main_grad = torch.full(tensors[0].shape, START, dtype=results_dtype(dtype))  # type: ignore[attr-defined]
        shared: dict[str, Any] = {"vocab": vocabulary.argument(rank)}
        head = student.head(tensors, group(draw), layout, gradient_accumulation_fusion=fused, **shared, **settings)
        teacher = None
        if theirs is not None:
            own = [c(t, rank) for t, c in zip(theirs.tensors, theirs.cuts(rows), strict=True)]
            teacher = Teacher(theirs.head(own, group(draw), layout, **shared), cut(theirs.hidden, rank))
        only: dict[str, Any] = {} if skip is None else {"counts": tokens.counts}
        if bound is not None:
            only["at_most"] = bound
        with (
            batch_invariant_mode() if mode else contextlib.nullcontext(),
            torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)),
        ):
            found = head.read(x, *(one.read_out(teacher, as_they_are) for one in made), **only)
        return drawn_read_outs.flat(found, len(made) > 1)

    largest = max(side.largest() for side in (student, theirs) if side is not None)
    narrow = max(dtype, torch.bfloat16 if autocast else dtype, key=eps)
    inputs = [(student.hidden, cut), *zip(student.tensors, student.cuts(rows), strict=True)]
    return Case(
        f"LmHead.read of {names}",
        inputs,
        truth,
        ours,
        upstream,
        logit_size=largest,
        value_dtype=results_dtype(dtype),
        wanted=[draw.chance(0.9), not frozen] + [True] * (len(inputs) - 2),
        grad_size=_gradient_size(lead, student.facts),
        refused="more tokens count" if bound is not None and bound < most else None,
        grad_rounding=eps(narrow) + eps(results_dtype(dtype)) * (largest + 1),
        roundings=ROUNDINGS,
    )


def read_logits(draw: Draw) -> Case:
    """Draw a case of `Logits.read`."""
    lead, dtype = draw.leading(), draw.dtype()
    names = drawn_read_outs.names(draw)
    vocabulary = draw.vocabulary(equal_width="sampled" in names)
    caps = dtype == torch.float64 and not (draw.exact and drawn_read_outs.OF_ORDER & set(names))
    z, theirs = (
        draw.strided(draw.words(draw.normal(*lead, vocabulary.columns, dtype=dtype, size=2.0), -1)) for _ in range(2)
    )
    facts, their_facts = (draw.options(**({"softcap": (None, 5.0, 30.0)} if caps else {})) for _ in range(2))
    facts |= draw.options(temperature=(1.0, 0.5, 2.0))
    settings = draw.options(chunk_tokens=(None, 1, 3), gradient_into_logits=(False, True))
    tokens = Tokens(draw, lead, vocabulary, facts.get("temperature", 1.0))
    made, taught, upstream = drawn_read_outs.read(tokens, names)

    def truth(z: Tensor) -> list[Tensor]:
        p = bent(theirs.double(), their_facts) / tokens.temperature
        return [x for one in made for x in one.true(bent(z, facts), p)]

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        shared = {"vocab": vocabulary.argument(rank)}
        teacher = Logits(vocabulary.last(theirs, rank), group(draw), **shared, **their_facts) if taught else None
        logits = mine[0] * 1 if settings.get("gradient_into_logits") else mine[0]
        found = Logits(logits, group(draw), **shared, **facts, **settings).read(
            *(one.read_out(teacher, as_they_are) for one in made)
        )
        return drawn_read_outs.flat(found, len(made) > 1)

    largest = max(x.double().abs().max().item() if x.numel() else 0.0 for x in (z, theirs)) / tokens.temperature
    return Case(
        f"Logits.read of {names}",
        [(z, vocabulary.last)],
        truth,
        ours,
        upstream,
        logit_size=largest,
        value_dtype=results_dtype(dtype),
        grad_size=4.0 / min(1.0, tokens.temperature),
        grad_rounding=eps(dtype) + eps(results_dtype(dtype)) * (largest + 1),
        roundings=ROUNDINGS,
    )


def draft(draw: Draw) -> Case:
    """Draw a case of a draft head over a part of the target's vocabulary, to which labels, shards and teacher belong.

    Labels outside of the part have no loss, and the teacher's distribution is over the part alone. The target's own
    head tells whether its choice is in the part.
    """
    layout = draw.one_of("layout", "replicated", "sequence")
    lead, vocabulary = draw.leading(layout == "sequence"), draw.vocabulary(least=2)
    width, their_width = draw.integer(1, 8), draw.integer(1, 8)
    t2d = torch.rand(vocabulary.size, generator=draw.generator) < draw.one_of("part", 0.1, 0.5, 0.9)
    t2d[draw.integer(0, vocabulary.size - 1)] = True
    ids = t2d.nonzero().squeeze(1)
    hidden, weight = draw.normal(*lead, width), draw.words(draw.normal(len(ids), width))
    theirs = draw.normal(*lead, their_width), draw.words(draw.normal(vocabulary.columns, their_width))
    their_bias = draw.normal(vocabulary.columns)
    labels = labels_and_mask(draw, lead, vocabulary, -100)[0].long()
    by_mask, temperature = draw.one_of("by mask", True, False), draw.one_of("temperature", 1.0, 0.5)
    draft_of = torch.full((vocabulary.size + 100,), -100).index_copy(0, ids, torch.arange(len(ids)))

    def vocabulary_of() -> DraftVocabulary:
        if by_mask:
            return DraftVocabulary.of_mask(t2d)
        return DraftVocabulary(ids - torch.arange(len(ids)), vocabulary.size)

    def rows(x: Tensor, rank: int) -> Tensor:
        """Return the draft head's rows whose target ids are in this rank's shard."""
        start, stop = vocabulary.bounds[rank]
        return x[(ids >= start) & (ids < stop)]

    def truth(x: Tensor, w: Tensor) -> list[Tensor]:
        z = reference.logits(x, w) / temperature
        p = reference.logits(theirs[0], theirs[1][ids], their_bias[ids]) / temperature
        places = draft_of[labels.where(labels >= 0, vocabulary.size)]
        inside, choices = places >= 0, reference.logits(*theirs, their_bias)[..., : vocabulary.size].argmax(-1)
        found = [reference.cross_entropy(z, places), reference.kl_divergence(p, z)]
        return [*found, reference.entropy(z).where(inside, 0.0), (z.argmax(-1) == places) & inside, t2d[choices]]

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        part, target = vocabulary_of(), vocabulary.shard(rank)
        found = part.labels(labels)
        assert torch.equal(found.outside, (labels >= 0) & (draft_of[labels.where(labels >= 0, -1)] < 0)), "outside"
        shared: dict[str, Any] = {"vocab": part.shard(target)}
        weight, bias = (part.rows(vocabulary.rows(x, rank), target) for x in (theirs[1], their_bias))
        teacher = LmHead(weight, group(draw), layout, bias=bias, **shared)
        head = LmHead(mine[1], group(draw), layout, temperature=temperature, **shared)
        their_hidden, inside = slices(draw, layout)(theirs[0], rank), found.labels != -100
        read_outs = (
            CrossEntropy(found.labels),
            KL(Teacher(teacher, their_hidden)),
            Entropy(inside),
            IsArgmax(found.labels),
        )
        weight, bias = (vocabulary.rows(x, rank) for x in (theirs[1], their_bias))
        _, choices = LmHead(weight, group(draw), layout, bias=bias, vocab=target).read(their_hidden, TopK(1))
        return [*head.read(mine[0], *read_outs), ~part.labels(choices.squeeze(-1)).outside]

    return Case(
        f"a draft head of {len(ids)} ids",
        [(hidden, slices(draw, layout)), (weight, rows)],
        truth,
        ours,
        [*(draw.upstream(*lead) for _ in range(3)), None, None],
        logit_size=64.0 / temperature,
        grad_size=_gradient_size(lead, {"temperature": temperature}),
        roundings=ROUNDINGS,
    )


def _gradient_size(lead: tuple[int, ...], facts: dict[str, Any]) -> float:
    """Return the size of terms of which a gradient over these tokens may be the difference."""
    scale = facts.get("logit_scale", 1.0) / facts.get("temperature", 1.0)
    return 8.0 * max(scale, 1.0) * max(1, torch.Size(lead).numel()) ** 0.5

"""Cases of `LmHead.read`: several read-outs in one call, of a head with any of its options, and what it refuses.

Logits are exact in 16 and 32 bits, where tensors hold small integers: else a rounding may change which id is likeliest.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import reference
from megatron_ext.head import (
    KL,
    AcceptanceRate,
    CrossEntropy,
    Entropy,
    Gather,
    JensenShannon,
    Kept,
    KeptEntropy,
    LmHead,
    LogProbs,
    LogSumExp,
    LoRA,
    MeanLogit,
    Sampled,
    SumOfSquares,
    Teacher,
    TotalVariation,
    ZLoss,
    batch_invariant_mode,
)
from tests.fuzz.case import Case, Cut, whole
from tests.fuzz.cross_entropy import bent, group, labels_and_mask, results_dtype, slices
from tests.fuzz.draw import Draw, Vocabulary

# A read-out, its results from fp64 logits that are bent (and a teacher's), and their shapes.
Made = tuple[Any, Callable[[Tensor, Tensor], list[Tensor]], list[tuple[int, ...]]]


class _Tokens:
    """What read-outs of a call share: labels and which of them count, sizes, and a teacher."""

    def __init__(self, draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary):
        self.draw, self.lead, self.size = draw, lead, vocabulary.size
        self.labels = labels_and_mask(draw, lead, vocabulary, -100)[0].long()
        self.counts = self.labels != -100
        self.temperature = 1.0
        self.teacher: Any = None

    def counted(self, x: Tensor) -> Tensor:
        return x.where(self.counts, 0.0)


def _of_labels(name: str) -> Callable[[_Tokens], Made]:
    def make(t: _Tokens) -> Made:
        o = t.draw.options(label_smoothing=(0.0, 0.1), z_loss=(0.0, 1e-3)) if name == "loss" else {}
        if name == "loss":
            true = [o.get("label_smoothing", 0.0), o.get("z_loss", 0.0)]
            return (
                CrossEntropy(t.labels, **o),
                lambda z, p: [reference.cross_entropy(z, t.labels, t.size, -100, *true)],
                [t.lead],
            )
        return LogProbs(t.labels), lambda z, p: [reference.log_probs(z, t.labels, t.size)], [t.lead]

    return make


def _of_rows(read_out: type, true: Callable[[Tensor], Tensor]) -> Callable[[_Tokens], Made]:
    def make(t: _Tokens) -> Made:
        some = t.draw.chance(0.3)
        counted = t.counted if some else lambda x: x
        return (
            read_out(t.counts) if some else read_out(),
            lambda z, p: [counted(true(z[..., : t.size]))],
            [t.lead],
        )

    return make


def _gather(t: _Tokens) -> Made:
    ids = torch.randint(t.size, (*t.lead, t.draw.integer(1, 4)), generator=t.draw.generator)
    normalised = t.draw.chance(0.5)

    def true(z: Tensor, p: Tensor) -> list[Tensor]:
        z = reference.counted(z, t.size)
        return [(z.log_softmax(-1) if normalised else z * t.temperature).gather(-1, ids)]

    return Gather(ids, normalised), true, [tuple(ids.shape)]


def _kept(read_out: type) -> Callable[[_Tokens], Made]:
    """Rows of the ids that a sampler kept: the label's, and any others."""

    def make(t: _Tokens) -> Made:
        kept = torch.rand((*t.lead, t.size), generator=t.draw.generator) < t.draw.random.choice([0.1, 0.5, 1.0])
        safe = t.labels.where(t.counts, 0).unsqueeze(-1)
        kept = (kept | torch.zeros_like(kept).scatter(-1, safe, True)) & t.counts.unsqueeze(-1)
        flat = kept.reshape(-1, t.size)
        offsets, ids = F.pad(flat.sum(1).cumsum(0), (1, 0)), flat.nonzero()[:, 1]
        there = kept | ~t.counts.unsqueeze(-1)

        def true(z: Tensor, p: Tensor) -> list[Tensor]:
            z = z[..., : t.size].masked_fill(~there, -torch.inf)
            if read_out is Kept:
                return [reference.log_probs(z, t.labels)]
            return [t.counted(reference.entropy(z))]

        return read_out(t.labels, offsets, ids), true, [t.lead]

    return make


def _sampled(t: _Tokens) -> Made:
    top_k, top_p = t.draw.random.choice([1, 3, 100, None]), t.draw.random.choice([1.0, 0.9, 0.537])

    def true(z: Tensor, p: Tensor) -> list[Tensor]:
        found = reference.sampled_log_probs(z, t.labels, top_k, top_p if top_p < 1 else torch.inf, t.size)
        return [found.where(found > -torch.inf, found.detach())]

    return Sampled(t.labels, top_k, top_p), true, [t.lead]


def _divergence(make: Callable[[Any], Any], of: Callable[[Tensor, Tensor], Tensor]) -> Callable[[_Tokens], Made]:
    def made(t: _Tokens) -> Made:
        def true(z: Tensor, p: Tensor) -> list[Tensor]:
            return [of(*(x[..., : t.size].log_softmax(-1) for x in (z, p)))]

        return make(t.teacher), true, [t.lead]

    return made


def _js(q: Tensor, p: Tensor) -> Tensor:
    m = torch.logaddexp(q, p) - math.log(2)
    return ((q.exp() * (q - m)).sum(-1) + (p.exp() * (p - m)).sum(-1)) / 2


SOFTMAX: dict[str, Callable[[_Tokens], Made]] = {
    "loss": _of_labels("loss"),
    "log-probability": _of_labels("log-probability"),
    "entropy": _of_rows(Entropy, reference.entropy),
    "mean logit": _of_rows(MeanLogit, lambda z: z.mean(-1)),
    "log-sum-exp": _of_rows(LogSumExp, lambda z: z.logsumexp(-1)),
    "z-loss": _of_rows(ZLoss, lambda z: z.logsumexp(-1).square()),
}
OTHERS: dict[str, Callable[[_Tokens], Made]] = {
    "sum of squares": _of_rows(SumOfSquares, lambda z: z.softmax(-1).square().sum(-1)),
    "gather": _gather,
    "kept": _kept(Kept),
    "kept entropy": _kept(KeptEntropy),
    "sampled": _sampled,
    "KL": _divergence(KL, lambda q, p: (p.exp() * (p - q)).sum(-1)),
    "JS": _divergence(JensenShannon, _js),
    "total variation": _divergence(TotalVariation, lambda q, p: (q.exp() - p.exp()).abs().sum(-1) / 2),
    "acceptance": _divergence(AcceptanceRate, lambda q, p: torch.minimum(q, p).exp().sum(-1)),
}


def _adapters(draw: Draw, width: int, columns: int, dtype: torch.dtype) -> list[tuple[Tensor, Tensor, float]]:
    found = []
    for _ in range(draw.random.choice([0, 0, 1, 2])):
        r, scaling = draw.integer(1, 2), draw.random.choice([1.0, 2.0])
        pair = [draw.normal(r, width, dtype=dtype), draw.normal(columns, r, dtype=dtype)]
        found.append((*(x.clamp(-1, 1) if draw.exact else x for x in pair), scaling))
    draw.record["lora"] = [(len(a), scaling) for a, _, scaling in found]
    return found


def _drawn_readouts(draw: Draw, tokens: _Tokens) -> list[tuple[str, Made]]:
    """One to four of them, half of the time of the softmax alone."""
    softmax_alone = draw.chance(0.5)
    among = list(SOFTMAX if softmax_alone else SOFTMAX | OTHERS)
    names = draw.random.sample(among, draw.integer(1, min(4, len(among))))
    draw.record["read-outs"] = names
    return [(name, (SOFTMAX | OTHERS)[name](tokens)) for name in names]


def read(draw: Draw) -> Case:
    layout = draw.one_of("layout", "replicated", "sequence")
    lead = draw.leading(layout == "sequence")
    dtype = draw.dtype(*((torch.float64, torch.float32, torch.bfloat16) if draw.exact else (torch.float64,)))
    fp32_head = dtype == torch.bfloat16 and draw.one_of("fp32 weight", False, True)
    vocabulary = draw.vocabulary(equal_width=True)
    width, cut = draw.integer(1, 8), slices(draw, layout)
    weight_dtype = torch.float32 if fp32_head else dtype
    hidden = draw.strided(draw.normal(*lead, width, dtype=dtype))
    weight = draw.words(draw.normal(vocabulary.columns, width, dtype=weight_dtype))
    adapters = _adapters(draw, width, vocabulary.columns, weight_dtype)
    facts = draw.options(logit_scale=(1.0, 0.5, 2.0), temperature=(1.0, 0.5, 2.0))
    settings = draw.options(
        cache=("bounded", 0, 0.3, 1, 5000), chunk_tokens=(None, 1, 3), bits=("fast", "fast", "batch")
    )
    if dtype == torch.bfloat16 and not fp32_head:
        settings |= draw.options(logit_dtype=(None, torch.bfloat16))
    frozen, fused, mode = draw.chance(0.2), draw.chance(0.2), draw.chance(0.1)
    draw.record |= {"frozen": frozen, "fused": fused and not frozen, "mode": mode}
    fused = fused and not frozen
    tokens = _Tokens(draw, lead, vocabulary)
    tokens.temperature = facts.get("temperature", 1.0)
    teacher = draw.normal(*lead, width, dtype=dtype), draw.words(draw.normal(vocabulary.columns, width, dtype=dtype))
    tokens.teacher = object()
    state = draw.random.getstate(), draw.generator.get_state()
    made = _drawn_readouts(draw, tokens)
    skip = draw.one_of("counts", None, "all that count", "a bound")

    def again(teacher: Any) -> list[Any]:
        """The same read-outs, of a rank's own teacher."""
        draw.random.setstate(state[0])
        draw.generator.set_state(state[1])
        tokens.teacher = teacher
        return [one[0] for _, one in _drawn_readouts(draw, tokens)]

    def truth(x: Tensor, w: Tensor, *ab: Tensor) -> list[Tensor]:
        z = reference.logits(x, w)
        for a, b, (_, _, scaling) in zip(ab[0::2], ab[1::2], adapters, strict=True):
            z = z + scaling * (x @ a.t() @ b.t())
        z = bent(facts.get("logit_scale", 1.0) * z, facts)
        p = reference.logits(*(x.double() for x in teacher)) / tokens.temperature
        found = [each for _, (_, true, _) in made for each in true(z, p)]
        if skip is None:
            return found
        kept = tokens.counts
        return [each.where(kept.reshape(kept.shape + (1,) * (each.dim() - kept.dim())), 0.0) for each in found]

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        x, w, *ab = mine
        if fused:
            w.main_grad = torch.zeros(w.shape, dtype=results_dtype(dtype))
        lora = [LoRA(a, b, s) for a, b, (_, _, s) in zip(ab[0::2], ab[1::2], adapters, strict=True)]
        shared: dict[str, Any] = {"vocab": vocabulary.argument(rank)}
        head = LmHead(
            w,
            group(draw),
            layout,
            lora=lora or None,
            gradient_accumulation_fusion=fused,
            **shared,
            **facts,
            **settings,
        )
        theirs = LmHead(vocabulary.rows(teacher[1], rank), group(draw), layout, **shared)
        readouts = again(Teacher(theirs, cut(teacher[0], rank)))
        only: dict[str, Any] = {} if skip is None else {"counts": tokens.counts}
        if skip == "a bound":
            only["at_most"] = max(1, int(tokens.counts.sum()))
        with batch_invariant_mode() if mode else contextlib.nullcontext():
            found = head.read(x, *readouts, **only)
        each = found if len(readouts) > 1 else (found,)
        return [x for one in each for x in (one if isinstance(one, tuple) else (one,))]

    cuts: list[Cut] = [cut, vocabulary.rows]
    inputs = [hidden, weight]
    for a, b, _ in adapters:
        inputs += [a, b]
        cuts += [whole, vocabulary.rows]
    upstream = [draw.upstream(*shape) for _, (_, _, shapes) in made for shape in shapes]
    scale = facts.get("logit_scale", 1.0) / facts.get("temperature", 1.0)
    sizes = [x.double().abs().max().item() if x.numel() else 0.0 for x in (hidden, weight)]
    largest = width * max(sizes[0], 1.0) * max(sizes[1], 1.0) * (1 + 8 * len(adapters)) * max(scale, 1.0)
    refused = "and the head has lora" if adapters and (mode_bits(settings, mode) == "batch") else None
    return Case(
        f"LmHead.read of {[name for name, _ in made]}",
        list(zip(inputs, cuts, strict=True)),
        truth,
        ours,
        upstream,
        logit_size=largest,
        value_dtype=results_dtype(dtype),
        wanted=[True, not frozen] + [True] * (2 * len(adapters)),
        grad_size=64.0 * max(1, torch.Size(lead).numel()) * max(scale, 1.0),
        gradient_of=lambda leaf: leaf.main_grad if hasattr(leaf, "main_grad") else leaf.grad,
        refused=refused,
    )


def mode_bits(settings: dict[str, Any], mode: bool) -> str:
    """The bits that a head has in a mode."""
    return settings.get("bits", "batch" if mode else "fast")

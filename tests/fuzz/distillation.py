"""Cases of distillation losses in fp64: over the whole vocabulary or a few ids, from a teacher's head or logits."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext import losses, reference
from megatron_ext.head import LmHead
from tests.fuzz.case import Case
from tests.fuzz.cross_entropy import bent, group, most_of_a_slice, slices
from tests.fuzz.draw import Draw

OUTSIDE = -100.0  # the log-probability of what is outside of a teacher's ids, where it is no rest


@dataclass
class Divergence:
    """The divergence of student's and teacher's log-probabilities `[..., K]` over the same outcomes."""

    kind: str
    beta: float = 0.5
    mixed: float = 0.5

    def of(self, log_q: Tensor, log_p: Tensor) -> Tensor:
        q, p = log_q.exp(), log_p.exp()
        forward, reverse = (p * (log_p - log_q)).sum(-1), (q * (log_q - log_p)).sum(-1)
        if self.kind == "jsd":
            own, other = 1 - self.beta, self.beta
            log_m = torch.logaddexp(log_q + math.log(own), log_p + math.log(other))
            return (own * q * (log_q - log_m) + other * p * (log_p - log_m)).sum(-1)
        weight = {"forward": 1.0, "reverse": 0.0, "mixed": self.mixed}[self.kind]
        return weight * forward + (1 - weight) * reverse

    def outside(self, log_q: Tensor) -> Tensor:
        """Return the terms of outcomes outside of the teacher's ids: `exp(OUTSIDE)` stands for 0 in the reverse KL."""
        if self.kind == "jsd":
            return -((1 - self.beta) * math.log(1 - self.beta) * log_q.exp()).sum(-1)
        weight = {"forward": 0.0, "reverse": 1.0, "mixed": 1 - self.mixed}[self.kind]
        return weight * (log_q.exp() * (log_q - OUTSIDE)).where(log_q > -torch.inf, 0.0).sum(-1)


def _rest(log_probs: Tensor, ids: Tensor) -> Tensor:
    """Return the log-probability `[..., 1]` of all other ids together."""
    others = torch.ones_like(log_probs, dtype=torch.bool).scatter(-1, ids, False)
    if ids.shape[-1] == log_probs.shape[-1]:
        return torch.full_like(log_probs[..., :1], OUTSIDE)
    return log_probs.masked_fill(~others, -torch.inf).logsumexp(-1, keepdim=True)


def _likeliest(z: Tensor, k: int) -> Tensor:
    """Return the ids of the k largest logits of each row; of equal logits the lowest id comes first."""
    return z.detach().sort(dim=-1, descending=True, stable=True).indices[..., :k]


def of_students(draw: Draw) -> Case:
    """Draw a case of `DistillationLoss`, from heads or logits, or of `TopKDistillationLoss`, from given ids and values
    or a teacher's head."""
    way = draw.one_of("way", "heads", "logits", "given ids", "teacher's ids", "student's ids")
    by_ids = way not in ("heads", "logits")
    layout = "replicated" if way == "logits" else draw.one_of("layout", "replicated", "sequence")
    lead, vocabulary = draw.leading(layout == "sequence", least_dims=1), draw.vocabulary(least=2)
    size, ranks = vocabulary.size, draw.ranks if layout == "sequence" else 1

    o: dict[str, Any] = draw.options(beta=(0.5, 0.1, 0.9))
    o["divergence"] = draw.one_of("divergence", "forward", "reverse", "jsd", *(["mixed"] if by_ids else []))
    if by_ids:
        beyond = draw.one_of("beyond the ids", "nothing", "nothing", "zero_outside_topk", "bucket")
        o |= draw.options(mixed_kl_weight=(0.5, 0.2, 0.0, 1.0)) | ({} if beyond == "nothing" else {beyond: True})
    divergence = Divergence(o["divergence"], o.get("beta", 0.5), o.get("mixed_kl_weight", 0.5))
    bucket, zero_outside = bool(o.get("bucket")), bool(o.get("zero_outside_topk"))
    shared = draw.options(temperature=(1.0, 0.7, 2.0), chunk_tokens=(None, 1, 3))
    cache = draw.options(cache=("bounded", 0, 1, 0.4)) if way == "heads" else {}
    t = shared.get("temperature", 1.0)
    by_head = way != "logits" and draw.one_of("by LmHead", False, True)
    # Of logits that are equal a softcap may make others, by an ulp, and the order of ids another one.
    capped = by_head and not (draw.exact and way in ("teacher's ids", "student's ids"))
    facts, their_facts = (
        draw.options(logit_scale=(1.0, 0.5), **({"softcap": (None, 5.0)} if capped else {})) if by_head else {}
        for _ in range(2)
    )

    def side() -> tuple[Tensor, Tensor]:
        """Draw hidden states and weight; with a bucket their logits are so small that the rest's probability is not
        nearly 0."""
        width = draw.integer(1, 8)
        x = draw.strided(draw.normal(*lead, width))
        w = draw.words(draw.normal(vocabulary.columns, width, size=draw.one_of("weights", 0.3, 1.0, 3.0)))
        most = (x @ w.t()).abs().max().item() if x.numel() else 0.0
        return (x, w) if not bucket or most < 3 * t else (x * 2.0 ** math.floor(math.log2(3 * t / most)), w)

    (x, w), (their_x, their_w) = side(), side()
    if way == "logits":  # the tensors that are given are logits then, not hidden states
        x, their_x = reference.logits(x, w), reference.logits(their_x, their_w)

    def logits(x: Tensor, w: Tensor, facts: dict[str, Any]) -> Tensor:
        z = x if way == "logits" else bent(facts.get("logit_scale", 1.0) * reference.logits(x, w), facts)
        return z[..., :size]

    teacher = logits(their_x, their_w, their_facts)
    k = draw.one_of("k", 1, min(3, size), min(5, size), size)
    values, ids = torch.zeros(0), torch.zeros(0)
    if way == "student's ids":
        ids = _likeliest(logits(x, w, facts), k)
    elif way == "teacher's ids" or (way == "given ids" and draw.one_of("ids are", "largest", "any") == "largest"):
        ids = _likeliest(teacher, k)
    elif way == "given ids":  # in any order, and where that may be an id twice
        chances = torch.rand((*lead, size), generator=draw.generator)
        ids = _likeliest(chances, k)
        if not bucket and not zero_outside:
            ids = ids.gather(-1, torch.randint(k, ids.shape, generator=draw.generator))
    if by_ids:
        values = ((teacher / t).log_softmax(-1) if bucket else teacher).gather(-1, ids)
    if way == "given ids" and not bucket and k > 1 and draw.chance(0.2):  # some that the teacher rules out
        ruled_out = torch.rand(values.shape, generator=draw.generator) < 0.3
        ruled_out[..., 0] = False
        values = values.masked_fill(ruled_out, -torch.inf)

    mask = draw.one_of("mask", None, "some", "weights")
    weights = torch.ones(lead, dtype=torch.float64)
    if mask is not None:
        weights = torch.randint(0, 2, lead, generator=draw.generator).double()
    if mask == "weights":
        weights = weights * torch.rand(lead, generator=draw.generator).double()
    count = draw.one_of("count", None, None, 7.0)
    bound = most_of_a_slice(weights > 0, ranks) + draw.integer(0, 2)
    skip = {} if way == "logits" else draw.options(skip_ignored=(False, True, bound))
    given_values = values.where(weights.unsqueeze(-1) > 0, torch.nan) if draw.chance(0.2) and by_ids else values
    repeats = way == "given ids" and (bucket or zero_outside) and k > 1 and (weights > 0).any() and draw.chance(0.1)
    given_ids = ids.clone()
    if repeats:
        given_ids[..., 1] = given_ids[..., 0]

    def per_token(z: Tensor) -> Tensor:
        log_q = (z / t).log_softmax(-1)
        if not by_ids:
            return divergence.of(log_q, (teacher / t).log_softmax(-1))
        theirs = values if bucket else (values / t).log_softmax(-1)
        theirs = theirs.where(theirs > -torch.inf, OUTSIDE)
        if bucket:
            log_p = (teacher / t).log_softmax(-1)
            return divergence.of(*(torch.cat([x.gather(-1, ids), _rest(x, ids)], -1) for x in (log_q, log_p)))
        if not zero_outside:
            return divergence.of((z.gather(-1, ids) / t).log_softmax(-1), theirs)
        elsewhere = torch.ones_like(z, dtype=torch.bool).scatter(-1, ids, False)
        apart = divergence.outside(log_q.masked_fill(~elsewhere, -torch.inf))
        return divergence.of(log_q.gather(-1, ids), theirs) + apart

    def truth(x: Tensor, *w: Tensor) -> list[Tensor]:
        found = per_token(logits(x, w[0] if w else x, facts))
        return [(found * weights).sum() / max(weights.sum().item() if count is None else count, 1e-8)]

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        named: dict[str, Any] = {"tp_group": group(draw), "vocab": vocabulary.argument(rank), **shared}
        given = {"mask": None if mask is None else weights, "count": count}
        if way == "logits":
            loss = losses.DistillationLoss(**o, **named)
            return [loss.from_logits(mine[0], vocabulary.last(their_x, rank), **given)[0]]
        named["hidden_layout"] = layout
        in_loss = {**o, **skip, **({} if by_head else named | cache)}
        weight = LmHead(mine[1], **named, **facts, **cache) if by_head else mine[1]
        their_rows, their_slice = vocabulary.rows(their_w, rank), slices(draw, layout)(their_x, rank)
        apart = {name: option for name, option in named.items() if name not in shared}
        other = LmHead(their_rows, **apart, **their_facts) if by_head else their_rows
        if way == "heads":
            return [losses.DistillationLoss(**in_loss)(mine[0], weight, their_slice, other, **given)[0]]
        top = losses.TopKDistillationLoss(**in_loss)
        if way == "given ids":
            return [top(mine[0], weight, given_values, given_ids, **given)[0]]
        return [top.with_teacher(mine[0], weight, their_slice, other, k, way.split("'")[0], **given)[0]]

    largest = max((z.abs().max().item() if z.numel() else 0.0) for z in (logits(x, w, facts), teacher))
    inputs = [(x, vocabulary.last)] if way == "logits" else [(x, slices(draw, layout)), (w, vocabulary.rows)]
    return Case(
        f"{'TopKDistillationLoss' if by_ids else 'DistillationLoss'}, {way}",
        inputs,
        truth,
        ours,
        [draw.upstream()],
        logit_size=64.0 * (largest + 1) / t**2,
        grad_size=64.0 * (largest + 100),
        refused="has an id twice" if repeats else None,
    )

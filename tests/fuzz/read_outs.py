"""Cases of chosen ids, top-k, top-p, divergences and softmax, from logits and from hidden states."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext import head, reference
from tests.fuzz.case import START, Case
from tests.fuzz.cross_entropy import as_list, bent, group, logits, results_dtype, slices
from tests.fuzz.distillation import Divergence
from tests.fuzz.draw import Draw, Vocabulary

# From a whole matrix of logits (and a teacher's): results; and the options of the call.
Truth = Callable[..., list[Tensor]]
EXACT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _gather(draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, options: dict[str, Any]):
    ids = draw.ids((*lead, draw.integer(1, 5)), vocabulary.size)
    options |= draw.options(return_entropy=(False, True))

    def truth(z: Tensor) -> list[Tensor]:
        log_p = reference.counted(z, vocabulary.size).log_softmax(-1)
        found = [log_p.gather(-1, ids.long())]
        return [*found, reference.entropy(z, vocabulary.size)] if options.get("return_entropy") else found

    outputs = [(*ids.shape,), *([lead] if options.get("return_entropy") else [])]
    return (ids,), truth, outputs


def _top_k(draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, options: dict[str, Any]):
    k = draw.one_of("k", 1, min(3, vocabulary.size), vocabulary.size)

    def truth(z: Tensor) -> list[Tensor]:
        order = reference.counted(z, vocabulary.size).sort(dim=-1, descending=True, stable=True).indices[..., :k]
        return [reference.counted(z, vocabulary.size).log_softmax(-1).gather(-1, order), order]

    return (k,), truth, [(*lead, k)]


def _largest(draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, options: dict[str, Any]):
    k = draw.one_of("k", 1, min(3, vocabulary.size), vocabulary.size)
    options.pop("temperature", None)

    def truth(z: Tensor) -> list[Tensor]:
        order = reference.counted(z, vocabulary.size).sort(dim=-1, descending=True, stable=True).indices[..., :k]
        return [z.gather(-1, order), order]

    return (k,), truth, [(*lead, k)]


def _sampled(draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, options: dict[str, Any]):
    labels = draw.ids(lead, vocabulary.size)
    labels = labels.masked_fill(torch.rand(lead, generator=draw.generator) < 0.2, -100)
    options |= {
        "top_k": draw.one_of("top_k", 1, 3, 100, 5000, None, None),
        "top_p": draw.one_of("top_p", 1.0, 0.9, 0.537),
    }

    def truth(z: Tensor) -> list[Tensor]:
        top_k, top_p = options["top_k"], options["top_p"] if options["top_p"] < 1 else torch.inf  # 1 keeps all
        found = reference.sampled_log_probs(z, labels.long(), top_k, top_p, vocabulary.size)
        return [found.where(found > -torch.inf, found.detach())]  # a label that is not kept brings no gradient

    return (labels,), truth, [lead]


def _gathered_logits(draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, options: dict[str, Any]):
    ids = draw.ids((*lead, draw.integer(1, 4)), vocabulary.size)
    options.pop("temperature", None)
    return (ids,), lambda z: [z.gather(-1, ids.long())], [(*ids.shape,)]


def _softmax(draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, options: dict[str, Any]):
    options.clear()
    return (), lambda z: [reference.counted(z, vocabulary.size).softmax(-1)], [(*lead, vocabulary.columns)]


def _divergence(kind: str):
    def make(draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, options: dict[str, Any]):
        if kind == "JS":
            options |= draw.options(beta=(0.5, 0.1, 0.9))
        elif kind != "cross entropy":
            options["direction"] = kind

        def truth(student: Tensor, teacher: Tensor) -> list[Tensor]:
            if kind == "cross entropy":
                return [reference.soft_cross_entropy(student, teacher, vocabulary.size)]
            if kind == "forward":
                return [reference.kl_divergence(teacher, student, vocabulary.size)]
            if kind == "reverse":
                return [reference.kl_divergence(student, teacher, vocabulary.size)]
            both = (z[..., : vocabulary.size].log_softmax(-1) for z in (student, teacher))
            return [Divergence("jsd", options.get("beta", 0.5)).of(*both)]

        return (), truth, [lead]

    return make


# Name: what it draws, the function of logits, that of hidden states, and whether there is a teacher.
READ_OUTS = {
    "gather": (_gather, head.gather_log_probs, head.linear_gather_log_probs, False),
    "top-k": (_top_k, None, head.linear_topk_log_probs, False),
    "largest": (_largest, head.vocab_topk, None, False),
    "sampled": (_sampled, head.sampled_log_probs, head.linear_sampled_log_probs, False),
    "logits": (_gathered_logits, head.gather_logits, None, False),
    "softmax": (_softmax, head.vocab_parallel_softmax, None, False),
    "soft cross entropy": (_divergence("cross entropy"), head.soft_cross_entropy, None, True),
    "forward KL": (_divergence("forward"), head.kl_divergence, head.linear_kl_divergence, True),
    "reverse KL": (_divergence("reverse"), head.kl_divergence, head.linear_kl_divergence, True),
    "JS": (_divergence("JS"), head.js_divergence, head.linear_js_divergence, True),
}


def _chosen(draw: Draw, column: int) -> tuple:
    name = draw.one_of("of", *(name for name, row in READ_OUTS.items() if row[column] is not None))
    return (name, *READ_OUTS[name])


def _options(draw: Draw) -> dict[str, Any]:
    return draw.options(temperature=(1.0, 0.5, 2.0), chunk_tokens=(None, 1, 2, 3, 7))


def from_logits(draw: Draw) -> Case:
    name, make, function, _, has_teacher = _chosen(draw, 1)
    lead, vocabulary, dtype = draw.leading(), draw.vocabulary(equal_width=name == "sampled"), draw.dtype()
    z, largest = logits(draw, lead, vocabulary, dtype)
    teacher = [draw.words(draw.normal(*lead, vocabulary.columns, dtype=dtype), -1)] if has_teacher else []
    options = _options(draw)
    given, true, shapes = make(draw, lead, vocabulary, options)

    def truth(z: Tensor) -> list[Tensor]:
        return true(*(x.double() / options.get("temperature", 1.0) for x in (z, *teacher)))

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        shared = {"tp_group": group(draw), "vocab": vocabulary.argument(rank), **options}
        others = [vocabulary.last(x, rank) for x in teacher]
        return as_list(function(mine[0], *others, *given, **shared))

    cuts = [vocabulary.last] if name == "softmax" else None
    upstream = [draw.upstream(*shape) for shape in shapes]
    scale = largest / options.get("temperature", 1.0)
    return Case(
        f"{name} of logits",
        [(z, vocabulary.last)],
        truth,
        ours,
        upstream,
        outputs=cuts,
        logit_size=scale,
        value_dtype=results_dtype(dtype),
        grad_size=8.0 * max(1.0, 1 / options.get("temperature", 1.0)),
    )


def from_hidden(draw: Draw) -> Case:
    """In 16 and 32 bits with integers alone, whose logits are exact: else a rounding may change what is kept."""
    name, make, _, function, has_teacher = _chosen(draw, 2)
    layout = draw.one_of("layout", "replicated", "sequence")
    lead, vocabulary = draw.leading(layout == "sequence"), draw.vocabulary(equal_width=name == "sampled")
    dtype = draw.dtype(*(EXACT if draw.exact else EXACT[:1]))
    width, cut = draw.integer(1, 12), slices(draw, layout)
    heads = [
        (draw.normal(*lead, width, dtype=dtype), draw.words(draw.normal(vocabulary.columns, width, dtype=dtype)))
        for _ in range(1 + has_teacher)
    ]
    options = _options(draw)
    given, true, shapes = make(draw, lead, vocabulary, options)
    temperature = options.get("temperature", 1.0)
    facts = draw.options(logit_scale=(1.0, 0.5, 2.0), **({"softcap": (None, 30.0)} if dtype == torch.float64 else {}))
    bias = [draw.normal(vocabulary.columns, dtype=dtype)] if draw.chance(0.3) else []
    fused = draw.chance(0.2)
    draw.record |= {"bias": bool(bias), "fused": fused}

    def truth(x: Tensor, w: Tensor, *bias: Tensor) -> list[Tensor]:
        z = bent(facts.get("logit_scale", 1.0) * reference.logits(x, w, *bias), facts | options)
        return true(z, *(reference.logits(x.double(), w.double()) / temperature for x, w in heads[1:]))

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        x, w, *bias = mine
        if fused:
            w.main_grad = torch.full(w.shape, START, dtype=results_dtype(dtype))
        shared = {"tp_group": group(draw), "hidden_layout": layout, "vocab": vocabulary.argument(rank), **options}
        shared |= {**facts, "bias": bias[0] if bias else None, "gradient_accumulation_fusion": fused}
        others = [piece for x, w in heads[1:] for piece in (cut(x, rank), vocabulary.rows(w, rank))]
        return as_list(function(x, w, *others, *given, **shared))

    upstream = [draw.upstream(*shape) for shape in shapes]
    x, w = heads[0]
    largest = (x.double() @ w.double().t()).abs().max().item() if x.numel() else 0.0
    largest = facts.get("logit_scale", 1.0) * (largest + max((b.abs().max().item() for b in bias), default=0.0))
    count = max(1, torch.Size(lead).numel())
    return Case(
        f"{name} of hidden states",
        [(x, cut), (w, vocabulary.rows), *((b, vocabulary.rows) for b in bias)],
        truth,
        ours,
        upstream,
        logit_size=largest / temperature,
        value_dtype=results_dtype(dtype),
        grad_size=64.0 * count / temperature,
    )

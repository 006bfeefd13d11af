"""Cases of the functions of one read-out each, and of softmax, from logits and from hidden states."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_ext import head, reference
from tests.fuzz.case import START, Case
from tests.fuzz.cross_entropy import as_list, bent, group, logits, results_dtype, slices
from tests.fuzz.draw import Draw, Vocabulary
from tests.fuzz.drawn_read_outs import BY_NAME, OF_A_TEACHER, Made, Tokens, gather, top_k

EXACT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _softmax(t: Tokens) -> Made:
    columns = t.vocabulary.columns
    return Made(as_list, lambda z, p: [reference.counted(z, t.size).softmax(-1)], [(*t.lead, columns)])


# Name: what it draws, the function of logits and that of hidden states.
READ_OUTS: dict[str, tuple[Callable[[Tokens], Made], Callable | None, Callable | None]] = {
    "gather": (partial(gather, normalised=True), head.gather_log_probs, head.linear_gather_log_probs),
    "top-k": (partial(top_k, normalised=True), None, head.linear_topk_log_probs),
    "largest": (partial(top_k, normalised=False), head.vocab_topk, None),
    "logits": (partial(gather, normalised=False), head.gather_logits, None),
    "softmax": (_softmax, head.vocab_parallel_softmax, None),
    "sampled": (BY_NAME["sampled"], head.sampled_log_probs, head.linear_sampled_log_probs),
    "soft cross entropy": (BY_NAME["soft cross entropy"], head.soft_cross_entropy, None),
    "KL": (BY_NAME["KL"], head.kl_divergence, head.linear_kl_divergence),
    "reverse KL": (BY_NAME["reverse KL"], head.kl_divergence, head.linear_kl_divergence),
    "JS": (BY_NAME["JS"], head.js_divergence, head.linear_js_divergence),
}


def _drawn(draw: Draw, name: str, lead: tuple[int, ...], vocabulary: Vocabulary) -> tuple[Made, dict[str, Any]]:
    """What is read, and the options of the call."""
    options = draw.options(temperature=(1.0, 0.5, 2.0), chunk_tokens=(None, 1, 2, 3, 7))
    for option in {"largest": ["temperature"], "logits": ["temperature"], "softmax": [*options]}.get(name, []):
        options.pop(option, None)
    made = READ_OUTS[name][0](Tokens(draw, lead, vocabulary, options.get("temperature", 1.0)))
    options |= made.named
    if name == "gather" and draw.chance(0.5):
        options["return_entropy"] = True
        of_ids = made.true
        made.true = lambda z, p: [*of_ids(z, p), reference.entropy(z, vocabulary.size)]
        made.shapes.append(lead)
    return made, options


def _chosen(draw: Draw, column: int) -> tuple[str, Callable, bool]:
    name = draw.one_of("of", *(name for name, row in READ_OUTS.items() if row[column] is not None))
    return name, READ_OUTS[name][column], name in OF_A_TEACHER


def from_logits(draw: Draw) -> Case:
    name, function, has_teacher = _chosen(draw, 1)
    lead, vocabulary, dtype = draw.leading(), draw.vocabulary(equal_width=name == "sampled"), draw.dtype()
    z, largest = logits(draw, lead, vocabulary, dtype)
    teacher = [draw.words(draw.normal(*lead, vocabulary.columns, dtype=dtype), -1)] if has_teacher else []
    made, options = _drawn(draw, name, lead, vocabulary)
    temperature = options.get("temperature", 1.0)

    def truth(z: Tensor) -> list[Tensor]:
        return made.true(*(x.double() / temperature for x in (z, teacher[0] if teacher else z)))

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        others = [vocabulary.last(x, rank) for x in teacher]
        return as_list(function(mine[0], *others, tp_group=group(draw), vocab=vocabulary.argument(rank), **options))

    return Case(
        f"{name} of logits",
        [(z, vocabulary.last)],
        truth,
        ours,
        [None if shape is None else draw.upstream(*shape) for shape in made.shapes],
        outputs=[vocabulary.last] if name == "softmax" else None,
        logit_size=largest / temperature,
        value_dtype=results_dtype(dtype),
        grad_size=8.0 * max(1.0, 1 / temperature),
    )


def from_hidden(draw: Draw) -> Case:
    """In 16 and 32 bits with integers alone, whose logits are exact: else a rounding may change what is kept."""
    name, function, has_teacher = _chosen(draw, 2)
    layout = draw.one_of("layout", "replicated", "sequence")
    lead, vocabulary = draw.leading(layout == "sequence"), draw.vocabulary(equal_width=name == "sampled")
    dtype = draw.dtype(*(EXACT if draw.exact else EXACT[:1]))
    width, cut = draw.integer(1, 12), slices(draw, layout)
    heads = [
        (draw.normal(*lead, width, dtype=dtype), draw.words(draw.normal(vocabulary.columns, width, dtype=dtype)))
        for _ in range(1 + has_teacher)
    ]
    made, options = _drawn(draw, name, lead, vocabulary)
    temperature = options.get("temperature", 1.0)
    facts = draw.options(logit_scale=(1.0, 0.5, 2.0), **({"softcap": (None, 30.0)} if dtype == torch.float64 else {}))
    bias = [draw.normal(vocabulary.columns, dtype=dtype)] if draw.chance(0.3) else []
    fused = draw.chance(0.2)
    draw.record |= {"bias": bool(bias), "fused": fused}

    def truth(x: Tensor, w: Tensor, *bias: Tensor) -> list[Tensor]:
        z = bent(facts.get("logit_scale", 1.0) * reference.logits(x, w, *bias), facts | options)
        theirs = reference.logits(*(t.double() for t in heads[-1])) / temperature
        return made.true(z, theirs)

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        x, w, *bias = mine
        if fused:
            w.main_grad = torch.full(w.shape, START, dtype=results_dtype(dtype))
        shared = {"tp_group": group(draw), "hidden_layout": layout, "vocab": vocabulary.argument(rank), **options}
        shared |= {**facts, "bias": bias[0] if bias else None, "gradient_accumulation_fusion": fused}
        others = [piece for x, w in heads[1:] for piece in (cut(x, rank), vocabulary.rows(w, rank))]
        return as_list(function(x, w, *others, **shared))

    x, w = heads[0]
    largest = (x.double() @ w.double().t()).abs().max().item() if x.numel() else 0.0
    largest = facts.get("logit_scale", 1.0) * (largest + max((b.abs().max().item() for b in bias), default=0.0))
    count = max(1, torch.Size(lead).numel())
    return Case(
        f"{name} of hidden states",
        [(x, cut), (w, vocabulary.rows), *((b, vocabulary.rows) for b in bias)],
        truth,
        ours,
        [None if shape is None else draw.upstream(*shape) for shape in made.shapes],
        logit_size=largest / temperature,
        value_dtype=results_dtype(dtype),
        grad_size=64.0 * count / temperature,
    )

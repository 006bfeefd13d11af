"""Cases of cross entropy, log-probabilities and entropy, from hidden states and from logits."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import (
    linear_cross_entropy,
    linear_log_probs,
    reference,
    token_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)
from tests.fuzz.case import START, Case, Cut, whole
from tests.fuzz.draw import Draw, Vocabulary


def group(draw: Draw) -> Any:
    return dist.group.WORLD if draw.ranks > 1 else None


def slices(draw: Draw, layout: str) -> Cut:
    if layout == "replicated":
        return whole
    return lambda x, rank: x.chunk(draw.ranks)[rank] if x.shape[0] else x


def head(draw: Draw, vocabulary: Vocabulary, dtype: torch.dtype, layout: str, lead: tuple[int, ...]):
    """Draw hidden states and weight; return both with their cuts, and the largest logit."""
    width = draw.integer(1, 12)
    hidden = draw.strided(draw.normal(*lead, width, dtype=dtype))
    weight = draw.words(draw.normal(vocabulary.columns, width, dtype=dtype, size=draw.one_of("weights", 0.3, 1.0, 4.0)))
    largest = (hidden.double() @ weight.double().t()).abs().max().item() if hidden.numel() else 0.0
    return [(hidden, slices(draw, layout)), (weight, vocabulary.rows)], largest


def bent(z: Tensor, options: dict[str, Any]) -> Tensor:
    softcap = options.get("softcap")
    z = z if softcap is None else softcap * torch.tanh(z / softcap)
    return z / options.get("temperature", 1.0)


def token_options(draw: Draw, loss: bool, dtype: torch.dtype) -> dict[str, Any]:
    options = draw.options(
        softcap=(None, 1.5, 5.0, 30.0),
        temperature=(1.0, 0.5, 2.0),
        chunk_tokens=(None, 1, 2, 3, 7),
        ignore_index=(-100, -1, 0),
    )
    if loss:
        options |= draw.options(
            label_smoothing=(0.0, 0.1, 0.7), z_loss=(0.0, 1e-3, 0.1), reduction=("none", "sum", "mean")
        )
    else:
        options |= draw.options(return_entropy=(False, True), return_hits=(False, True))
        if options.get("softcap") is not None and dtype != torch.float64:
            options.pop("return_hits", None)  # in fp32 logits that reach the cap are equal, and the lowest id wins
    return options


def labels_and_mask(draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, ignore_index: int):
    labels = draw.ids(lead, vocabulary.size)
    ignored = torch.rand(lead, generator=draw.generator) < draw.one_of("ignored", 0.0, 0.3, 1.0, 0.1)
    labels = labels.masked_fill(ignored, ignore_index)
    masked = draw.one_of("mask", False, False, True)
    weights = torch.tensor([0.0, 0.0, 1.0, 2.5], dtype=torch.float64)
    mask = weights[torch.randint(4, lead, generator=draw.generator)] if masked else None
    return draw.strided(labels), mask


def results(z: Tensor, labels: Tensor, mask: Tensor | None, size: int, options: dict[str, Any]) -> list[Tensor]:
    """Return the call's results, computed from the transformed logits of all columns."""
    ignore = options.get("ignore_index", -100)
    labels = labels.long()
    counted = labels if mask is None else labels.masked_fill(mask == 0, ignore)
    if "return_entropy" not in options and options.get("of") == "loss":
        loss = reference.cross_entropy(
            z, counted, size, ignore, options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
        )
        loss = loss if mask is None else loss * mask
        kept = (labels != ignore) if mask is None else (labels != ignore) * mask
        how = options.get("reduction", "none")
        if how == "none":
            return [loss]
        return [loss.sum() if how == "sum" else loss.sum() / kept.sum().clamp(min=1)]
    kept = counted != ignore
    found = [reference.log_probs(z, counted, size, ignore)]
    if options.get("return_entropy"):
        found.append(reference.entropy(z, size).where(kept, 0.0))
    if options.get("return_hits"):
        hits = torch.zeros_like(kept)
        if z.numel():
            hits = (reference.counted(z, size).argmax(-1) == labels) & kept
        found.append(hits)
    return found


def most_of_a_slice(counts: Tensor, slices: int) -> int:
    """Return the number of counted tokens in the slice of dim 0 that has the most; at least 1, as a bound must be."""
    if not counts.numel():
        return 1
    return max(1, int(counts.reshape(slices, -1).sum(1).max()))


def as_list(found: Any) -> Sequence[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


def from_hidden(draw: Draw) -> Case:
    """Draw a case of `linear_cross_entropy` or `linear_log_probs`."""
    of = draw.one_of("of", "loss", "log-probs")
    function = linear_cross_entropy if of == "loss" else linear_log_probs
    layout = draw.one_of("layout", "replicated", "sequence")
    lead, vocabulary = draw.leading(layout == "sequence"), draw.vocabulary()
    dtype = draw.dtype(*([torch.float64] if of == "log-probs" and not draw.exact else []))
    inputs, largest = head(draw, vocabulary, dtype, layout, lead)
    options = token_options(draw, of == "loss", dtype)
    call = options | draw.options(cache=("bounded", 0, 0.3, 1, 5000, "auto"), skip_ignored=(False, True))
    bias = draw.chance(0.3) and not draw.exact
    if bias:
        inputs.append((draw.normal(vocabulary.columns, dtype=dtype), vocabulary.rows))
        largest += inputs[-1][0].abs().max().item()
    fused = draw.chance(0.2)
    draw.record |= {"bias": bias, "fused": fused}
    labels, mask = labels_and_mask(draw, lead, vocabulary, options.get("ignore_index", -100))
    if call.get("skip_ignored") and draw.chance(0.5):
        counts = (labels != options.get("ignore_index", -100)) & (torch.ones(lead) if mask is None else mask).bool()
        call["skip_ignored"] = most_of_a_slice(counts, draw.ranks if layout == "sequence" else 1) + draw.integer(0, 2)

    def truth(x: Tensor, w: Tensor, b: Tensor | None = None) -> list[Tensor]:
        z = bent(reference.logits(x, w, b), options)
        return results(z, labels, mask, vocabulary.size, options | {"of": of})

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        x, w, *b = mine
        if fused:
            w.main_grad = torch.full(w.shape, START, dtype=results_dtype(dtype))
        return as_list(
            function(
                x,
                w,
                labels,
                group(draw),
                layout,
                bias=b[0] if b else None,
                vocab=vocabulary.argument(rank),
                loss_mask=mask,
                gradient_accumulation_fusion=fused,
                **call,
            )
        )

    scalar = options.get("reduction", "none") != "none"
    upstream = [draw.upstream(*([] if scalar else lead)) for _ in range(1 + options.get("return_entropy", False))]
    return Case(
        function.__name__,
        inputs,
        truth,
        ours,
        upstream,
        logit_size=sized(largest, options),
        value_dtype=dtype if not draw.exact else results_dtype(dtype),
        grad_size=product_size(inputs, upstream, lead, options),
    )


def from_logits(draw: Draw) -> Case:
    """Draw a case of `vocab_parallel_cross_entropy`, `token_log_probs` or `token_entropy`."""
    of = draw.one_of("of", "loss", "log-probs", "entropy")
    lead, vocabulary, dtype = draw.leading(), draw.vocabulary(), draw.dtype()
    z, largest = logits(draw, lead, vocabulary, dtype)
    options = token_options(draw, of == "loss", dtype)
    labels, mask = labels_and_mask(draw, lead, vocabulary, options.get("ignore_index", -100))
    into = draw.chance(0.2)
    if of == "entropy":
        options = {name: x for name, x in options.items() if name in ("softcap", "temperature", "chunk_tokens")}

    def truth(z: Tensor) -> list[Tensor]:
        if of == "entropy":
            return [reference.entropy(bent(z, options), vocabulary.size)]
        return results(bent(z, options), labels, mask, vocabulary.size, options | {"of": of})

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        shared = {"tp_group": group(draw), "vocab": vocabulary.argument(rank), "gradient_into_logits": into, **options}
        if of == "entropy":
            return [token_entropy(mine[0], **shared)]
        function = vocab_parallel_cross_entropy if of == "loss" else token_log_probs
        return as_list(function(mine[0], labels, loss_mask=mask, **shared))

    scalar = options.get("reduction", "none") != "none"
    upstream = [draw.upstream(*([] if scalar else lead)) for _ in range(1 + options.get("return_entropy", False))]
    return Case(
        {"loss": "vocab_parallel_cross_entropy", "log-probs": "token_log_probs", "entropy": "token_entropy"}[of],
        [(z, vocabulary.last)],
        truth,
        ours,
        upstream,
        logit_size=sized(largest, options),
        value_dtype=results_dtype(dtype),
        grad_size=1.0 / options.get("temperature", 1.0),
    )


def logits(draw: Draw, lead: tuple[int, ...], vocabulary: Vocabulary, dtype: torch.dtype) -> tuple[Tensor, float]:
    size = draw.one_of("size", 0.3, 1.0, 4.0, 20.0)
    z = draw.strided(draw.words(draw.normal(*lead, vocabulary.columns, dtype=dtype, size=size), -1))
    return z, z.double().abs().max().item() if z.numel() else 0.0


def results_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def sized(largest: float, options: dict[str, Any]) -> float:
    """Return the size of a logit with its factor in the z-loss's gradient."""
    largest = largest / options.get("temperature", 1.0)
    return largest * (1 + 2 * options.get("z_loss", 0.0) * (largest + 5))


def product_size(inputs: Any, upstream: list[Tensor], lead: tuple[int, ...], options: dict[str, Any]) -> float:
    """Return the size of the sum of absolute terms in a gradient of hidden states or weight."""
    g = max((x.abs().max().item() for x in upstream if x.numel()), default=0.0)
    operands = max((x.double().abs().max().item() for x, _ in inputs if x.numel()), default=0.0)
    return max(1.0, g * operands * max(torch.Size(lead).numel(), 1) / options.get("temperature", 1.0))

"""Cases of NeMo-RL's functions with a sharded vocabulary only: softmax, entropy, argmax, columns, top-k."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import model_utils, reference
from tests.fuzz.case import Case, whole
from tests.fuzz.cross_entropy import as_list, results_dtype
from tests.fuzz.draw import Draw


def over_vocabulary(draw: Draw) -> Case:
    kind = draw.one_of("of", *_OVER_VOCABULARY)
    columns = draw.integer(1, 8)
    vocabulary, dtype = columns * draw.ranks, draw.dtype()
    batch, length = draw.integer(0 if draw.chance(0.05) else 1, 3), draw.integer(1, 6)
    z = draw.strided(draw.words(draw.normal(batch, length, vocabulary, dtype=dtype, size=2.0), -1))
    draw.record |= {"tokens": (batch, length), "vocabulary": vocabulary}
    ids = torch.randint(-1, vocabulary, (draw.integer(1, 5),), generator=draw.generator)
    temperature, k = draw.one_of("temperature", 1.0, 0.5, 3.0), draw.integer(1, vocabulary + 2)
    other = draw.words(draw.normal(batch, length, vocabulary, dtype=dtype, size=2.0), -1)
    chunk = draw.one_of("chunk", None, 1, 4)
    truth, call, sharded, differentiable, sent = _OVER_VOCABULARY[kind]
    own = {"temperature": temperature, "k": k, "ids": ids, "other": other.double()}
    own |= {"top_k": draw.one_of("top_k", None, -1, 1, 3, 100), "top_p": draw.one_of("top_p", 1.0, 0.9, 0.537)}
    of_tokens = torch.randint(vocabulary, (batch, length, 4), generator=draw.generator)
    none = torch.rand(of_tokens.shape, generator=draw.generator) < 0.2
    own |= {"labels": of_tokens[..., 0].masked_fill(none[..., 0], -100)}
    own |= {"of_tokens": of_tokens[..., 1:].masked_fill(none[..., 1:], -1)}

    def cut(x: Tensor, rank: int) -> Tensor:
        return x.chunk(draw.ranks, -1)[rank]

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        given = own | {"other": cut(other, rank), "chunk": chunk, "start": columns * rank, "stop": columns * (rank + 1)}
        return as_list(call(mine[0], given, dist.group.WORLD))

    found = truth(z.double(), own)
    if kind == "sampled log-probabilities" and own["top_k"] in (None, -1) and own["top_p"] < 1:
        # Where a chunk size is asked for, the ranks share the work of two chunks at least.
        sent = (2 if chunk is None else max(2, -(-length // chunk)) + 2, 0)
    return Case(
        f"model_utils, {kind}",
        [(z, cut)],
        lambda z: truth(z, own),
        ours,
        [draw.upstream(*x.shape) for x in found[:differentiable]],
        outputs=[cut if sharded else whole] * len(found),
        logit_size=(z.double().abs().max().item() if z.numel() else 0.0) / temperature,
        value_dtype=results_dtype(dtype),
        grad_size=8.0 / min(temperature, 1.0),
        sent=sent if draw.ranks > 1 else (0, 0),
    )


def _topk(z: Tensor, own: dict[str, Any]) -> list[Tensor]:
    order = z.sort(dim=-1, descending=True, stable=True).indices[..., : own["k"]]
    return [z.gather(-1, order), order]


def _columns(z: Tensor, own: dict[str, Any]) -> list[Tensor]:
    return [z[..., own["ids"].clamp(min=0)].where(own["ids"] >= 0, 0.0)]


def _log_softmax(z: Tensor, own: dict[str, Any]) -> list[Tensor]:
    return [(z / own["temperature"]).log_softmax(-1)]


def _log_probs(z: Tensor, own: dict[str, Any]) -> list[Tensor]:
    return [reference.log_probs(z, own["labels"])]


def _sampled(z: Tensor, own: dict[str, Any]) -> list[Tensor]:
    top_k, top_p = own["top_k"], own["top_p"] if own["top_p"] < 1 else torch.inf
    found = reference.sampled_log_probs(z, own["labels"], None if top_k == -1 else top_k, top_p)
    return [found.where(found > -torch.inf, found.detach())]  # a token that is not kept brings no gradient


def _at_ids(z: Tensor, own: dict[str, Any]) -> list[Tensor]:
    ids = own["of_tokens"]
    return [z.log_softmax(-1).gather(-1, ids.clamp(min=0)).where(ids >= 0, 0.0)]


def _whole_or_part(function: Callable) -> Callable:
    return lambda z, own, group: function(z, own["temperature"], tp_group=group)


def _distributed_topk(z: Tensor, own: dict[str, Any], group: Any) -> tuple[Tensor, Tensor]:
    bounds = {"vocab_start_index": own["start"], "vocab_end_index": own["stop"]}
    values, ids = model_utils.distributed_vocab_topk(z, own["k"], group, chunk_size=own["chunk"], **bounds)
    assert ids.dtype == torch.int64
    return values, ids


def _sampled_log_probs(z: Tensor, own: dict[str, Any], group: Any) -> Tensor:
    filters = (z, own["labels"], group, own["top_k"], own["top_p"])
    if own["chunk"] is None:
        return model_utils.DistributedLogprobWithSampling.apply(*filters)
    return model_utils.ChunkedDistributedLogprobWithSampling.apply(*filters, own["chunk"])


class _Kind(NamedTuple):
    """The truth, the call, whether results are sharded, the number of results with a gradient, and the numbers of
    collectives in forward and backward."""

    truth: Callable
    call: Callable
    sharded: bool = False
    differentiable: int = 1
    sent: tuple[int, int] = (1, 0)


_OVER_VOCABULARY: dict[str, _Kind] = {
    "log softmax": _Kind(
        _log_softmax, _whole_or_part(model_utils.vocab_parallel_log_softmax), sharded=True, sent=(1, 1)
    ),
    "full log softmax": _Kind(_log_softmax, _whole_or_part(model_utils.vocab_parallel_full_log_softmax), sent=(2, 1)),
    "log softmax of logits": _Kind(
        lambda z, own: [z.log_softmax(-1)],
        lambda z, own, group: model_utils._compute_distributed_log_softmax_with_grad(z, group),
        sharded=True,
        sent=(1, 1),
    ),
    "softmax of logits": _Kind(
        lambda z, own: [z.softmax(-1)],
        lambda z, own, group: model_utils._compute_distributed_softmax(z, group),
        sharded=True,
        sent=(1, 1),
    ),
    "columns": _Kind(
        _columns, lambda z, own, group: model_utils.vocab_parallel_gather_columns(z, own["ids"], tp_group=group)
    ),
    "log-probabilities": _Kind(
        _log_probs,
        lambda z, own, group: model_utils.DistributedLogprob.apply(z, own["labels"], own["start"], own["stop"], group),
    ),
    "log-probabilities in chunks": _Kind(
        _log_probs,
        lambda z, own, group: model_utils.ChunkedDistributedLogprob.apply(
            z, own["labels"], own["start"], own["stop"], own["chunk"], group
        ),
    ),
    "sampled log-probabilities": _Kind(_sampled, _sampled_log_probs),
    "log-probabilities at ids": _Kind(
        _at_ids,
        lambda z, own, group: model_utils.ChunkedDistributedGatherLogprob.apply(
            z, own["of_tokens"], own["start"], own["stop"], own["chunk"], group
        ),
    ),
    "argmax": _Kind(
        lambda z, own: [z.argmax(-1)],
        lambda z, own, group: model_utils.vocab_parallel_argmax(z, tp_group=group),
        differentiable=0,
    ),
    "top-k": _Kind(_topk, _distributed_topk),
    "entropy": _Kind(
        lambda z, own: [-reference.entropy(z)],
        lambda z, own, group: model_utils.ChunkedDistributedEntropy.apply(z, own["chunk"], group),
    ),
    "cross entropy": _Kind(
        lambda z, own: [reference.soft_cross_entropy(z, own["other"])],
        lambda z, own, group: model_utils.DistributedCrossEntropy.apply(z, own["other"], group),
    ),
}

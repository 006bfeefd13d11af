"""Exact FLOPs, peak bytes and collectives of one call, on fake tensors: the same numbers on every machine."""

from functools import partial

import pytest
import torch

from benchmarks.meter import measure, one_rank_of
from megatron_ext import linear_cross_entropy, linear_log_probs, vocab_parallel_cross_entropy
from megatron_ext.head import Entropy, Gather, LmHead, LogProbs, SumOfSquares, TopK, ZLoss
from tests.marks import quick_if, slow

# One rank of 8 with sequence 16384, D 8192, V 152064 in bf16.
T, D, V, R = 16384, 8192, 152064, 8
SMALL = (1024, 512, 8192, 4)


def costs(call, layout="replicated", sizes=SMALL, frozen=False, grad=True):
    """Measure `call(hidden, weight, labels, group, layout)`, and its backward pass if `grad`."""
    tokens, width, vocabulary, ranks = sizes
    with one_rank_of(ranks) as group:
        rows = tokens // ranks if layout == "sequence" else tokens
        hidden = torch.empty(rows, width, dtype=torch.bfloat16, requires_grad=grad)
        weight = torch.empty(vocabulary // ranks, width, dtype=torch.bfloat16, requires_grad=grad and not frozen)
        labels = torch.zeros(tokens, dtype=torch.int64)
        with measure() as found:
            loss = call(hidden, weight, labels, group, layout)
            if grad:
                loss.sum().backward()
        return found


def costs_on_logits(call, tokens, columns, ranks):
    """Measure `call(logits, labels, tp_group=group)`, and its backward pass."""
    with one_rank_of(ranks) as group:
        logits = torch.empty(tokens, columns, dtype=torch.bfloat16, requires_grad=True)
        held = logits + 0  # not a leaf, as in a model
        with measure() as forward:
            found = call(held, torch.zeros(tokens, dtype=torch.int64), tp_group=group)
        with measure() as backward:
            torch.autograd.grad(found, held, torch.ones(tokens))
        return forward, backward


def allowed_bytes(layout, tokens):
    """dx and dW at 4 bytes an element; with the sequence layout the gathered x and the full-length dx at 2."""
    full = tokens * D
    return 4 * (V // R) * D + (4 * full if layout == "replicated" else 4 * full // R + 2 * full + 2 * full)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tokens, cache, layout, flops, logits_bytes",
    [
        # Many small operations, counted one by one: a quarter of the tokens shows as much.
        (T // 4, 0, "sequence", 8, 0.35),
        (T // 4, 0.5, "sequence", 7, 1.35),
        (T // 4, 1, "replicated", 6, 2.25),
        (T, 1, "sequence", 6, 2.25),
    ],
)
def test_full_width(tokens, cache, layout, flops, logits_bytes):
    logits = tokens * V // R
    found = costs(partial(linear_cross_entropy, cache=cache), layout, (tokens, D, V, R))
    assert found.flops == flops * logits * D
    assert found.peak_bytes <= allowed_bytes(layout, tokens) + logits_bytes * logits
    assert found.collectives.total() == (2 if layout == "replicated" else 4)
    large = [(dtype, shape) for dtype, shape in found.largest if torch.Size(shape).numel() >= min(logits, V // R * D)]
    assert not [shape for dtype, shape in large if dtype == "torch.float32"], "nothing of that size in fp32"
    assert found.largest["torch.bfloat16", (V // R, D)] == 1, "dW, and no copy of the weight"


def log_probs_and_entropy(*given, cache):
    return sum(linear_log_probs(*given, cache=cache, return_entropy=True))


@pytest.mark.parametrize(
    "call",
    [
        partial(linear_cross_entropy, label_smoothing=0.1),
        partial(linear_cross_entropy, z_loss=0.01, temperature=0.5),
        partial(linear_cross_entropy, softcap=30.0, label_smoothing=0.1),
        log_probs_and_entropy,
    ],
)
@pytest.mark.parametrize("cache", [0, *slow(0.25), 1])
def test_no_option_costs_flops(call, cache):
    tokens, width, vocabulary, ranks = SMALL
    found = costs(partial(call, cache=cache))
    assert found.flops == (8 - 2 * cache) * tokens * width * vocabulary // ranks
    assert found.collectives.total() == 2


THREE = {
    "of the softmax": ([lambda labels: LogProbs(labels), lambda _: Entropy(), lambda _: ZLoss()], 6),
    "of logits": ([lambda labels: Gather(labels.unsqueeze(-1)), lambda _: TopK(3), lambda _: SumOfSquares()], 8),
    "of both": ([lambda labels: LogProbs(labels), lambda _: TopK(3), lambda _: Entropy()], 8),
}


@pytest.mark.parametrize("layout", ["sequence", *slow("replicated")])
@pytest.mark.parametrize("kind", quick_if("of both".__eq__, THREE))
def test_three_read_outs_cost_products_and_messages_of_one(kind, layout):
    tokens, width, vocabulary, ranks = SMALL
    make, products = THREE[kind]

    def read(makers):
        def call(hidden, weight, labels, group, layout):
            results = LmHead(weight, group, layout, cache=1).read(hidden, *(maker(labels) for maker in makers))
            results = results if len(makers) > 1 else [results]
            return sum((x[0] if isinstance(x, tuple) else x).sum() for x in results)

        found = costs(call, layout)
        return found.flops, found.collectives.total()

    together = read(make)
    assert together == (products * tokens * width * vocabulary // ranks, 2 if layout == "replicated" else 4)
    assert together == max(read([maker]) for maker in make)


@pytest.mark.parametrize("cache, flops", [(0, 6), (1, 4)])
def test_frozen_weight_pays_no_weight_gradient(cache, flops):
    tokens, width, vocabulary, ranks = SMALL
    found = costs(partial(linear_cross_entropy, cache=cache), frozen=True)
    assert found.flops == flops * tokens * width * vocabulary // ranks


def test_without_gradients_one_matmul_and_nothing_kept():
    tokens, width, vocabulary, ranks = SMALL
    found = costs(partial(linear_cross_entropy, cache=1), grad=False)
    assert found.flops == 2 * tokens * width * vocabulary // ranks
    assert found.collectives.total() == 1
    assert ("torch.float32", (tokens, vocabulary // ranks)) not in found.largest
    assert found.alive_bytes < 100 * tokens


@pytest.mark.parametrize("into_logits", [False, True])
def test_on_logits_nothing_of_their_size_is_saved(into_logits):
    """Beyond the caller's own logits: small statistics after forward, after backward one gradient in their dtype."""
    tokens, columns = 4096, 8192
    call = partial(vocab_parallel_cross_entropy, gradient_into_logits=into_logits)
    forward, backward = costs_on_logits(call, tokens, columns, 4)
    assert forward.collectives.total() == 1
    assert backward.collectives.total() == 0
    assert forward.peak_bytes < 0.6 * tokens * columns, "no fp32 copy, not even for a moment"
    assert forward.alive_bytes < 100 * tokens
    assert backward.peak_bytes < (0.6 if into_logits else 2.6) * tokens * columns

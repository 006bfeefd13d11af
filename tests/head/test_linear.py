import itertools
import os

import pytest
import torch
import torch.distributed as dist

from megatron_ext import linear_cross_entropy
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import group_size
from tests.head.problems import OPTIONS, Problem, error
from tests.marks import quick_if, slow
from tests.ranks import ranks

LAYOUTS = ["replicated", "sequence"]
CACHES = [0, 0.5, 1]
# 20 tokens in 1, 3 and 20 chunks; as backward takes it: the shard's columns in as many blocks
CHUNKS = [None, 7, 1]


# cache, chunk_tokens, skip_ignored: any two of them meet in every way
EVERY_PAIR = [(c, n, (i + j) % 2 == 1) for i, c in enumerate(CACHES) for j, n in enumerate(CHUNKS)]
# Where kernels are interpreted a case takes seconds: each cache, in one chunk and in several.
INTERPRETED = [(0, 7, True), (0.5, None, False), (1, 7, False)]
PAIRS = INTERPRETED if os.environ.get("TRITON_INTERPRET") == "1" else EVERY_PAIR


def compare(what, options, layout, cases):
    group = dist.group.WORLD
    problem = Problem(options=OPTIONS[options])
    results, grads = problem.truth(what)
    pieces = problem.pieces(grads, group, layout)
    for cache, chunk_tokens, skip_ignored in cases:
        case = {"cache": cache, "chunk_tokens": chunk_tokens, "skip_ignored": skip_ignored}
        got_results, got_grads = problem.ours(what, group, layout, **case)
        got, want = [*got_results, *got_grads], [*results, *pieces]
        torch.testing.assert_close(got, want, msg=lambda m, case=case: f"{case}: {m}")


@ranks(1, 2)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("options", quick_if({"plain", "softcap", "all"}.__contains__, OPTIONS))
@pytest.mark.parametrize("what", ["loss", "log_probs"])
def test_values_and_gradients(what, options, layout):
    compare(what, options, layout, PAIRS)


@ranks(1, 2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_collectives(layout):
    """None at one rank; else one forward and one backward, with the sequence layout two and two, at any chunk count."""
    group, problem = dist.group.WORLD, Problem()
    for cache, chunk_tokens, skip in EVERY_PAIR:
        hidden, weight, _ = problem.mine(group, layout)
        more = {"chunk_tokens": chunk_tokens, "cache": cache, "skip_ignored": skip, "vocab": problem.shard(group)}
        with count_collectives() as forward:
            loss = linear_cross_entropy(hidden, weight, problem.labels, group, layout, **more)
        with count_collectives() as backward:
            loss.backward(problem.grad)
        expected = 0 if group_size(group) == 1 else LAYOUTS.index(layout) + 1
        assert (forward.total(), backward.total()) == (expected, expected), (more, forward, backward)


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", ["all", *slow("plain")])
def test_precision_of_every_option(options, dtype):
    """Losses and gradients err no more than those of unfused PyTorch in the same dtype over the same ranks, up to a
    tenth; where both are next to exact, up to a few roundings of the result."""
    group = dist.group.WORLD
    problem = Problem(
        (12, 16), 32, 301, dtype, options={**OPTIONS[options], **({"size": 290} if options == "all" else {})}
    )
    every = ((0, None), (0, 50), (0.5, None), (1, None))
    for what, (cache, chunk_tokens) in itertools.product(
        ("loss", "log_probs"), every[1:3] if PAIRS is INTERPRETED else every
    ):
        for got, truth, plain in problem.beside_plain(what, group, cache=cache, chunk_tokens=chunk_tokens):
            errors = error(got, truth), error(plain, truth)
            assert errors[0] <= 1.1 * errors[1] + 2 * torch.finfo(torch.float32).eps, (what, cache, errors)
            assert got.dtype == (torch.float32 if got.shape == problem.shape else dtype)

"""Tokens outside a mask make no product: with a bound of the caller's, without a wait, beside fp64 of the whole."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ext import linear_cross_entropy, linear_log_probs
from megatron_ext.head import LmHead, LogProbs
from tests.head.problems import Problem
from tests.head.test_costs import costs
from tests.ranks import ranks


@ranks(1, 2, 4)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_a_bound_changes_nothing(layout):
    """Also where hidden states that do not count are NaN, and where the bound is all tokens or exactly those."""
    group = dist.group.WORLD
    problem = Problem(shape=(4, 6), options={"bias": True, "size": 37, "softcap": 2.0})
    problem.labels[1] = -100
    counts = problem.labels != -100
    parts = counts.chunk(dist.get_world_size() if layout == "sequence" else 1)
    for what in ("loss", "log_probs"):
        truth, grads = problem.truth(what)
        for bound in (max(int(x.sum()) for x in parts), 1000):
            for cache in (0, 1):
                held, problem.hidden = problem.hidden, problem.hidden.masked_fill(~counts.unsqueeze(-1), torch.nan)
                found, found_grads = problem.ours(what, group, layout, cache=cache, skip_ignored=bound)
                problem.hidden = held
                torch.testing.assert_close(list(found), [x.to(y.dtype) for x, y in zip(truth, found, strict=True)])
                torch.testing.assert_close(list(found_grads), problem.pieces(grads, group, layout))


@pytest.mark.parametrize("call", [linear_cross_entropy, linear_log_probs])
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_flops_without_a_wait(call, layout):
    """Fake tensors fail where a value is read."""
    tokens, width, columns, bound = 64, 8, 48, 10
    found = costs(partial(call, cache=1, skip_ignored=bound), layout, (tokens, width, 2 * columns, 2))
    assert found.flops == 6 * (2 * bound if layout == "sequence" else bound) * width * columns


@ranks(1, 2)
def test_a_bound_that_is_broken_is_refused_on_every_rank():
    hidden, weight = torch.randn(4, 3), torch.randn(8, 3)
    counts = torch.tensor([True, True, False, True])
    head = LmHead(weight, dist.group.WORLD)
    labels = torch.zeros(4, dtype=torch.int64)
    for at_most, said in ((2, "is 2, and more tokens count"), (0, "skip_ignored, is 0"), (1.5, "skip_ignored, is 1.5")):
        with pytest.raises(ValueError, match=said):
            head.read(hidden, LogProbs(labels), counts=counts, at_most=at_most)
    with pytest.raises(ValueError, match="at_most is 2, and counts is None"):
        head.read(hidden, LogProbs(labels), at_most=2)
    with pytest.raises(ValueError, match="skip_ignored, is 0"):
        linear_log_probs(hidden, weight, labels, dist.group.WORLD, skip_ignored=0)


@ranks(2, 4)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_bound_that_labels_of_one_rank_break_is_refused_on_all(layout):
    size, rank = dist.get_world_size(), dist.get_rank()
    hidden, weight = torch.randn(4 if layout == "sequence" else 4 * size, 3), torch.randn(8, 3)
    labels = torch.full((4 * size,), -100)
    labels[: 4 if rank == 1 else 2] = 1
    match = "is 3, and more tokens count" if rank == 1 else "another rank of tp_group refused"
    with pytest.raises(ValueError, match=match):
        linear_log_probs(hidden, weight, labels, dist.group.WORLD, layout, skip_ignored=3)

"""Gradients in 16 bits err as little as those of plain unfused PyTorch in the same dtype over the same ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_size
from tests.head.problems import Problem
from tests.ranks import ranks

LIMIT = 1.1  # times plain PyTorch's error


def problem_of(tokens, width, columns, size, targets, grads):
    """Logits of about `size`, labels drawn evenly or the likeliest tokens, upstream gradients drawn or constant."""
    problem = Problem((tokens,), width, columns, torch.bfloat16, logit_size=size)
    if targets == "sure":
        problem.labels = (problem.hidden.double() @ problem.weight.double().t()).argmax(-1)
    if grads == "constant":
        problem.grad = torch.full((tokens,), 0.3)
    return problem


def over_ranks(got, truth, group):
    """Distance of the whole gradient whose pieces the ranks hold."""
    return collectives.all_reduce((got.double() - truth).square().sum(), group).sqrt()


def check(problem, group, layout):
    truth, plain = problem.truth("loss")[1], problem.plain("loss", group_size(group))[1]
    truth, plain = (problem.pieces(whole, group, layout) for whole in (truth, plain))
    for cache in (0, 0.5, 1):
        grads = problem.ours("loss", group, layout, cache=cache)[1]
        for name, ours, same, theirs in zip(("dx", "dW"), grads, truth, plain, strict=True):
            found, limit = over_ranks(ours, same, group), LIMIT * over_ranks(theirs, same, group)
            assert found <= limit, f"{name}, cache {cache}: {LIMIT * found / limit:.3f} x the error of plain PyTorch"


@ranks(1, 2, 4)
@pytest.mark.parametrize(
    "size, targets, grads", [(0.05, "flat", "drawn"), (1.0, "sure", "constant"), (8.0, "sure", "drawn")]
)
def test_a_few(size, targets, grads):
    check(problem_of(192, 48, 701, size, targets, grads), dist.group.WORLD, "replicated")


@pytest.mark.slow
@ranks(1, 2, 4)
@pytest.mark.parametrize("sizes", [(256, 64, 1000), (1024, 32, 300), (64, 128, 4000), (2048, 32, 41)], ids=str)
def test_all(sizes):
    """Many tokens a column and few, small and large logits, even and sure labels, any gradient, both layouts."""
    for size in (0.05, 1.0, 8.0):
        for targets in ("flat", "sure"):
            for grads in ("drawn", "constant"):
                for layout in ("replicated", "sequence"):
                    check(problem_of(*sizes, size, targets, grads), dist.group.WORLD, layout)


@pytest.mark.slow
@ranks(1, 2)
def test_a_common_direction_of_all_tokens():
    """The labels' rows and the product are large and nearly cancel: rounded apart they would err 1.4 x and more."""
    problem = problem_of(1024, 32, 300, 0.05, "flat", "constant")
    direction = torch.randn(32, generator=torch.Generator().manual_seed(5))
    problem.hidden = (problem.hidden + direction).bfloat16()
    check(problem, dist.group.WORLD, "replicated")

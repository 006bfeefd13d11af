"""Gradients in 16 bits err as little as those of plain unfused PyTorch in the same dtype over the same ranks."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_size
from tests.head.problems import Problem, error
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
    return collectives.all_reduce((got.double() - truth).square().sum(), group).sqrt()


def check(problem, group, layouts=("replicated",)):
    for layout in layouts:
        for cache in (0, 0.5, 1):
            _, *grads = problem.beside_plain("loss", group, layout, cache=cache)
            for name, (ours, same, theirs) in zip(("dx", "dW"), grads, strict=True):
                found, limit = over_ranks(ours, same, group), LIMIT * over_ranks(theirs, same, group)
                assert found <= limit, f"{name}, cache {cache}: {LIMIT * found / limit:.3f} x plain PyTorch's error"


@ranks(1, 2, 4)
@pytest.mark.parametrize(
    "size, targets, grads", [(0.05, "flat", "drawn"), (1.0, "sure", "constant"), (8.0, "sure", "drawn")]
)
def test_a_few(size, targets, grads):
    check(problem_of(192, 48, 701, size, targets, grads), dist.group.WORLD)


@pytest.mark.slow
@ranks(1, 2, 4)
@pytest.mark.parametrize("sizes", [(256, 64, 1000), (1024, 32, 300), (64, 128, 4000), (2048, 32, 41)], ids=str)
def test_all(sizes):
    """Many tokens a column and few, small and large logits, even and sure labels, any gradient, both layouts.

    Any two of them meet: labels and gradients in two ways for each size of logits.
    """
    group = dist.group.WORLD
    layouts = ("replicated", "sequence")[: group_size(group)]  # the same at one rank
    for number, size in enumerate((0.05, 1.0, 8.0)):
        for targets, grads in zip(("flat", "sure"), (("drawn", "constant") * 2)[number:], strict=False):
            check(problem_of(*sizes, size, targets, grads), group, layouts)


@ranks(1, 2)
@pytest.mark.parametrize("what, grads", [("hidden", "constant"), ("weight", "drawn")])
def test_a_common_direction(what, grads):
    """Tokens, or columns, share a direction: the labels' rows and the product are large and nearly cancel in dW, or in
    dx.

    Rounded apart, or summed in 16 bits, they would err 1.4 x and more.
    """
    problem = problem_of(1024, 32, 300, 0.05, "flat", grads)
    direction = torch.randn(32, generator=torch.Generator().manual_seed(5)) * (1.0 if what == "hidden" else 0.2)
    setattr(problem, what, (getattr(problem, what) + direction).bfloat16())
    check(problem, dist.group.WORLD)


@pytest.mark.parametrize("lowest", [4, 8, 12])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_saturated_softcap(dtype, lowest):
    """Every logit is 2 to 8 times the softcap: the gradient is what is left of its slope, down to 1e-6.

    16 bits of an exponential do not tell it (they err 10 to 400 times as much), and 1 - tanh^2 in fp32 has few digits.
    """
    problem = Problem((4, 5), 1, 9, dtype, options={"softcap": 2.0})
    g = torch.Generator().manual_seed(0)
    sizes, signs = lowest + 4 * torch.rand(9, 1, generator=g), torch.randn(9, 1, generator=g).sign()
    problem.hidden, problem.weight = problem.hidden.sign(), (sizes * signs).to(dtype)
    for what in ("loss", "log_probs"):
        for cache in (0, 0.5, 1):
            for ours, same, theirs in problem.beside_plain(what, None, cache=cache)[-2:]:
                limit = 4 * torch.finfo(dtype).eps if dtype == torch.float32 else 2 * error(theirs, same)
                assert error(ours, same) <= limit, (what, cache, error(ours, same), error(theirs, same))

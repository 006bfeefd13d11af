"""Operations dispatched by a small call, where Python, not arithmetic, takes the time."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ext import linear_cross_entropy, vocab_parallel_cross_entropy
from tests.head.problems import Problem
from tests.operators import Operators
from tests.ranks import ranks


@ranks(1, 2)
@pytest.mark.parametrize("source, most", [("hidden states", {1: 74, 2: 135}), ("logits", {1: 62, 2: 113})])
def test_a_forward_and_backward_on_the_cpu(source, most):
    """Two ranks take more operations than one, to tell each other of themselves and to check it."""
    problem, group, of_hidden = Problem((8,), 16, 64, torch.float32), dist.group.WORLD, source == "hidden states"
    problem.labels = problem.labels.clamp(min=0)
    hidden, weight, _ = problem.mine(group)
    logits = (hidden @ weight.T).detach().requires_grad_()
    call = partial(linear_cross_entropy, hidden, weight) if of_hidden else partial(vocab_parallel_cross_entropy, logits)
    call(problem.labels, group).sum().backward()  # what ranks say is looked at once
    hidden.grad = weight.grad = logits.grad = None
    ones = torch.ones(8)
    with Operators() as operators:
        call(problem.labels, group).backward(ones)
    assert len(operators.seen) <= most[dist.get_world_size()], f"{len(operators.seen)} operations"

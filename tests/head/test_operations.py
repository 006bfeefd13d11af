"""What a small call costs where Python, not arithmetic, takes the time: operations dispatched, functions entered."""

import sys
from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ext import linear_cross_entropy, vocab_parallel_cross_entropy
from tests.operators import Operators
from tests.ranks import ranks

T, D, V = 8, 16, 64


def _functions_of(run) -> int:
    """How many functions of the package `run` enters."""
    entered = []

    def see(frame, event, argument):
        if event == "call" and "megatron_ext" in frame.f_code.co_filename:
            entered.append(frame.f_code)

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    return len(entered)


@pytest.mark.parametrize("source, most, functions", [("hidden states", 74, 340), ("logits", 62, 308)])
def test_a_forward_and_backward_on_one_rank_on_the_cpu(source, most, functions):
    labels = torch.randint(V, (T,))
    hidden, weight, logits = (torch.randn(*shape, requires_grad=True) for shape in ((T, D), (V, D), (T, V)))
    ones, of_hidden = torch.ones(T), source == "hidden states"
    call = partial(linear_cross_entropy, hidden, weight) if of_hidden else partial(vocab_parallel_cross_entropy, logits)
    with Operators() as operators:
        loss = call(labels)
        loss.backward(ones)
    assert len(operators.seen) <= most
    assert _functions_of(lambda: call(labels).backward(ones)) <= functions
    want = torch.nn.functional.cross_entropy(hidden @ weight.T if of_hidden else logits, labels, reduction="none")
    torch.testing.assert_close(loss, want)


@ranks(2)
@pytest.mark.parametrize("source, most", [("hidden states", 135), ("logits", 113)])
def test_a_forward_and_backward_on_two_ranks_on_the_cpu(source, most):
    """What ranks say of themselves and of each other takes 40 of them, collectives included."""
    labels = torch.randint(V, (T,), generator=torch.Generator().manual_seed(0))
    full, rank = torch.Generator().manual_seed(1), dist.get_rank()
    hidden, weight = (torch.randn(*shape, generator=full) for shape in ((T, D), (V, D)))
    own = weight.chunk(2)[rank].clone().requires_grad_()
    logits = (hidden @ weight.T).chunk(2, 1)[rank].contiguous().requires_grad_()
    x, of_hidden = hidden.clone().requires_grad_(), source == "hidden states"
    call = partial(linear_cross_entropy, x, own) if of_hidden else partial(vocab_parallel_cross_entropy, logits)
    call(labels, dist.group.WORLD).sum().backward()  # what ranks say is looked at once
    x.grad = own.grad = logits.grad = None
    with Operators() as operators:
        loss = call(labels, dist.group.WORLD)
        loss.backward(torch.ones(T))
    assert len(operators.seen) <= most, f"{len(operators.seen)} operations"
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    of_all = hidden @ weight.T
    of_all.retain_grad()
    want = torch.nn.functional.cross_entropy(of_all, labels, reduction="none")
    want.sum().backward()
    torch.testing.assert_close(loss.double(), want, rtol=1e-5, atol=1e-5)
    found = [(x.grad, hidden.grad), (own.grad, weight.grad.chunk(2)[rank])]
    for grad, wanted in found if of_hidden else [(logits.grad, of_all.grad.chunk(2, 1)[rank])]:
        torch.testing.assert_close(grad.double(), wanted, rtol=1e-5, atol=1e-5)

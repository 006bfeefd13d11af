"""What a small call costs where Python, not arithmetic, takes the time: operations dispatched, functions entered."""

import sys

import pytest
import torch

from megatron_ext import linear_cross_entropy, vocab_parallel_cross_entropy
from tests.operators import Operators

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


@pytest.mark.parametrize("source, most, functions", [("hidden states", 99, 332), ("logits", 83, 295)])
def test_a_forward_and_backward_on_one_rank_on_the_cpu(source, most, functions):
    labels = torch.randint(V, (T,))
    hidden, weight, logits = (torch.randn(*shape, requires_grad=True) for shape in ((T, D), (V, D), (T, V)))
    ones, of_hidden = torch.ones(T), source == "hidden states"

    def call():
        if of_hidden:
            return linear_cross_entropy(hidden, weight, labels)
        return vocab_parallel_cross_entropy(logits, labels)

    with Operators() as operators:
        loss = call()
        loss.backward(ones)
    assert len(operators.seen) <= most
    assert _functions_of(lambda: call().backward(ones)) <= functions
    want = torch.nn.functional.cross_entropy(hidden @ weight.T if of_hidden else logits, labels, reduction="none")
    torch.testing.assert_close(loss, want)

"""How many operations a small call dispatches: what it costs where Python, not arithmetic, takes the time."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext import linear_cross_entropy, vocab_parallel_cross_entropy

T, D, V = 8, 16, 64


class _Count(TorchDispatchMode):
    operations = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("source, most", [("hidden states", 100), ("logits", 94)])
def test_a_forward_and_backward_on_one_rank_on_the_cpu(source, most):
    labels = torch.randint(V, (T,))
    hidden, weight, logits = (torch.randn(*shape, requires_grad=True) for shape in ((T, D), (V, D), (T, V)))
    ones = torch.ones(T)
    with _Count() as count:
        of_hidden = source == "hidden states"
        loss = (
            linear_cross_entropy(hidden, weight, labels) if of_hidden else vocab_parallel_cross_entropy(logits, labels)
        )
        loss.backward(ones)
    assert count.operations <= most
    want = torch.nn.functional.cross_entropy(hidden @ weight.T if of_hidden else logits, labels, reduction="none")
    torch.testing.assert_close(loss, want)

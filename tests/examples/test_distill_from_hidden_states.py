"""Distillation from hidden states beside the divergence of whole distributions, in plain PyTorch and fp64."""

import re

import distill_from_hidden_states as example
import pytest
import torch

from tests.examples import EXAMPLES
from tests.programs import python

SCRIPT = str(EXAMPLES / "distill_from_hidden_states.py")


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, size in {"B": 4, "S": 6, "V": 97, "CHUNK": 5}.items():
        monkeypatch.setattr(example, name, size)


def divergence(student, hidden, teacher, target, top_k: int) -> torch.Tensor:
    """The mean KL(student | teacher)."""
    q, p = ((x.double() @ head.weight.double().T).softmax(-1) for head, x in ((student, hidden), (teacher, target)))
    if top_k:
        ids = p.argsort(-1, descending=True)[..., :top_k]
        q, p = (torch.cat([x.gather(-1, ids), 1 - x.gather(-1, ids).sum(-1, keepdim=True)], -1) for x in (q, p))
    return (q * (q / p).log()).sum(-1).mean()


@pytest.mark.parametrize("top_k", [0, 7])
def test_distillation_equals_the_whole_distributions(top_k):
    losses, batch = example.train(4, top_k)
    assert losses[-1] < losses[0]
    expected, gradients = divergence(*batch, top_k), example.gradients(divergence, *batch, top_k)
    for way in (example.from_hidden_states, example.from_logits):
        torch.testing.assert_close(way(*batch, top_k).double(), expected, rtol=1e-5, atol=0)
        found = example.gradients(way, *batch, top_k)
        torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--top-k", "16"]])
def test_distillation_program_prints_both_losses(words):
    done = python(SCRIPT, *words)
    assert done.returncode == 0, done.stderr
    steps, ours, stock = ([float(x) for x in re.findall(r"\d+\.\d+", line)] for line in done.stdout.splitlines())
    assert steps[-1] < steps[0] / 2
    (loss, peak), (stock_loss, stock_peak) = ours, stock
    assert loss == pytest.approx(stock_loss, abs=2e-5)
    assert peak < stock_peak / 4

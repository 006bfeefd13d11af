"""Numbers read from a Hugging Face model's hidden states beside those of its logits in fp64."""

import re

import entropy_and_top_k as example
import hf_directory
import pytest
import torch

from tests.examples import EXAMPLES
from tests.programs import python

SCRIPT = str(EXAMPLES / "entropy_and_top_k.py")
K = 4


def test_numbers_and_gradients_are_those_of_the_logits():
    model = hf_directory.new_model(hidden_size=32, layers=1, vocab_size=53, tied=True, seed=1)
    tokens = torch.randint(53, (1, 19), generator=torch.Generator().manual_seed(1))
    log_p = model(tokens).logits.double().log_softmax(-1)[0, :-1]
    likeliest = log_p.argsort(-1, descending=True)[:, :K]
    labels = log_p[torch.arange(18), tokens[0, 1:]]
    expected = [-(log_p.exp() * log_p).sum(-1), labels, log_p.gather(-1, likeliest)]
    gradients = [torch.autograd.grad(x.square().sum(), list(model.parameters()), retain_graph=True) for x in expected]
    for read in (example.from_hidden_states, example.from_logits):
        *found, ids = read(model, tokens, K)
        assert torch.equal(ids, likeliest)
        for number, right, gradient in zip(found, expected, gradients, strict=True):
            torch.testing.assert_close(number.double(), right, rtol=1e-5, atol=1e-6)
            ours = torch.autograd.grad(number.square().sum(), list(model.parameters()), retain_graph=True)
            torch.testing.assert_close(ours, gradient, rtol=1e-4, atol=1e-5)


def assert_prints_equal_numbers(*words: str, k: int) -> None:
    done = python(SCRIPT, "--top-k", str(k), *words)
    assert done.returncode == 0, done.stderr
    _, *rows, last = done.stdout.splitlines()
    assert len(rows) == 3
    for row in rows:
        ours, logits, apart = map(float, row.split()[-3:])
        assert ours == pytest.approx(logits, abs=1e-5)
        assert apart < 1e-4
    same, tokens = map(int, re.fullmatch(rf"tokens with the same {k} likeliest ids: (\d+) of (\d+)", last).groups())
    assert same > 0.99 * tokens > 0


@pytest.mark.slow
def test_program_reads_a_new_model_and_a_saved_one(tmp_path):
    assert_prints_equal_numbers(k=5)
    hf_directory.new_model(32, 1, 300, tied=True, seed=2).save_pretrained(tmp_path)
    hf_directory.new_tokenizer([(EXAMPLES / "text.py").read_text()], 300).save_pretrained(tmp_path)
    assert_prints_equal_numbers("--model", str(tmp_path), k=3)

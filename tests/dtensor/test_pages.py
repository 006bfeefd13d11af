"""The lines of the pages for users of transformers run as they stand, and give what transformers gives."""

import re

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_ext import reference
from tests.dtensor.models import VOCAB, drawn, error, make
from tests.dtensor.test_trainer import FSDP2
from tests.pages import DOCS, python_blocks
from tests.ranks import ranks, shared_folder


def per_token(model, tokens):
    """The loss of each position but the last one."""
    return -reference.log_probs(model(input_ids=tokens).logits[:, :-1], tokens[:, 1:])


def test_trainer_and_lora(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    plain, fsdp2, adapted = python_blocks((DOCS / "trainer.md").read_text())
    exec(plain, names)
    assert names["trainer"].state.global_step == 4
    assert str(names["fused_loss_report"](names["model"])).startswith("LlamaForCausalLM: fused (proved on 12 tokens")
    one = {name: x[None] for name, x in names["rows"][0].items()}
    assert names["model"].train()(**one).logits is None
    assert names["model"].eval()(**one).logits is not None
    assert re.search("fsdp_config=.*?}", fsdp2)[0] in FSDP2  # which a test there trains with
    exec(adapted, names)
    trained = [p for p in names["adapted"].parameters() if p.requires_grad]
    assert trained
    assert all(p.grad is None or p.grad.isfinite().all() for p in trained)
    assert not names["base"].lm_head.weight.requires_grad


@pytest.mark.slow
@ranks(2)
def test_fsdp2():
    tokens, plain = drawn(2, 8), make("llama")
    expected = per_token(plain, tokens)
    mine = tokens[dist.get_rank()][None]
    names = {"torch": torch, "device": "cpu", "ranks": 2, "model": make("llama"), "tokens": mine}
    names |= {"model_on_every_rank": make("llama"), "folder": shared_folder()}
    by_hand, parallelized, with_labels = python_blocks((DOCS / "fsdp2.md").read_text())
    exec(by_hand, names)
    assert error(names["loss"], expected[dist.get_rank()].mean()) < 3e-6
    expected.mean().backward()
    for name, p in names["model"].named_parameters():
        assert error(p.grad, plain.get_parameter(name).grad) < 1e-5
    exec(parallelized, names)
    # In bf16.
    own = expected[dist.get_rank()].detach()
    torch.testing.assert_close(names["losses"][0, :-1], own, rtol=0, atol=0.05)
    torch.testing.assert_close(names["loss"], own.mean(), rtol=0.01, atol=0)
    for name, p in names["again"].named_parameters():
        assert torch.equal(p.full_tensor(), plain.get_parameter(name))
    names["labels"] = mine.masked_fill(torch.arange(8) < 3 * dist.get_rank(), -100)  # 7 targets, and 5
    exec(with_labels, names)
    masked = torch.cat([expected[0], expected[1, 2:]]).detach()
    averaged = names["loss"].detach().clone()
    dist.all_reduce(averaged)
    torch.testing.assert_close(averaged / 2, masked.mean(), rtol=0.01, atol=0)


def test_one_gpu():
    tokens, plain = drawn(2, 8), make("llama")
    masked = tokens.clone()
    masked[:, :3] = -100
    torch.manual_seed(0)
    hidden, labels = torch.randn(2, 6, 8, requires_grad=True), tokens[:, :6]
    head = torch.nn.Linear(8, VOCAB, bias=False)
    names = {"hidden": hidden, "head": head, "labels": labels}
    names |= {"model": make("llama"), "tokens": tokens, "masked": masked}
    own, model = python_blocks((DOCS / "one_gpu.md").read_text())
    exec(own, names)
    expected = F.cross_entropy(head(hidden).flatten(0, 1), labels.flatten())
    torch.testing.assert_close(names["loss"], expected)
    torch.testing.assert_close(hidden.grad, torch.autograd.grad(expected, hidden)[0])
    exec(model, names)
    loss = plain(input_ids=tokens, labels=masked).loss
    loss.backward()
    for name, p in names["model"].named_parameters():
        assert error(p.grad, plain.get_parameter(name).grad) < 1e-5
    losses = per_token(plain, tokens)
    assert error(names["losses"][:, 2:-1], losses[:, 2:]) < 3e-6
    assert names["losses"][:, :2].eq(0).all()
    assert error(names["log_probs"][:, :-1], -losses) < 3e-6

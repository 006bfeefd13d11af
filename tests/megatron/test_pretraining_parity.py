"""Pretraining with our layers and our head against stock Megatron: the same losses, step by step."""

from contextlib import ExitStack

import pytest
import torch

from megatron_ext.megatron.layer_specs import gpt_block_spec
from tests.gpt import model_parallel, ours_everywhere, stock_spec, tiny_batches, tiny_gpt, train_steps
from tests.megatron.patching import patched
from tests.ranks import ranks

pytestmark = pytest.mark.slow

STEPS = 20


def losses_of(ours: bool, sizes: dict, tied: bool, overrides: dict) -> list[float]:
    with model_parallel(**sizes), ExitStack() as changes:
        if ours:
            changes.enter_context(ours_everywhere())
            changes.enter_context(patched(chunk_size=5))
        chunks = tiny_gpt(gpt_block_spec if ours else stock_spec, tied=tied, weights="init", **overrides)
        if ours:
            kinds = {type(m).__module__ for m in chunks[0].modules() if "Parallel" in type(m).__name__}
            assert all(kind.startswith("megatron_ext.") for kind in kinds), kinds
        return train_steps(chunks, tiny_batches(steps=STEPS), lr=3e-4)


def parity(sizes: dict, *, tied: bool, dropout: float, **overrides) -> None:
    overrides |= {"hidden_dropout": dropout, "attention_dropout": dropout}
    stock, ours = (torch.tensor(losses_of(way, sizes, tied, overrides), dtype=torch.float64) for way in (False, True))
    assert len(stock) == STEPS
    assert stock.std() > 1e-3, "the losses of a model that does not learn agree with anything"
    worst = ((ours - stock).abs() / stock).max()
    assert worst < 1e-5, f"relative difference {worst:.1e}\nstock {stock}\nours  {ours}"


# Tied and untied weights, with dropout and without.
@ranks(1)
def test_tp1():
    parity({}, tied=False, dropout=0.1)


@ranks(2)
@pytest.mark.parametrize(
    "options", [{"tied": True, "dropout": 0.1}, {"tied": False, "dropout": 0.0, "sequence_parallel": True}], ids=str
)
def test_tp2(options):
    parity({"tp": 2}, **options)


@pytest.mark.each_version
@ranks(4)
def test_tp2_pp2():
    parity({"tp": 2, "pp": 2}, tied=True, dropout=0.1)

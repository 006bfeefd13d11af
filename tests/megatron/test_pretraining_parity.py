"""Pretraining with our layers and our head against stock Megatron: the same losses, step by step."""

import pytest
import torch
import torch.distributed as dist

from tests.gpt import model_parallel, stock_spec, tiny_batches, tiny_gpt, train_steps
from tests.ranks import ranks

pytestmark = pytest.mark.slow

STEPS = 20
LAYOUTS = {
    "tp1": (1, {"tp": 1}, {}),
    "tp2": (2, {"tp": 2}, {}),
    "tp2-sp": (2, {"tp": 2}, {"sequence_parallel": True}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2}, {}),
}


def losses_of(ours: bool, sizes: dict, overrides: dict, tied: bool) -> list[float]:
    """Per-step losses at Megatron's own initialisation, from the same seed either way."""
    with model_parallel(**sizes):
        from megatron_ext import restore_tensor_parallel, substitute_tensor_parallel
        from megatron_ext.megatron.layer_specs import gpt_block_spec
        from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion as patch
        from megatron_ext.model_utils import unpatch_gpt_model_forward_for_linear_ce_fusion as unpatch

        if ours:
            substitute_tensor_parallel()
            patch(chunk_size=5)
        try:
            spec = gpt_block_spec if ours else stock_spec
            chunks = tiny_gpt(spec, tied=tied, weights="init", **overrides)
            if ours:
                kinds = {type(m).__module__ for m in chunks[0].modules() if "Parallel" in type(m).__name__}
                assert all(kind.startswith("megatron_ext.") for kind in kinds), kinds
            return train_steps(chunks, tiny_batches(steps=STEPS), lr=3e-4)
        finally:
            if ours:
                unpatch()
                restore_tensor_parallel()


def parity(layout: str, tied: bool, dropout: float) -> None:
    world_size, sizes, overrides = LAYOUTS[layout]
    assert dist.get_world_size() == world_size
    overrides = {**overrides, "hidden_dropout": dropout, "attention_dropout": dropout}
    stock = torch.tensor(losses_of(False, sizes, overrides, tied), dtype=torch.float64)
    ours = torch.tensor(losses_of(True, sizes, overrides, tied), dtype=torch.float64)
    assert len(stock) == STEPS
    assert stock.std() > 1e-3, "the losses of a model that does not learn agree with anything"
    worst = ((ours - stock).abs() / stock).max()
    assert worst < 1e-5, f"relative difference {worst:.1e}\nstock {stock}\nours  {ours}"


# Tied and untied weights, with dropout and without.
@ranks(1)
def test_tp1():
    parity("tp1", tied=False, dropout=0.1)


@ranks(2)
def test_tp2():
    parity("tp2", tied=True, dropout=0.1)


@ranks(2)
def test_tp2_sp():
    parity("tp2-sp", tied=False, dropout=0.0)


@pytest.mark.each_version
@ranks(4)
def test_tp2_pp2():
    parity("tp2-pp2", tied=True, dropout=0.1)

"""Embedding and lm head shared by all pipeline stages, against Megatron's own schedules: losses and weights."""

from contextlib import contextmanager

import pytest
import torch

from tests.gpt import data_parallel, model_parallel, stock_spec, tiny_batches, tiny_gpt, train_steps
from tests.ranks import ranks

STEPS = 20


@contextmanager
def shared(on: bool = True):
    """Models built inside share their vocabulary."""
    from megatron_ext.megatron import pipeline

    if on:
        pipeline.share_vocabulary()
    try:
        yield
    finally:
        pipeline.restore()


def losses(sizes: dict, ours: bool, tied: bool, weights="names", **overrides):
    with model_parallel(**sizes), shared(ours):
        chunks = tiny_gpt(stock_spec, tied=tied, weights=weights, **overrides)
        return train_steps(chunks, tiny_batches(steps=STEPS, batch=8), lr=3e-3)


def parity(sizes: dict, tied: bool, **overrides) -> None:
    stock = torch.tensor(losses(sizes, False, tied, **overrides), dtype=torch.float64)
    ours = torch.tensor(losses(sizes, True, tied, **overrides), dtype=torch.float64)
    assert stock.std() > 1e-3, "the losses of a model that does not learn agree with anything"
    worst = ((ours - stock).abs() / stock).max()
    assert worst < 1e-6, f"relative difference {worst:.1e}\nstock {stock}\nours  {ours}"


@ranks(2)
@pytest.mark.parametrize("tied", [True, False])
def test_two_stages(tied):
    parity({"pp": 2}, tied)

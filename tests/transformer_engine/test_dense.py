"""Dense GPT models of Transformer Engine's layers, beside Megatron's local layers: losses, and norms of gradients."""

import pytest
import torch

from tests.gpt import data_parallel, make_optimizer, model_parallel, tiny_batches, tiny_gpt, train_step
from tests.ranks import ranks
from tests.transformer_engine.models import te_spec

STEPS = 3


def losses_and_norms(spec, batches, **overrides):
    chunks = data_parallel(tiny_gpt(spec, **overrides))
    optimizer = make_optimizer(chunks)
    return torch.tensor([train_step(chunks, optimizer, tokens_BS) for tokens_BS in batches], dtype=torch.float64)


def assert_te_is_local(sizes, **overrides):
    batches = tiny_batches(STEPS)
    with model_parallel(**sizes):
        local = losses_and_norms(None, batches, **overrides)
        engine = losses_and_norms(te_spec, batches, transformer_impl="transformer_engine", **overrides)
    torch.testing.assert_close(engine[:, 0], local[:, 0], rtol=1e-6, atol=0)
    torch.testing.assert_close(engine[:, 1], local[:, 1], rtol=1e-5, atol=0)
    assert local[0, 1] > 0.1


@ranks(1)
@pytest.mark.parametrize("overrides", [{}, {"normalization": "RMSNorm", "num_query_groups": 2}], ids=str)
def test_one_rank(overrides):
    assert_te_is_local({}, **overrides)


@ranks(2)
def test_tensor_and_sequence_parallel():
    assert_te_is_local({"tp": 2}, sequence_parallel=True)

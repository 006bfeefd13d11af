"""Megatron's GPTModel with these random streams and recomputation in the place of its own."""

from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch

from megatron_ext.tensor_parallel import random
from tests.gpt import loss_and_grads, model_parallel, tiny_batches, tiny_gpt
from tests.ranks import ranks
from tests.tensor_parallel.rng import no_tracker

pytestmark = pytest.mark.slow


@contextmanager
def ours_in_megatron():
    """Megatron's modules find our functions by attribute, and our tracker behind their own. Gives the mocks."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random as stock

    names = ["checkpoint", "CheckpointWithoutOutput", "get_cuda_rng_tracker", "model_parallel_cuda_manual_seed"]
    watched = {name: mock.Mock(wraps=getattr(random, name)) for name in names}
    with no_tracker(), ExitStack() as patches:
        patches.enter_context(mock.patch.object(stock, "_CUDA_RNG_STATE_TRACKER", random.get_cuda_rng_tracker()))
        for name, function in watched.items():
            for module in (tensor_parallel, stock):
                patches.enter_context(mock.patch.object(module, name, function))
        yield watched


def selective(*modules):
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def check(*recomputations, **settings):
    """Loss and gradients with dropout, plain and recomputed, are bitwise those of Megatron without recomputation."""
    tokens = tiny_batches()[0]
    settings = {"hidden_dropout": 0.1, "attention_dropout": 0.1, **settings}
    stock_loss, stock_grads = loss_and_grads(tiny_gpt(**settings), tokens)
    with ours_in_megatron() as used:
        for recomputation in ({}, *recomputations):
            for function in used.values():
                function.reset_mock()
            loss, grads = loss_and_grads(tiny_gpt(**settings, **recomputation), tokens)
            assert loss == stock_loss, recomputation
            for name, grad in stock_grads.items():
                assert torch.equal(grads[name], grad), (name, recomputation)
            assert used["model_parallel_cuda_manual_seed"].called
            assert used["get_cuda_rng_tracker"].called
            recomputed = used["checkpoint"].called or used["CheckpointWithoutOutput"].called
            assert recomputed == bool(recomputation), recomputation


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["replicated", "sequence"])
@ranks(1, 2)
def test_as_megatron_without_recomputation(sequence_parallel):
    """Under sequence parallelism Megatron runs all layers inside one fork, and attention forks again."""
    size = torch.distributed.get_world_size()
    recomputations = [FULL, selective("core_attn", "mlp"), selective("layernorm")]
    if not sequence_parallel:
        recomputations.append(FULL | {"distribute_saved_activations": True})
    with model_parallel(tp=size):
        check(*recomputations, sequence_parallel=sequence_parallel and size > 1)

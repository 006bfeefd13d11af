"""Dropout under Transformer Engine's RNG tracker, recomputed activations, and runs that are resumed."""

from contextlib import contextmanager

import pytest
import torch

from tests.gpt import model_parallel, ours_everywhere, seed_ranks, tiny_batches, tiny_gpt
from tests.marks import slow
from tests.on_transformer_engine.models import ENGINE, plain_loss, te_spec
from tests.ranks import ranks

DROPOUT = {"hidden_dropout": 0.2, "attention_dropout": 0.2}


@contextmanager
def any_tracker():
    """Megatron's groups; afterwards its own tracker again, whichever was in use."""
    with model_parallel():
        from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

        try:
            yield
        finally:
            model_parallel_cuda_manual_seed(11, te_rng_tracker=False, force_reset_rng=True)


def loss_and_grads(tracker: bool, spec=te_spec, **overrides):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(11, te_rng_tracker=tracker, force_reset_rng=True)
    (model,) = tiny_gpt(spec, **ENGINE, **DROPOUT, **overrides)  # its attention keeps the tracker that there is
    model_parallel_cuda_manual_seed(11, te_rng_tracker=tracker, force_reset_rng=False)
    loss = plain_loss(model, tiny_batches()[0])
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@ranks(1)
def test_transformer_engines_tracker_draws_what_megatrons_does():
    with any_tracker():
        megatrons, engines = loss_and_grads(False), loss_and_grads(True)
        (model,) = tiny_gpt(te_spec, **ENGINE)
        without = plain_loss(model, tiny_batches()[0])
    assert not torch.equal(megatrons[0], without), "there is dropout"
    for a, b in zip(megatrons, engines, strict=True):
        assert torch.equal(a, b)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@ranks(1)
@pytest.mark.parametrize("how", [ATTENTION, *slow(FULL)], ids=["attention", "full"])
def test_recomputed_activations_have_the_same_dropout(how):
    with any_tracker():
        kept, recomputed = loss_and_grads(False), loss_and_grads(False, **how)
    for a, b in zip(recomputed, kept, strict=True):
        assert torch.equal(a, b)


@ranks(1)
@pytest.mark.parametrize("how", [ATTENTION, *slow(FULL)], ids=["attention", "full"])
def test_on_transformer_engines_tracker_ours_recompute_the_same_dropout(how):
    """Megatron's own recomputation keeps references to this tracker's streams, which have moved on by then."""
    with any_tracker(), ours_everywhere():
        kept, recomputed = loss_and_grads(True), loss_and_grads(True, **how)
    for a, b in zip(recomputed, kept, strict=True):
        assert torch.equal(a, b)


@ranks(1)
def test_the_same_seed_gives_the_same_dropout_in_fused_attention():
    with model_parallel():
        first = loss_and_grads(False)
        second = loss_and_grads(False)
        seed_ranks()
    assert torch.equal(first[0], second[0])

"""Dropout under Transformer Engine's RNG tracker, recomputed activations, and runs that are resumed."""

from contextlib import nullcontext

import pytest
import torch

from tests.gpt import ours_everywhere, tiny_batches, tiny_gpt
from tests.marks import slow
from tests.megatron_on_cpu.test_resume import DROPOUT, assert_goes_on
from tests.on_transformer_engine.models import ENGINE, any_tracker, plain_loss, te_spec
from tests.ranks import ranks


def loss_and_grads(tracker: bool, **overrides):
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    model_parallel_cuda_manual_seed(11, te_rng_tracker=tracker, force_reset_rng=True)
    (model,) = tiny_gpt(te_spec, **ENGINE, **DROPOUT, **overrides)  # its attention keeps the tracker that there is
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
    torch.testing.assert_close(megatrons, engines, rtol=0, atol=0)


FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
ATTENTION = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}


@ranks(1)
@pytest.mark.parametrize("how", [ATTENTION, *slow(FULL)], ids=["attention", "full"])
@pytest.mark.parametrize("ours", [False, True], ids=["megatrons", "ours"])
def test_recomputed_activations_have_the_same_dropout(how, ours):
    """Ours on Transformer Engine's tracker, to whose streams Megatron's own keeps references: they have moved on."""
    with any_tracker(), ours_everywhere() if ours else nullcontext():
        kept, recomputed = loss_and_grads(ours), loss_and_grads(ours, **how)
    torch.testing.assert_close(recomputed, kept, rtol=0, atol=0)


@ranks(2)
@pytest.mark.parametrize("tracker", [False, *slow(True)], ids=["megatrons", "te"])
def test_a_resumed_run_goes_on_bit_by_bit(tracker, tmp_path):
    assert_goes_on(tmp_path, te_spec, tracker, **ENGINE)

"""`skip_masked_tokens`: a step stays as it is, and the head multiplies only the tokens that the masks count."""

import pytest
import torch

from benchmarks.meter import measure
from megatron_ext.policy import DTensorPolicyWorker, MegatronPolicyWorker
from megatron_ext.policy.config import read_config
from megatron_ext.policy.losses import ClippedPGLoss, DistillationLossFn
from tests.policy.problems import (
    LAYOUTS,
    batching,
    check_trains,
    end_worker,
    ended,
    inside,
    shard,
    tiny_batch,
    tiny_config,
    tiny_model,
    with_teacher,
)
from tests.ranks import ranks

pytestmark = pytest.mark.slow

GRPO = ClippedPGLoss(reference_policy_kl_penalty=0.1)
MODEL = tiny_model(vocab_size=98)


def trained(backend, data, loss_fn, **overrides):
    with ended(backend(tiny_config(MODEL, **overrides), init_reference_model=False)) as worker:
        with measure() as costs:
            found = worker.train(shard(data, worker), loss_fn)
        return found, costs.flops


@pytest.mark.parametrize("skip", [True, 30], ids=["as many as count", "a bound"])
@pytest.mark.parametrize("kind", ["fixed", "packed"])
@pytest.mark.parametrize("backend", [DTensorPolicyWorker, MegatronPolicyWorker])
@ranks(2)
def test_a_step_is_that_of_one_process(backend, kind, skip):
    config = tiny_config(MODEL, skip_masked_tokens=skip, **batching(kind), **LAYOUTS["tp_sp"])
    with ended(backend(config, init_reference_model=False)) as worker:
        check_trains(worker, config, tiny_batch(16), GRPO)


def left_by_masks(data):
    """Tokens that count, the first of a row aside, which nothing predicts."""
    return int((inside(data) & (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None])[:, 1:].sum())


DISTILLATION = DistillationLossFn("mixed", 0.3, True)
# Products of a token forward and backward: what is not read from the softmax makes its logits again.
PER_TOKEN = [(GRPO, 6), (DISTILLATION, 8)]


@pytest.mark.parametrize("loss_fn, products", PER_TOKEN, ids=["GRPO", "distillation"])
@pytest.mark.parametrize("backend", [DTensorPolicyWorker, MegatronPolicyWorker])
@ranks(1)
def test_masked_tokens_make_no_products(backend, loss_fn, products):
    """Neither those of the masks nor padding, nor the last position, which predicts nothing; with a bound as many are
    multiplied as it says."""
    data = with_teacher(tiny_batch(8))  # in 4 micro-batches
    results = {skip: trained(backend, data, loss_fn, skip_masked_tokens=skip) for skip in (False, True, 20)}
    counting, each = left_by_masks(data), products * MODEL.vocab_size * MODEL.hidden_size
    assert counting < 4 * 20 < data["input_ids"].numel()
    flops = {skip: found for skip, (_, found) in results.items()}
    assert flops[False] - flops[True] == (data["input_ids"].numel() - counting) * each
    assert flops[20] - flops[True] == (4 * 20 - counting) * each
    for name in ("global_loss", "grad_norm"):
        for skip in (True, 20):
            torch.testing.assert_close(results[skip][0][name], results[False][0][name], rtol=1e-5, atol=1e-6)


@ranks(2)
def test_bound_that_one_dp_rank_breaks_is_refused_on_all():
    """The bound is checked before anything is computed: the other rank would wait in the model."""
    data = tiny_batch(8)
    data["token_mask"][: data.size // 2] = 0
    left = left_by_masks(data.slice(4, 8))
    worker = DTensorPolicyWorker(tiny_config(MODEL, skip_masked_tokens=3), init_reference_model=False)
    with pytest.raises(ValueError, match="skip_masked_tokens is 3, and the masks leave .* tokens of a micro-batch"):
        worker.train(shard(data, worker), GRPO)
    assert left > 3
    own = shard(data, worker)
    log_probs = worker.get_logprobs(own)["logprobs"]  # which no mask is for
    assert (log_probs[:, 1] != 0).all()
    end_worker(worker)


def test_a_bound_is_a_positive_number():
    for wrong in (0, -3, 2.5, "30"):
        with pytest.raises(ValueError, match=f"skip_masked_tokens is {wrong!r}: it must be true, false, or a positive"):
            read_config(tiny_config(MODEL, skip_masked_tokens=wrong))
    assert read_config(tiny_config(MODEL, skip_masked_tokens=None)).skip_masked_tokens is False

"""`skip_masked_tokens`: a step stays as it is, and the head multiplies only the tokens that the masks count."""

import pytest
import torch

from benchmarks.meter import measure
from megatron_ext.policy import DTensorPolicyWorker, MegatronPolicyWorker
from megatron_ext.policy.losses import ClippedPGLoss
from tests.policy.problems import batching, plain_train, shard, tiny_batch, tiny_config, tiny_model
from tests.ranks import ranks

GRPO = ClippedPGLoss(reference_policy_kl_penalty=0.1)
MODEL = tiny_model(vocab_size=98)


def trained(backend, data, **overrides):
    """What a step gives, and its FLOPs."""
    worker = backend(tiny_config(MODEL, **overrides), init_reference_model=False)
    try:
        with measure() as costs:
            found = worker.train(shard(data, worker), GRPO)
        return found, costs.flops
    finally:
        worker.shutdown()


@pytest.mark.parametrize("kind", [pytest.param("fixed", marks=pytest.mark.slow), "packed"])
@pytest.mark.parametrize("backend", [DTensorPolicyWorker, MegatronPolicyWorker])
@ranks(2)
def test_a_step_is_that_of_one_process(backend, kind):
    data, sizes = tiny_batch(16), {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    layout = {"megatron_cfg": sizes, "tp": 2, "sequence_parallel": True}
    losses, _, _, norms = plain_train(tiny_config(MODEL), data, GRPO)
    found, _ = trained(backend, data, skip_masked_tokens=True, **batching(kind), **layout)
    torch.testing.assert_close(found["global_loss"].tolist(), losses, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["grad_norm"].tolist(), norms, rtol=1e-4, atol=0.0)


@pytest.mark.parametrize("backend", [DTensorPolicyWorker, MegatronPolicyWorker])
@ranks(1)
def test_masked_tokens_make_no_products(backend):
    """Neither those of the masks nor padding, nor the last position, which predicts nothing."""
    data = tiny_batch(8)
    flops = {skip: trained(backend, data, skip_masked_tokens=skip)[1] for skip in (False, True)}
    inside = torch.arange(data["input_ids"].shape[1]) < data["input_lengths"][:, None]
    counting = int((inside & (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None])[:, 1:].sum())
    skipped = data["input_ids"].numel() - counting
    assert flops[False] - flops[True] == 6 * skipped * MODEL.vocab_size * MODEL.hidden_size

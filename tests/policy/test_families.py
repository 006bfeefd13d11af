"""Workers on families of models: scored and trained as one process does it, or refused before weights are read."""

import pytest
import torch
from transformers import GPT2Config

from megatron_ext.policy import DTensorPolicyWorker, NLLLoss
from tests.dtensor.models import family_config
from tests.policy.problems import (
    VOCAB,
    batching,
    largest_error,
    plain_log_probs,
    plain_model,
    plain_train,
    shard,
    tiny_batch,
    tiny_config,
)
from tests.policy.test_logprobs import gathered
from tests.ranks import ranks

pytestmark = pytest.mark.slow


def _config(model, kind="fixed", experts=1, **layout):
    config = tiny_config(model, **layout, **batching(kind))
    config["dtensor_cfg"]["expert_parallel_size"] = experts
    return config


def check(model, **options):
    config, data = _config(model, **options), tiny_batch()
    worker = DTensorPolicyWorker(config, init_reference_model=False)
    with torch.no_grad():
        true = plain_log_probs(plain_model(model), data)
    found = gathered(worker, worker.get_logprobs(shard(data, worker)))["logprobs"]
    torch.testing.assert_close(found, true, rtol=2e-5, atol=2e-5)
    losses, _, weights, _ = plain_train(config, data, NLLLoss())
    assert worker.train(shard(data, worker), NLLLoss())["global_loss"].item() == pytest.approx(losses[0], rel=1e-5)
    # What a generator gets are transformers' names, and whole tensors.
    exported = {name: export.make() for name, export in worker._exports().items()}
    assert {name: x.shape for name, x in exported.items() if name in weights} == {
        n: x.shape for n, x in weights.items()
    }
    assert largest_error({name: exported[name] for name in weights}, weights) < 1e-4


@pytest.mark.parametrize(
    "name, options",
    [
        ("gpt_oss", {"tp": 2, "experts": 2, "sequence_parallel": True}),
        ("mistral", {"cp": 2, "kind": "packed"}),
        ("phi3", {"tp": 2}),
        ("gemma2", {"tp": 2, "kind": "dynamic"}),
        ("qwen3_moe", {"tp": 2}),
        ("deepseek_v3", {"tp": 2, "experts": 2}),
    ],
)
@ranks(2)
def test_families(name, options):
    check(family_config(name), **options)


def _gpt2():
    return GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, attn_pdrop=0, embd_pdrop=0)


@ranks(2)
def test_a_family_that_is_not_known_goes_through_logits():
    check(_gpt2())


def _made(*_):
    raise AssertionError("the model's weights were made")


REFUSED = [
    (_gpt2, {"tp": 2}, "tensor parallelism of GPT2LMHeadModel"),
    (_gpt2, {"cp": 2}, "context parallelism of GPT2LMHeadModel"),
    (_gpt2, {"kind": "packed"}, "sequence_packing of GPT2LMHeadModel .*sequence_packing.enabled to False"),
    (_gpt2, {"tp": 2, "experts": 2}, "GPT2LMHeadModel, which has no experts: set expert_parallel_size to 1"),
    (lambda: family_config("phi3", intermediate_size=47), {"tp": 2}, "intermediate_size is 47: it must be a multiple"),
    (lambda: family_config("qwen3_moe", num_experts=3), {"tp": 2, "experts": 2}, "3 experts: they must be a multiple"),
    (lambda: family_config("mistral"), {"tp": 2, "experts": 3}, "expert_parallel_size is 3: .*tensor_parallel_size, 2"),
]


@pytest.mark.parametrize("refused", range(len(REFUSED)))
@ranks(2)
def test_what_cannot_be_is_refused_before_weights_are_read(refused):
    make, options, message = REFUSED[refused]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "state_dict", _made)
        with pytest.raises(ValueError, match=message):
            DTensorPolicyWorker(_config(make(), **options))

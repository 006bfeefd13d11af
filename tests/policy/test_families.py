"""Workers on families of models: scored and trained as one process does it, or refused before weights are read."""

import pytest
import torch

from megatron_ext.policy import DTensorPolicyWorker, NLLLoss
from tests.dtensor.models import family_config
from tests.marks import slow
from tests.policy.problems import batching, check_trains, tiny_batch, tiny_config
from tests.ranks import ranks


def _config(model, kind="fixed", **layout):
    return tiny_config(model, **layout, **batching(kind))


@pytest.mark.parametrize(
    "name, options",
    [
        ("phi3", {"tp": 2}),
        *slow(
            ("gpt_oss", {"tp": 2, "experts": 2, "sequence_parallel": True}),
            ("mistral", {"cp": 2, "kind": "packed"}),
            ("gemma2", {"tp": 2, "kind": "dynamic"}),
            ("qwen3_moe", {"tp": 2}),
            ("deepseek_v3", {"tp": 2, "experts": 2}),
            ("gpt2", {}),  # is not known, and goes through logits
        ),
    ],
)
@ranks(2)
def test_families(name, options):
    config = _config(family_config(name, tied=name == "gpt2"), **options)
    worker = DTensorPolicyWorker(config, init_reference_model=False)
    check_trains(worker, config, tiny_batch(), NLLLoss(), tolerance=1e-4)


def _made(*_):
    raise AssertionError("the model's weights were made")


@pytest.mark.parametrize(
    "name, changed, layout, message",
    [
        ("gpt2", {}, {"tp": 2}, "tensor parallelism of GPT2LMHeadModel"),
        ("gpt2", {}, {"cp": 2}, "context parallelism of GPT2LMHeadModel"),
        ("gpt2", {}, {"kind": "packed"}, "sequence_packing of GPT2LMHeadModel .*sequence_packing.enabled to False"),
        ("gpt2", {}, {"tp": 2, "experts": 2}, "GPT2LMHeadModel, which has no experts: set expert_parallel_size to 1"),
        ("phi3", {"intermediate_size": 47}, {"tp": 2}, "intermediate_size is 47: it must be a multiple"),
        ("qwen3_moe", {"num_experts": 3}, {"tp": 2, "experts": 2}, "3 experts: they must be a multiple"),
        ("mistral", {}, {"tp": 2, "experts": 3}, "expert_parallel_size is 3: .*tensor_parallel_size, 2"),
    ],
)
@ranks(2)
def test_what_cannot_be_is_refused_before_weights_are_read(name, changed, layout, message):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "state_dict", _made)
        with pytest.raises(ValueError, match=message):
            DTensorPolicyWorker(_config(family_config(name, **changed), **layout))

"""Workers that users change: methods that a subclass overrides, and attributes that are set, hold for all parts."""

import inspect
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megatron_ext.policy import DTensorPolicyWorker, NLLLoss
from megatron_ext.policy.backend.dtensor import DTensorBackend
from megatron_ext.policy.worker.policy_worker import PolicyWorker
from tests.policy.problems import ended, shard, tiny_batch, tiny_config
from tests.ranks import ranks, shared_folder


class Overriding(DTensorPolicyWorker):
    """Twice the log-probabilities, one weight, and notes of the calls."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def get_logprobs(self, *args, **kwargs):
        found = super().get_logprobs(*args, **kwargs)
        found["logprobs"] = 2 * found["logprobs"]
        return found

    def iter_weights(self, *args, **kwargs):
        for name, weight in super().iter_weights(*args, **kwargs):
            yield name, weight + 1

    def abort_train_step(self):
        self.calls.append("abort_train_step")
        super().abort_train_step()

    def use_reference_model(self):
        self.calls.append("use_reference_model")
        return super().use_reference_model()


@ranks(1)
def test_methods_of_a_subclass_are_called_by_the_worker_itself():
    data = tiny_batch()
    with ended(Overriding(tiny_config())) as worker:
        own = worker.scorer.get_logprobs(data)["logprobs"]
        plain = PolicyWorker.get_logprobs(worker, data)["logprobs"]
        assert torch.equal(own, 2 * plain)
        assert torch.equal(worker.get_reference_policy_logprobs(data)["reference_logprobs"], 2 * plain)
        assert worker.calls == ["use_reference_model"]
        weights = dict(PolicyWorker.iter_weights(worker))
        for name, weight in (pair for bucket in worker.iter_weight_buckets() for pair in bucket):
            assert torch.equal(weight, weights[name] + 1)
        worker.begin_train_step(NLLLoss())
        with pytest.raises(ValueError):
            worker.train_microbatch({"input_ids": data["input_ids"]})
        assert worker.calls[1:] == ["abort_train_step"]


class OwnBackend(DTensorBackend):
    """A backend that notes when the reference's weights are asked for."""

    asked = 0

    def use_reference_model(self):
        self.asked += 1
        return super().use_reference_model()


class OnOwnBackend(DTensorPolicyWorker):
    """A worker on that backend."""

    backend_class = OwnBackend


@ranks(1)
def test_methods_of_a_users_backend_are_called():
    with ended(OnOwnBackend(tiny_config())) as worker:
        with worker.use_reference_model():
            assert worker.backend.asked == 1


def test_iterators_are_generator_functions_as_ray_asks():
    assert inspect.isgeneratorfunction(DTensorPolicyWorker.iter_weights)
    assert inspect.isgeneratorfunction(DTensorPolicyWorker.iter_weight_buckets)
    assert [*inspect.signature(DTensorPolicyWorker.iter_weights).parameters] == ["self", "hub_names"]


@ranks(1)
def test_attributes_that_are_set_hold_for_all_parts():
    with ended(DTensorPolicyWorker(tiny_config(), init_reference_model=False)) as worker:
        data = shard(tiny_batch(), worker)
        worker.tokenizer = SimpleNamespace(pad_token_id=7, save_pretrained=mock.Mock())
        worker.cfg = {**worker.cfg, "generation": {"max_new_tokens": 2, "stop_token_ids": [1]}}
        folder = shared_folder()
        worker.save_checkpoint(str(folder / "weights"), tokenizer_path=str(folder / "tokenizer"))
        worker.tokenizer.save_pretrained.assert_called_once_with(str(folder / "tokenizer"))
        prompts = {name: data[name] for name in ("input_ids", "input_lengths")}
        output = worker.generate(prompts, greedy=True)
        outside = torch.arange(output["output_ids"].shape[1]) >= output["unpadded_sequence_lengths"][:, None]
        assert (output["output_ids"][outside] == 7).all()
        assert outside.any()
        with pytest.raises(AttributeError, match="settings"):
            worker.settings = worker.settings

"""Reward models: scores, losses and steps of transformers' sequence classifiers, as one process makes them."""

from functools import partial
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForSequenceClassification, BertConfig

from megatron_ext.policy import DTensorPolicyWorker, LossInputType, LossType, NLLLoss
from tests.dtensor.models import family_config
from tests.policy.problems import batching, inside, plain_model, shard, tiny_batch, tiny_config, tiny_model, whole
from tests.policy.test_logprobs import gathered
from tests.ranks import ranks

REWARDS = {"enabled": True, "reward_model_type": "bradley_terry"}


class PreferenceLoss:
    """Loss of pairs, chosen rows first, called like NeMo-RL's `PreferenceLoss`, which has no `unit` either."""

    loss_type, input_type = LossType.SEQUENCE_LEVEL, LossInputType.LOGIT

    def split_output_tensor(self, tensor):
        return tensor.view(-1, 2).unbind(1)

    def __call__(self, logits, data, global_valid_seqs, global_valid_toks):
        chosen, rejected = self.split_output_tensor(logits.squeeze(-1))
        counts = data["sample_mask"].view(-1, 2)[:, 0]
        loss = -(F.logsigmoid(chosen - rejected) * counts).sum() / (global_valid_seqs / 2)
        return loss, {"loss": loss.item()}


def pairs():
    data = tiny_batch()
    data["sample_mask"] = torch.tensor([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    data["input_ids"] = data["input_ids"].clamp(min=1) * inside(data)  # padding, and nothing else, has the id 0
    return data


def plain(config):
    config.num_labels = 1
    return plain_model(config, kind=AutoModelForSequenceClassification)


def rewards_of(model, data):
    """Row by row, without padding: nothing depends on what a model takes for padding."""
    rows = zip(data["input_ids"], data["input_lengths"].tolist(), strict=True)
    return torch.cat([model(input_ids=row[None, :length], use_cache=False).logits[0] for row, length in rows])


def check(model_config, kind="fixed", **layout):
    config = tiny_config(model_config(), reward_model_cfg=REWARDS, **layout, **batching(kind))
    data, model = pairs(), plain(model_config())
    worker = DTensorPolicyWorker(config, init_reference_model=False)
    with torch.no_grad():
        true = rewards_of(model, data)
    assert true.std() > 0.01
    found = gathered(worker, worker.score(shard(data, worker)))["scores"]
    torch.testing.assert_close(found, true, rtol=2e-5, atol=2e-5)

    optimizer = torch.optim.AdamW(model.parameters(), **config["optimizer"]["kwargs"])
    counts = data["sample_mask"].sum(), None
    loss, _ = PreferenceLoss()(rewards_of(model, data)[:, None], data, *counts)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config["max_grad_norm"])
    optimizer.step()
    trained = worker.train(shard(data, worker), PreferenceLoss())
    assert trained["global_loss"].item() == pytest.approx(loss.item(), rel=1e-5)
    updated = whole(worker.return_state_dict())
    assert updated.keys() == dict(model.named_parameters()).keys()
    for name, x in model.named_parameters():  # a bias of all rewards alike stays 0
        assert (updated[name] - x).norm() < 1e-4 * max(x.norm(), config["optimizer"]["kwargs"]["lr"]), name
    with pytest.raises(ValueError, match="has a reward model, which has no log-probabilities"):
        worker.get_logprobs(shard(data, worker))
    if kind != "fixed":
        each = Mock(spec=["loss_type", "input_type"], loss_type=LossType.SEQUENCE_LEVEL, input_type=LossInputType.LOGIT)
        with pytest.raises(ValueError, match="has no `unit`"):
            worker.train(shard(data, worker), each)
    with pytest.raises(ValueError, match="has a reward model, which samples nothing"):
        worker.prepare_for_generation()
    with pytest.raises(ValueError, match="NLLLoss.input_type is None, and the worker has a reward model"):
        worker.train(shard(data, worker), NLLLoss())


@pytest.mark.slow
@pytest.mark.parametrize(
    "model, options",
    [
        (partial(tiny_model, tie_word_embeddings=True), {"tp": 2, "sequence_parallel": True}),
        (tiny_model, {"cp": 2, "kind": "packed"}),
        (partial(family_config, "gemma2"), {"kind": "dynamic"}),
        (partial(family_config, "qwen3_moe"), {"tp": 2, "experts": 2}),
        (partial(family_config, "gpt2"), {}),
    ],
    ids=["llama-tp-sp", "llama-cp", "gemma2-fsdp", "qwen3_moe-ep", "gpt2-fsdp"],
)
@ranks(2)
def test_scores_and_a_step(model, options):
    check(model, **options)


@ranks(1)
def test_padding_behind_a_row_is_left_out_as_in_transformers():
    model_config = tiny_model(pad_token_id=0)
    config = tiny_config(model_config, reward_model_cfg=REWARDS)
    data = pairs()
    data["input_ids"][0, -2:] = 0  # inside of its row
    model = plain(tiny_model(pad_token_id=0))  # first: what transformers imports with it may draw random numbers
    worker = DTensorPolicyWorker(config, init_reference_model=False, init_optimizer=False)
    with torch.no_grad():
        true = model(input_ids=data["input_ids"], use_cache=False).logits[:, 0]
    torch.testing.assert_close(worker.score(data)["scores"], true, rtol=2e-5, atol=2e-5)


@ranks(1)
def test_a_reward_model_without_a_linear_score_is_refused():
    small = BertConfig(vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4)
    with pytest.raises(ValueError, match="BertForSequenceClassification is not a reward model .*linear layer `score`"):
        DTensorPolicyWorker(tiny_config(small, reward_model_cfg=REWARDS), init_reference_model=False)


@ranks(1)
def test_a_causal_language_model_has_no_scores():
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False, init_optimizer=False)
    with pytest.raises(ValueError, match="needs a reward model, and this worker has a causal language model"):
        worker.score(tiny_batch())

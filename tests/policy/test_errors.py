"""What cannot be trained on or loaded is an error on every rank, changes nothing, and leaves no rank waiting."""

from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from megatron_ext.policy import BatchedDataDict, ClippedPGLoss, DTensorPolicyWorker, NLLLoss
from megatron_ext.policy.agreement import agree
from tests.policy.problems import shard, tiny_batch, tiny_config, whole
from tests.ranks import ranks


def without(data, *names):
    return BatchedDataDict({name: x for name, x in data.items() if name not in names})


BAD_DATA = {
    "lacks sample_mask": lambda data: without(data, "sample_mask"),
    "lacks token_mask": lambda data: without(data, "token_mask"),
    "lacks advantages, prev_logprobs": lambda data: without(data, "advantages", "prev_logprobs"),
    "there must be a row": lambda data: data.slice(0, 0),
    "lacks .*input_ids": lambda data: BatchedDataDict(),
    "must divide by 2, and rows by the quotient": lambda data: data.slice(0, 3),
    "dim 1 of every tensor": lambda data: BatchedDataDict(data, advantages=data["advantages"][:, 1:]),
    "must have as many": lambda data: BatchedDataDict(data, advantages=data["advantages"][1:]),
    "input_lengths are": lambda data: BatchedDataDict(data, input_lengths=data["input_lengths"] + 9),
}


@ranks(2)
def test_bad_data_of_one_rank_is_an_error_on_all():
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False)
    data = shard(tiny_batch(), worker)
    own_fault = dist.get_rank() == 1
    for message, change in BAD_DATA.items():
        with pytest.raises(ValueError, match=message) as error:
            worker.train(change(data) if own_fault else data, ClippedPGLoss())
        assert own_fault or "rank 1 failed" in str(error.value)
    with pytest.raises(ValueError, match="lacks input_lengths"):
        worker.get_logprobs(without(data, "input_lengths") if own_fault else data)
    worker.train(data, ClippedPGLoss())  # and both go on


@pytest.mark.parametrize("gbs, mbs, message", [(5, None, "must divide by 2"), (8, 3, "multiple of it")])
@ranks(2)
def test_sizes_that_do_not_divide(gbs, mbs, message):
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False)
    with pytest.raises(ValueError, match=message):
        worker.train(shard(tiny_batch(), worker), NLLLoss(), gbs=gbs, mbs=mbs)


@ranks(2)
def test_tensor_parallel_ranks_must_get_the_same_rows():
    worker = DTensorPolicyWorker(tiny_config(tp=2), init_reference_model=False)
    rows = 8 if dist.get_rank() == 0 else 16
    with pytest.raises(ValueError, match="must get the same rows"):
        worker.train(tiny_batch(rows), NLLLoss())


@dataclass(frozen=True)
class Spoilt:
    """A loss that goes wrong on one rank, in one micro-batch."""

    how: str
    rank: int = 1

    def __call__(self, log_probs_BS, data, global_valid_seqs, global_valid_toks):
        loss, metrics = NLLLoss()(log_probs_BS, data, global_valid_seqs, global_valid_toks)
        if dist.get_rank() == self.rank and bool(data["advantages"][0, 0] == 7):
            if self.how == "raises":
                raise KeyError("spoilt")
            loss = loss * float(self.how)
        return loss, metrics


@pytest.mark.parametrize("how", ["nan", "inf", "raises"])
@ranks(2)
def test_a_loss_that_is_none_changes_nothing(how):
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False)
    data = shard(tiny_batch(), worker)
    worker.train(data, Spoilt(how))
    before = whole(worker._state())
    state = [x.clone() for s in worker.optimizer.state.values() for x in s.values()]
    data["advantages"][0, 0] = 7
    if how != "raises":
        expected, message = ValueError, "global batch 0 is not finite, by rank {1: "
    elif dist.get_rank() == 1:
        expected, message = KeyError, "spoilt"
    else:
        expected, message = RuntimeError, r"failed on ranks \[1\]"
    with pytest.raises(expected, match=message.replace("{", r"\{")):
        worker.train(data, Spoilt(how))
    after = whole(worker._state())
    assert all(torch.equal(after[name], x) for name, x in before.items())
    now = [x for s in worker.optimizer.state.values() for x in s.values()]
    assert all(torch.equal(x, y) for x, y in zip(now, state, strict=True))
    assert all(p.grad is None for p in worker.model.parameters())
    worker.train(data, NLLLoss())


@dataclass(frozen=True)
class Malformed:
    """A loss that returns what is none, on rank 1."""

    loss: bool

    def __call__(self, log_probs_BS, data, *counts):
        loss, metrics = NLLLoss()(log_probs_BS, data, *counts)
        if dist.get_rank() == 0:
            return loss, metrics
        return (loss[None], metrics) if self.loss else (loss, {"loss": "much"})


@pytest.mark.parametrize("loss", [False, True])
@ranks(2)
def test_what_a_loss_returns_is_checked_on_every_rank(loss):
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False)
    data = shard(tiny_batch(), worker)
    with pytest.raises(RuntimeError if dist.get_rank() == 0 else ValueError):
        worker.train(data, Malformed(loss))
    worker.train(data, NLLLoss())


@ranks(2)
def test_a_tokenizer_that_is_not_there_is_an_error_before_anything_is_written():
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False)
    with pytest.raises(ValueError, match="without a tokenizer"):
        worker.save_checkpoint("/nowhere/weights", None, "/nowhere/tokenizer")


@dataclass(frozen=True)
class Steep:
    """A finite loss with a gradient that is not."""

    def __call__(self, log_probs_BS, data, global_valid_seqs, global_valid_toks):
        return (0.0 * log_probs_BS).abs().sqrt().sum(), {}


@ranks(2)
def test_a_gradient_that_is_not_finite_changes_nothing():
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False)
    data = shard(tiny_batch(), worker)
    before = whole(worker._state())
    with pytest.raises(ValueError, match="gradient norm of global batch 0 is nan"):
        worker.train(data, Steep())
    assert all(torch.equal(whole(worker._state())[name], x) for name, x in before.items())


@pytest.mark.parametrize(
    "change, message",
    [
        ({"precision": "fp8"}, "precision is 'fp8': it must be one of float32, bfloat16, float16"),
        ({"train_micro_batch_size": 0}, "train_micro_batch_size is 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"generation": {"temperature": 0.0}}, "temperature"),
        ({"optimizer": {"name": "torch.optim.Nothing"}}, "cannot be imported"),
        ({"optimizer": None}, "optimizer is None"),
        ({"model_name": 5}, "model_name is a int"),
        ({"dynamic_batching": {"enabled": True}, "sequence_packing": {"enabled": True}}, "exclude each other"),
        ({"sequence_packing": {"enabled": True}}, "sequence_packing lacks 'train_mb_tokens'"),
        ({"dtensor_cfg": {"tensor_parallel_size": 3}}, "multiple of 3"),
    ],
)
@ranks(1)
def test_configurations_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=message):
        DTensorPolicyWorker({**tiny_config(), **change})


@ranks(1)
def test_what_a_worker_was_made_without():
    worker = DTensorPolicyWorker(tiny_config(), init_optimizer=False, init_reference_model=False)
    data = tiny_batch()
    with pytest.raises(ValueError, match="init_optimizer=False"):
        worker.train(data, NLLLoss())
    with pytest.raises(ValueError, match="init_reference_model=False"):
        worker.get_reference_policy_logprobs(data)
    with pytest.raises(ValueError, match="no weights"):
        worker.get_weights_ipc_handles(["nothing"])
    assert worker.train(data, NLLLoss(), eval_mode=True)["grad_norm"] is None


@ranks(2)
def test_weights_are_sent_to_nobody():
    worker = DTensorPolicyWorker(tiny_config(), init_optimizer=False, init_reference_model=False)
    with pytest.raises(ValueError, match="init_collective"):
        worker.broadcast_weights_for_collective()
    assert worker.get_logprobs(tiny_batch())["logprobs"].isfinite().all()  # no rank waits for another


@ranks(2)
def test_agree_tells_every_rank_what_failed_on_one():
    def act():
        if dist.get_rank() == 1:
            raise FileNotFoundError("no such thing")
        return 5

    with pytest.raises(OSError, match="no such thing"):
        agree(act)
    assert agree(dist.get_rank) == [0, 1]

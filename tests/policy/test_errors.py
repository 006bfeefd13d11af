"""Errors for what cannot be trained on or loaded: every rank raises, nothing changes, and no rank waits."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ext.policy import BatchedDataDict, ClippedPGLoss, DistillationLossFn, DTensorPolicyWorker, NLLLoss
from tests.marks import slow
from tests.policy.problems import (
    VOCAB,
    inside,
    largest_error,
    plain_train,
    shard,
    tiny_batch,
    tiny_config,
    tiny_model,
    unchanged,
    whole,
    with_teacher,
)
from tests.ranks import ranks, shared_folder


def made(**config):
    """A worker, and its rows of a batch."""
    worker = DTensorPolicyWorker(tiny_config(**config), init_reference_model=False)
    return worker, shard(tiny_batch(), worker)


PLATEAU = {"name": "torch.optim.lr_scheduler.ReduceLROnPlateau"}


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
    f"input_ids are .* 0 to {VOCAB - 1}": lambda data: BatchedDataDict(data, input_ids=data["input_ids"] + VOCAB - 9),
    "input_ids are -9 to": lambda data: BatchedDataDict(data, input_ids=data["input_ids"] - 9),
    r"sample_mask is a list: .* \[rows\]": lambda data: BatchedDataDict(data, sample_mask=[1.0] * data.size),
    "token_mask has a number below 0": lambda data: BatchedDataDict(data, token_mask=data["token_mask"] - 1),
    "sample_mask has a number below 0": lambda data: BatchedDataDict(data, sample_mask=-data["sample_mask"]),
    r"token_mask is \[4\]: .* \[rows, positions\]": lambda data: BatchedDataDict(data, token_mask=data["sample_mask"]),
}


@ranks(2)
def test_bad_data_of_one_rank_is_an_error_on_all():
    worker, data = made()
    own_fault = dist.get_rank() == 1
    for message, change in BAD_DATA.items():
        with pytest.raises(ValueError, match=message) as error:
            worker.train(change(data) if own_fault else data, ClippedPGLoss())
        assert own_fault or "rank 1 failed" in str(error.value)
    with pytest.raises(ValueError, match="lacks input_lengths"):
        worker.get_logprobs(without(data, "input_lengths") if own_fault else data)
    with pytest.raises(ValueError, match="input_ids are -9 to"):
        worker.get_logprobs(BatchedDataDict(data, input_ids=data["input_ids"] - 9) if own_fault else data)
    worker.train(data, ClippedPGLoss())  # and both go on


BAD_TEACHERS = {
    f"has {VOCAB} inside a row: .* 0 to {VOCAB - 1}": lambda ids: ids.index_fill(2, torch.tensor([1]), VOCAB),
    "has -1 inside a row": lambda ids: ids.index_fill(2, torch.tensor([1]), -1),
    "is torch.float32": lambda ids: ids.float(),
    r"is torch.int64 \[4, 13\]: it must be integers \[rows, positions, ids\]": lambda ids: ids[..., 0],
}


@ranks(2)
def test_teacher_ids_of_one_rank_that_cannot_be():
    worker, data = made()
    data, own_fault = with_teacher(data), dist.get_rank() == 1
    ids = data["teacher_topk_indices"]
    for message, change in BAD_TEACHERS.items():
        batch = BatchedDataDict(data, teacher_topk_indices=change(ids) if own_fault else ids)
        with pytest.raises(ValueError, match=message):
            worker.train(batch, DistillationLossFn())
    padded = BatchedDataDict(data, teacher_topk_indices=ids.where(inside(data)[..., None], -1))
    losses = [worker.train(batch, DistillationLossFn(), eval_mode=True)["global_loss"] for batch in (data, padded)]
    assert losses[0] == losses[1]


@ranks(2)
def test_sizes_that_do_not_divide():
    worker, data = made()
    for gbs, mbs, message in [
        (5, None, "must divide by 2"),
        (8, 3, "multiple of it"),
        (None, 0, r"mbs \(micro_batch_size\) is 0: it must be a positive integer"),
        (0, None, "gbs is 0"),
        (-8, None, "gbs is -8"),
    ]:
        with pytest.raises(ValueError, match=message):
            worker.train(data, NLLLoss(), gbs=gbs, mbs=mbs)


@pytest.mark.parametrize("kind", ["tp", *slow("cp")])
@ranks(2)
def test_ranks_of_one_model_must_get_the_same_rows(kind):
    worker = DTensorPolicyWorker(tiny_config(**{kind: 2}), init_reference_model=False)
    data, own = tiny_batch(positions=16), dist.get_rank() == 1
    with pytest.raises(ValueError, match="must get the same rows"):
        worker.train(tiny_batch(16) if own else tiny_batch(8), NLLLoss())
    for name, other in (("input_ids", data["input_ids"].flip(0)), ("advantages", 2 * data["advantages"])):
        with pytest.raises(ValueError, match="must get the same rows"):
            worker.train(BatchedDataDict(data, **{name: other} if own else {}), ClippedPGLoss())
    with pytest.raises(ValueError, match="must get the same rows"):
        worker.get_logprobs(BatchedDataDict(data, input_ids=data["input_ids"].flip(0) if own else data["input_ids"]))
    worker.train(data, ClippedPGLoss())


def spoilt(how, *given):
    """A loss that goes wrong on rank 1, in one micro-batch."""
    loss, metrics = NLLLoss()(*given)
    if dist.get_rank() == 1 and bool(given[1]["advantages"][0, 0] == 7):
        if how == "raises":
            raise KeyError("spoilt")
        loss = loss * float(how)
    return loss, metrics


RETURNED = {
    "None": lambda loss, metrics: None,
    "the loss alone": lambda loss, metrics: loss,
    "a list": lambda loss, metrics: [loss, 1, 2],
    "a number": lambda loss, metrics: (3.0, metrics),
    "no metrics": lambda loss, metrics: (loss, None),
    "a vector": lambda loss, metrics: (loss[None], metrics),
    "a string": lambda loss, metrics: (loss, {"x": "much"}),
    "two numbers": lambda loss, metrics: (loss, {"x": torch.ones(2)}),
}


def returns(what, *given):
    """A loss that returns something else on rank 1."""
    found = NLLLoss()(*given)
    return found if dist.get_rank() == 0 else RETURNED[what](*found)


@ranks(2)
def test_what_a_loss_must_return_is_told_in_a_sentence():
    worker, data = made()
    own = ValueError, "loss_fn.* must "
    expected, message = (RuntimeError, r"failed on ranks \[1\]") if dist.get_rank() == 0 else own
    for what in RETURNED:
        with pytest.raises(expected, match=message):
            worker.train(data, partial(returns, what))
    worker.train(data, NLLLoss())


@pytest.mark.parametrize("how", ["nan", *slow("inf", "raises")])
@ranks(2)
def test_a_loss_that_is_none_changes_nothing(how):
    worker, data = made()
    worker.train(data, partial(spoilt, how))
    data["advantages"][0, 0] = 7
    if how != "raises":
        expected, message = ValueError, "global batch 0 is not finite, by rank {1: "
    elif dist.get_rank() == 1:
        expected, message = KeyError, "spoilt"
    else:
        expected, message = RuntimeError, r"failed on ranks \[1\]"
    with unchanged(worker), pytest.raises(expected, match=message.replace("{", r"\{")):
        worker.train(data, partial(spoilt, how))
    assert all(p.grad is None for p in worker.model.parameters())
    worker.train(data, NLLLoss())


def early(log_probs_BS, data, *counts):
    """A loss that leaves the model out where no row counts."""
    if not data["sample_mask"].any():
        return torch.zeros((), requires_grad=True), {}
    return NLLLoss()(log_probs_BS, data, *counts)


@ranks(2)
def test_loss_without_the_model_on_one_rank_lets_no_rank_wait():
    data = tiny_batch()
    data["sample_mask"][4:] = 0  # rank 1's
    true_losses, _, true_weights, _ = plain_train(tiny_config(), data, NLLLoss())
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False)
    assert worker.train(shard(data, worker), early)["global_loss"].tolist() == pytest.approx(true_losses, rel=1e-5)
    assert largest_error(whole(worker.return_state_dict()), true_weights) < 3e-5


@ranks(2)
def test_a_model_that_rank_0_cannot_load_is_an_error_on_all():
    folder = shared_folder()
    if dist.get_rank() == 0:
        tiny_model().save_pretrained(folder)
        (folder / "model.safetensors").write_bytes(b"\0" * 50)
    dist.barrier()
    with pytest.raises(ValueError, match=f"the model in {folder} cannot be loaded"):
        DTensorPolicyWorker(tiny_config(str(folder)), init_reference_model=False)


@pytest.mark.slow
@ranks(2)
def test_missing_tokenizer_is_refused_before_writing():
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False)
    with pytest.raises(ValueError, match="without a tokenizer"):
        worker.save_checkpoint("/nowhere/weights", None, "/nowhere/tokenizer")


def steep(log_probs_BS, *_):
    """A finite loss with a gradient that is not."""
    return (0.0 * log_probs_BS).abs().sqrt().sum(), {}


@ranks(2)
def test_a_gradient_that_is_not_finite_changes_nothing():
    worker, data = made()
    with unchanged(worker), pytest.raises(ValueError, match="gradient norm of global batch 0 is nan"):
        worker.train(data, steep)


LR_AS_TEXT = {"name": "torch.optim.AdamW", "kwargs": {"lr": "3e-4"}}
REGRESSION = {"enabled": True, "reward_model_type": "regression"}
GAMMA_AS_TEXT = {"name": "torch.optim.lr_scheduler.ExponentialLR", "kwargs": {"gamma": "9e-1"}}


@pytest.mark.parametrize(
    "change, message",
    [
        ({"precision": "fp8"}, "precision is 'fp8': it must be one of float32, bfloat16, float16"),
        ({"train_micro_batch_size": 0}, "train_micro_batch_size is 0"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
        ({"max_grad_norm": "1e0"}, r"max_grad_norm is '1e0': it must be a number above 0; write 1\.0e\+0"),
        ({"generation": {"temperature": "7e-1"}}, r"generation.temperature is '7e-1'.*write 7\.0e-1"),
        ({"generation": {"top_p": "9e-1"}}, r"generation.top_p is '9e-1'.*write 9\.0e-1"),
        ({"optimizer": LR_AS_TEXT}, r"optimizer.kwargs.lr is '3e-4': it must be a number; write 3\.0e-4"),
        ({"scheduler": GAMMA_AS_TEXT}, r"scheduler.kwargs.gamma is '9e-1': it must be a number; write 9\.0e-1"),
        ({"generation": {"temperature": 0.0}}, "temperature"),
        ({"generation": {"temperature": None}}, "temperature is None"),
        ({"generation": {"top_k": 2.5}}, "generation.top_k is 2.5"),
        ({"generation": {"top_p": 0}}, "generation.top_p is 0"),
        ({"reward_model_cfg": REGRESSION}, "reward_model_type is 'regression': it must be 'bradley_terry'"),
        ({"scheduler": PLATEAU}, "ReduceLROnPlateau: it depends on a metric"),
        ({"scheduler": [PLATEAU, {"milestones": [1]}]}, "ReduceLROnPlateau: it depends on a metric"),
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
def test_arguments_that_other_workers_take():
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False, worker_sharding_annotations=None)
    worker.prepare_for_training()
    assert worker.return_state_dict().keys() == dict(worker.model.named_parameters()).keys()
    with pytest.raises(TypeError, match="DTensorPolicyWorker got init_reference: it takes no such arguments"):
        DTensorPolicyWorker(tiny_config(), init_reference=False)


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

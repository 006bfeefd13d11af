"""A training step given in parts is the step of `train` on all rows at once; and the methods around it."""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from megatron_ext.policy import ClippedPGLoss, DPOLossFn, DTensorPolicyWorker, NLLLoss
from tests.marks import slow
from tests.policy.problems import batching, largest_error, shard, tiny_batch, tiny_config, whole
from tests.ranks import ranks


class Labels:
    """Records what it measures, as NeMo-RL's timer does."""

    def __init__(self):
        self.seen = []

    @contextmanager
    def time(self, label):
        self.seen.append(label)
        yield


@pytest.mark.parametrize(
    "loss_fn, kind",
    [
        *slow(
            (ClippedPGLoss(0.1, token_level_loss=False), "fixed"), (ClippedPGLoss(0.1), "packed"), (NLLLoss(), "fixed")
        ),
        (DPOLossFn(), "packed"),
    ],
    ids=str,
)
@ranks(2)
def test_parts_are_the_whole_step(loss_fn, kind):
    data = tiny_batch(16)
    halving = {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}}
    config = tiny_config(train_global_batch_size=16, scheduler=halving, **batching(kind))
    at_once, in_parts = (DTensorPolicyWorker(config, init_reference_model=False) for _ in range(2))
    mine = shard(data, at_once)
    want = at_once.train(mine, loss_fn)
    timer = Labels()
    in_parts.begin_train_step(loss_fn, gbs=16, mbs=2)
    # The ranks bring different numbers of rows at a time, and score between two parts.
    for rows in ([0, 1], range(2, 8)) if dist.get_rank() else (range(4), range(4, 8)):
        in_parts.train_microbatch(mine.select_indices(list(rows)), timer=timer)
        in_parts.prepare_for_lp_inference(keep_train_buffers=True)
        in_parts.get_logprobs(mine, timer=timer)
    found = in_parts.finish_train_step(timer=timer)
    torch.testing.assert_close(found["global_loss"], want["global_loss"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found["grad_norm"], want["grad_norm"], rtol=1e-5, atol=1e-6)
    assert largest_error(whole(in_parts.return_state_dict()), whole(at_once.return_state_dict())) < 1e-5
    for name, values in want["all_mb_metrics"].items():
        if name not in ("lr", "global_valid_seqs", "global_valid_toks") and not ("_min" in name or "_max" in name):
            total = sum(found["all_mb_metrics"][name])
            torch.testing.assert_close(total, sum(values), rtol=1e-4, atol=1e-5, msg=name)
    assert found["all_mb_metrics"]["global_valid_toks"][0] == want["all_mb_metrics"]["global_valid_toks"][0]
    assert [worker.optimizer.param_groups[0]["lr"] for worker in (at_once, in_parts)] == [5e-3] * 2
    assert timer.seen == ["train_microbatch", "get_logprobs"] * 2 + ["finish_train_step"]


@ranks(2)
def test_what_is_refused_and_aborted():
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False)
    data = shard(tiny_batch(), worker)
    before = whole(worker.return_state_dict())
    for call in (lambda: worker.train_microbatch(data), worker.finish_train_step):
        with pytest.raises(RuntimeError, match="call begin_train_step"):
            call()
    worker.abort_train_step()
    worker.begin_train_step(NLLLoss())
    with pytest.raises(RuntimeError, match="before any train_microbatch"):
        worker.finish_train_step()
    for call in (
        lambda: worker.begin_train_step(NLLLoss()),
        lambda: worker.train(data, NLLLoss()),
        lambda: worker.load_checkpoint("nowhere"),
        worker.offload_after_refit,
        worker.finish_inference,
    ):
        with pytest.raises(RuntimeError, match="while a training step is open"):
            call()
    worker.train_microbatch(data)
    worker.abort_train_step()
    assert all(p.grad is None for p in worker.model.parameters())

    def fails(*_):
        if dist.get_rank() == 1:
            raise TypeError("no loss today")
        return NLLLoss()(*_)

    fails.loss_type = NLLLoss.loss_type
    worker.begin_train_step(fails)
    with pytest.raises(TypeError if dist.get_rank() else RuntimeError, match="no loss today|loss_fn failed on ranks"):
        worker.train_microbatch(data)
    with pytest.raises(RuntimeError, match="call begin_train_step"):  # the fault has closed the step
        worker.finish_train_step()
    assert all(torch.equal(x, before[name]) for name, x in whole(worker.return_state_dict()).items())
    for loss_fn in (NLLLoss(), ClippedPGLoss(token_level_loss=False)):  # of which nothing counts
        worker.begin_train_step(loss_fn)
        worker.train_microbatch(data | {"sample_mask": torch.zeros(len(data["sample_mask"]))})
        found = worker.finish_train_step()
        assert found["global_loss"].tolist() == found["grad_norm"].tolist() == [0.0]


@ranks(1)
def test_smaller_methods():
    worker = DTensorPolicyWorker(tiny_config(), init_reference_model=False)
    assert worker.is_alive()
    assert worker.return_model_config() is worker.model.config
    assert worker.get_free_memory_bytes() > 1 << 20
    worker.finish_training()
    worker.finish_inference()
    assert not worker.model.training
    for move in (worker.move_to_cpu, worker.move_to_cuda, lambda model: worker.move_buffer_to_device(model, "cpu")):
        assert move(worker.model) is worker.model
    with worker.train_context():
        pass
    for key, value in (("save_consolidated", True), ("model_save_format", "safetensors"), ("is_peft", True)):
        with pytest.raises(ValueError, match=f"checkpointing_cfg.{key} is .*leave the key out"):
            worker.save_checkpoint("nowhere", checkpointing_cfg={key: value})


@pytest.mark.slow
@ranks(2)
def test_context_parallel_context():
    """Tensors become this rank's part inside, and whole again afterwards."""
    worker = DTensorPolicyWorker(tiny_config(cp=2), init_reference_model=False)
    tokens = torch.arange(8)[None].repeat(2, 1)
    context = worker.create_context_parallel_ctx(worker.mesh["cp"], [tokens], [1], set())
    with worker.train_context(context):
        assert tokens.tolist() == [[[0, 1, 6, 7], [2, 3, 4, 5]][dist.get_rank()]] * 2
    assert tokens.tolist() == [list(range(8))] * 2

"""Checkpoints: saved in one layout and continued in another, refused when they are not whole, executing nothing."""

import pickle
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext.policy import DTensorPolicyWorker, NLLLoss
from megatron_ext.policy.checkpoint import sharded_files
from megatron_ext.policy.worker import checkpoints as state_module
from tests.marks import slow
from tests.policy.problems import held_by, largest_error, shard, tiny_batch, tiny_config, tiny_model, unchanged, whole
from tests.policy.test_tensor_index import change_index, sign
from tests.ranks import ranks, shared_folder

SCHEDULER = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 9}}


def worker_of(**layout):
    model = tiny_model(tie_word_embeddings=layout.pop("tied", False))
    return DTensorPolicyWorker(tiny_config(model, scheduler=SCHEDULER, **layout), init_reference_model=False)


def new_checkpoint():
    """A folder that all ranks share, and where in it a worker's two parts shall lie."""
    folder = shared_folder()
    return folder, (str(folder / "weights"), str(folder / "optimizer"))


def has_weights(worker, held):
    return all(torch.equal(x, held[name]) for name, x in whole(worker.return_state_dict()).items())


def train(worker, seed):
    return worker.train(shard(tiny_batch(seed=seed), worker), NLLLoss())["global_loss"].item()


def check_continues(first, second):
    """Two steps in one layout, two in another, against four in the first."""
    _, paths = new_checkpoint()
    worker = worker_of(**first)
    for seed in range(2):
        train(worker, seed)
    worker.save_checkpoint(*paths)
    true = [train(worker, seed) for seed in (2, 3)]

    other = worker_of(**second)
    other.load_checkpoint(*paths)
    assert other.scheduler.last_epoch == 2
    found = [train(other, seed) for seed in (2, 3)]
    torch.testing.assert_close(found, true, rtol=1e-5, atol=0)
    assert largest_error(whole(other.return_state_dict()), whole(worker.return_state_dict())) < 2e-5


@pytest.mark.parametrize("tied", [pytest.param(False, marks=pytest.mark.slow), True])
@ranks(2)
def test_saved_in_one_layout_continues_in_another(tied):
    check_continues({"tied": tied}, {"tp": 2, "tied": tied})


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [("dp_tp", "cp_tp"), ("cp_tp", "dp"), ("dp", "dp_tp")])
@ranks(4)
def test_saved_on_four_ranks_continues_in_another_layout(first, second):
    layouts = {"dp": {}, "dp_tp": {"tp": 2}, "cp_tp": {"cp": 2, "tp": 2, "sequence_parallel": True}}
    check_continues(layouts[first], layouts[second])


@pytest.mark.slow
@ranks(1)
def test_a_save_before_the_first_step_changes_nothing():
    _, paths = new_checkpoint()
    worker, other = worker_of(), worker_of()
    worker.save_checkpoint(*paths)
    assert not worker.optimizer.state
    true = [train(other, seed) for seed in (0, 1)]
    assert [train(worker, seed) for seed in (0, 1)] == true
    worker.load_checkpoint(*paths)
    assert not worker.optimizer.state
    assert [train(worker, seed) for seed in (0, 1)] == true


@ranks(2)
def test_a_save_that_fails_leaves_the_previous_checkpoint():
    folder = shared_folder()
    worker = worker_of()
    path = str(folder / "weights")
    worker.save_checkpoint(path)
    saved = held_by(worker)
    train(worker, 0)
    full = mock.patch.object(sharded_files, "checksums", side_effect=OSError("disk full"))
    with full if dist.get_rank() == 1 else nullcontext(), pytest.raises(OSError, match="disk full"):
        worker.save_checkpoint(path)
    worker.load_checkpoint(path)
    assert has_weights(worker, saved)
    train(worker, 0)
    worker.save_checkpoint(path)  # replaces what was there, and leaves nothing beside it
    assert [entry.name for entry in folder.iterdir()] == ["weights"]


def two_groups(worker):
    *most, last = worker.model.parameters()
    worker.optimizer = torch.optim.AdamW([{"params": most}, {"params": [last]}], lr=1e-2)


def another_optimizer(worker):
    worker.optimizer = torch.optim.SGD(worker.model.parameters(), lr=1e-2)


def another_state(worker):
    worker.optimizer = torch.optim.AdamW(worker.model.parameters(), lr=1e-2, amsgrad=True)


def another_schedule(worker):
    worker.scheduler = torch.optim.lr_scheduler.ConstantLR(worker.optimizer)


@pytest.mark.parametrize("trained", [False, *slow(True)])
@ranks(1)
def test_another_optimizer_is_refused_before_anything_is_read(trained):
    _, paths = new_checkpoint()
    worker = worker_of()
    if trained:
        train(worker, 0)
    worker.save_checkpoint(*paths)
    cases = [(another_optimizer, "is of another optimizer"), (another_schedule, "is of another schedule")]
    if trained:
        cases.append((another_state, "is of another optimizer"))
    else:  # with state it goes by the names of weights, whatever the groups
        cases.append((two_groups, "has 1 groups of parameters and this optimizer 2"))
    for change, message in cases:
        other = worker_of()
        train(other, 5)
        change(other)
        groups = state_module._groups(other.optimizer)
        with unchanged(other), pytest.raises(ValueError, match=message):
            other.load_checkpoint(*paths)
        assert state_module._groups(other.optimizer) == groups


class Planted:
    """Object whose unpickling creates a file."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (Path.touch, (self.trace,))


@pytest.mark.parametrize("place", ["metadata", "tensors"])
@ranks(1)
def test_a_planted_pickle_is_not_executed(place):
    folder = shared_folder()
    trace = folder / "executed"
    worker = worker_of()
    worker.save_checkpoint(str(folder / "weights"))
    if place == "metadata":
        (folder / "weights" / ".metadata").write_bytes(pickle.dumps(Planted(trace)))
        sign(folder / "weights")
        worker.load_checkpoint(str(folder / "weights"))  # nobody looks at it
    else:
        file = next((folder / "weights").glob("*.distcp"))
        torch.save(Planted(trace), file)

        def whole_files(index):
            index["places"] = [[*entry[:4], 0, file.stat().st_size] for entry in index["places"]]

        change_index(folder / "weights", whole_files)
        with pytest.raises(ValueError, match="cannot be read"):
            worker.load_checkpoint(str(folder / "weights"))
    assert not trace.exists()
    pickle.loads(pickle.dumps(Planted(trace)))
    assert trace.exists()  # it would have been seen


MULTI_STEP = {"name": "torch.optim.lr_scheduler.MultiStepLR", "kwargs": {"milestones": [1, 4], "gamma": 0.1}}
IN_SEQUENCE = [{**SCHEDULER, "kwargs": {"total_iters": 1}}, {"milestones": [1]}, MULTI_STEP]


@pytest.mark.parametrize("scheduler", [MULTI_STEP, *slow(IN_SEQUENCE)], ids=["alone", "in a sequence"])
@ranks(1)
def test_a_worker_made_from_a_checkpoint_goes_on_as_without(scheduler):
    def steps(worker):
        return [(train(worker, step), worker.optimizer.param_groups[0]["lr"]) for step in range(4)]

    _, paths = new_checkpoint()
    config = tiny_config(scheduler=scheduler)
    worker = DTensorPolicyWorker(config, init_reference_model=False)
    for step in range(2):
        train(worker, step)
    worker.save_checkpoint(*paths)
    other = DTensorPolicyWorker(config, None, *paths, init_reference_model=False)
    assert other.scheduler.state_dict() == worker.scheduler.state_dict()
    true = steps(worker)
    assert len({rate for _, rate in true}) == 2
    assert steps(other) == true


@ranks(1)
def test_schedule_that_no_file_holds_is_refused_before_writing():
    folder, paths = new_checkpoint()
    worker = worker_of()
    worker.scheduler.end_factor = torch.tensor(1.0)
    with pytest.raises(ValueError, match=r"optimizer\['scheduler'\]\['end_factor'\] is tensor\(1.\), a torch.Tensor"):
        worker.save_checkpoint(*paths)
    assert not list(folder.iterdir())

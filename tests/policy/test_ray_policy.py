"""A policy as Ray actors: what one worker computes, errors that name the rank, and life after death."""

import contextlib
import os
import time
import traceback

import psutil
import pytest
import torch

from megatron_ext.policy import BatchedDataDict, ClippedPGLoss, DTensorPolicyWorker, NLLLoss, RayPolicy
from megatron_ext.policy.data.agreement_of_ranks import agree
from megatron_ext.policy.ray_policy import local_ray
from megatron_ext.policy.refit.weight_transfer import read_weights
from tests.policy.problems import plain_log_probs, plain_model, plain_train, tiny_batch, tiny_config, tiny_model
from tests.ranks import TIMEOUT_S

pytestmark = pytest.mark.slow  # each actor is a process that imports torch and transformers

WORKERS = 2
SMALL = {"cpus_per_worker": 0.5, "start_timeout_s": TIMEOUT_S}


@pytest.fixture(scope="module")
def ray():
    previous = os.environ.get("RAY_AUTH_MODE")
    os.environ["RAY_AUTH_MODE"] = "disabled"  # else Ray writes a token to the home folder
    with local_ray(WORKERS):
        yield
    os.environ.pop("RAY_AUTH_MODE")
    if previous is not None:
        os.environ["RAY_AUTH_MODE"] = previous


class Mortal(DTensorPolicyWorker):
    """A worker that can be told to die, or to fail, on one rank."""

    def die(self, rank):
        if self.rank == rank:
            os._exit(3)
        torch.distributed.barrier()

    def fail(self, rank):
        if self.rank == rank:
            raise ValueError("this rank has had enough")
        return self.rank

    def late(self, rank, method, *args):
        """`method`, with an answer from `rank` after those of the others."""
        try:
            return getattr(self, method)(*args)
        finally:
            if self.rank == rank:
                time.sleep(0.3)

    def all_fail(self, rank):
        agree(lambda: self.fail(rank))

    def nap(self, end):
        wait_until(end.exists)


class BrokenLoss(NLLLoss):
    """Fails on rank 1."""

    def __call__(self, *args):
        if torch.distributed.get_rank() == 1:
            self.helper_that_fails()
        return super().__call__(*args)

    def helper_that_fails(self):
        raise RuntimeError("the loss has had enough")


def wait_until(true):
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def truth():
    """Results of one process for the same batches: log-probs before, losses of two steps, log-probs after."""
    data, model = tiny_batch(), plain_model(tiny_model())
    losses, _, weights, _ = plain_train(tiny_config(), BatchedDataDict.from_batches([data, data]), ClippedPGLoss())
    with torch.no_grad():
        before = plain_log_probs(model, data)
        model.load_state_dict(weights)
        return before, torch.tensor(losses), plain_log_probs(model, data)


@pytest.fixture(scope="module")
def policy(ray):
    """One that the tests leave as it was."""
    with RayPolicy(tiny_config(), WORKERS, Mortal, **SMALL) as policy:
        yield policy


@pytest.mark.parametrize("tp", [1, 2])
def test_as_one_worker(ray, truth, tp):
    data, loss_fn = tiny_batch(), ClippedPGLoss()
    before, losses, after = truth
    config = tiny_config(tp=tp, generation={"max_new_tokens": 3})
    with RayPolicy(config, WORKERS, **SMALL) as policy:
        torch.testing.assert_close(policy.get_logprobs(data)["logprobs"], before, rtol=1e-5, atol=1e-5)
        found = [policy.train(data, loss_fn) for _ in range(2)]
        torch.testing.assert_close(torch.cat([step["global_loss"] for step in found]), losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(policy.get_logprobs(data)["logprobs"], after, rtol=1e-4, atol=1e-4)
        reference = policy.get_reference_policy_logprobs(data)["reference_logprobs"]
        torch.testing.assert_close(reference, before, rtol=1e-5, atol=1e-5)
        assert policy.is_alive()
        assert [info["rank"] for info in policy.get_gpu_info()] == list(range(WORKERS))
        model = plain_model(tiny_model())
        policy.refit(model)
        torch.testing.assert_close(plain_log_probs(model, data).detach(), after, rtol=1e-4, atol=1e-4)
        found = {name: weight.clone() for name, weight in policy.iter_weights()}
        assert found.keys() == model.state_dict().keys()
        assert all(torch.equal(weight, model.state_dict()[name]) for name, weight in found.items())

        sampled = policy.generate(data.slice(0, 3), seed=5)  # of three rows one worker gets two
        answers = {"input_ids": sampled["output_ids"], "input_lengths": sampled["unpadded_sequence_lengths"]}
        scored = policy.get_logprobs(answers)["logprobs"]
        is_new = torch.arange(scored.shape[1]) >= data["input_lengths"][:3, None]
        torch.testing.assert_close(sampled["logprobs"], scored * is_new, rtol=1e-5, atol=1e-5)
        assert sampled["generation_lengths"].tolist() == [3, 3, 3]
        assert (sampled["logprobs"] < 0).sum() == 9
        # The same rows to other workers.
        alone = policy.generate(data.slice(0, 1), seed=5)["output_ids"]
        assert torch.equal(alone[0], sampled["output_ids"][0, : alone.shape[1]])

        true = policy.train(data, loss_fn, eval_mode=True)["global_loss"]
        policy.begin_train_step(loss_fn)
        for part in (data.slice(0, 3), data.slice(3, 8)):
            policy.train_microbatch(part)
        with pytest.raises(ValueError, match="data has 0 rows for "):
            policy.train_microbatch(data.slice(0, 0))
        torch.testing.assert_close(policy.finish_train_step()["global_loss"], true, rtol=1e-5, atol=1e-6)
        assert policy.get_free_memory_bytes() > 0
        assert policy.return_model_config().vocab_size == 97


def test_everything_listens_on_this_machine_alone(policy):
    """Ray, its actors, their stores and gloo."""
    policy.train(tiny_batch(), NLLLoss())  # all groups have met
    own = psutil.Process()
    found = {}
    for process in [own, *own.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):  # a short-lived child of Ray's may have ended since
            name = process.name()
            for connection in process.net_connections("inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.setdefault(name, set()).add(connection.laddr.ip.removeprefix("::ffff:"))
    assert {"raylet", "gcs_server", "ray::_Actor", "ray::HostMonitor"} <= found.keys()
    assert set().union(*found.values()) == {"127.0.0.1"}, found


def test_a_dead_actor_and_life_after(ray, tmp_path, monkeypatch):
    data = tiny_batch()
    monkeypatch.setattr("megatron_ext.policy.ray.actors._GRACE_S", TIMEOUT_S)
    with RayPolicy(tiny_config(), WORKERS, Mortal, **SMALL) as policy:
        policy.train(data, NLLLoss())
        policy.save_checkpoint(str(tmp_path / "weights"), str(tmp_path / "optimizer"))
        saved = policy.get_logprobs(data)["logprobs"]
        goes_on = policy.train(data, NLLLoss())["global_loss"]
        shared = set(os.listdir("/dev/shm"))
        [handle] = policy.get_weights_ipc_handles(list(policy.prepare_refit_info())).values()
        assert next(read_weights(handle))[1].isfinite().all()
        start = time.monotonic()
        with pytest.raises(RuntimeError, match="rank 1 of 2 died: .*Worker exit detail: .*SIGSEGV") as caught:
            policy._all("die", 1)
        assert "actor_id" not in str(caught.value)
        assert time.monotonic() - start < TIMEOUT_S / 2, (
            "the other rank waits in a collective, and nobody should wait for it"
        )
        with pytest.raises(RuntimeError, match=r"rank 1 of 2 died.*restart"):
            policy.get_logprobs(data)
        assert not policy.is_alive()
        wait_until(lambda: not os.path.exists(handle.where.path))  # rank 0, who held it, was ended
        with pytest.raises(ValueError, match="their owner has died"):
            next(read_weights(handle))
        assert set(os.listdir("/dev/shm")) <= shared
        policy.restart(str(tmp_path / "weights"), str(tmp_path / "optimizer"))
        torch.testing.assert_close(policy.get_logprobs(data)["logprobs"], saved, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(policy.train(data, NLLLoss())["global_loss"], goes_on, rtol=1e-6, atol=1e-6)


def test_an_actor_that_is_busy_does_not_answer_and_goes_on(policy, tmp_path):
    begun = policy._begin("nap", tmp_path / "end")
    assert not policy.is_alive(timeout_s=0.2)  # does not wait until they answer, which is after this line
    (tmp_path / "end").touch()
    policy.wait(begun)
    assert policy.is_alive()


def test_errors_keep_their_type_and_say_the_rank(policy):
    with pytest.raises(ValueError, match="had enough") as caught:
        policy._all("fail", 1)
    assert caught.value.__notes__ == ["on rank 1 of 2"]
    with pytest.raises(ValueError, match="^this rank has had enough") as caught:
        policy._all("late", 1, "all_fail", 1)
    assert caught.value.__notes__ == ["on rank 1 of 2"]
    with pytest.raises(RuntimeError, match="^the loss has had enough") as caught:
        policy._all("late", 1, "train", tiny_batch(), BrokenLoss())
    assert caught.value.__notes__ == ["on rank 1 of 2"]
    assert "in helper_that_fails" in "".join(traceback.format_exception(caught.value))
    with pytest.raises(ValueError, match="token_mask"):
        policy.train({k: v for k, v in tiny_batch().items() if k != "token_mask"}, NLLLoss())
    assert policy.is_alive()  # none of it ended the group


def test_no_room_in_the_cluster_is_said(ray):
    with pytest.raises(RuntimeError, match="no room for 64 actors"):
        RayPolicy(tiny_config(), 64, start_timeout_s=2)


def test_a_model_on_no_device_of_the_actors_is_refused(policy, monkeypatch):
    monkeypatch.setattr("platform.node", lambda: "elsewhere")
    with pytest.raises(ValueError, match=r"refit\(\) on elsewhere sees CPU-elsewhere, the actors are on CPU-"):
        policy.refit(torch.nn.Linear(1, 1))

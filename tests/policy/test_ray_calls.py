"""The rows that each actor of a policy gets and gives back, with a stand-in for Ray."""

import os
from types import SimpleNamespace

import pytest
import torch

from megatron_ext.policy import BatchedDataDict, RayPolicy
from tests.policy.problems import tiny_config
from tests.policy.ray_at_once import ray  # noqa: F401  # a fixture

pytest.importorskip("ray")
calls = []


class Worker:
    """A worker that notes its calls, and answers with the rows that it got."""

    parallel_key = "dtensor_cfg"

    def __init__(self, **made):
        self.rank, self.made = int(os.environ["RANK"]), made

    def __getattr__(self, name):
        def note(*args):
            calls.append((self.rank, name, args))
            return self.rank + 5

        return note

    def train(self, data, *args):
        calls.append((self.rank, "train", args))
        return {"rank": self.rank, "all_mb_metrics": {"rows": data["input_ids"][:, 0].tolist()}}

    def finish_train_step(self):
        return {"rank": self.rank, "all_mb_metrics": {"ranks": [self.rank]}}

    def train_microbatch(self, data):
        calls.append((self.rank, "train_microbatch", data["input_ids"][:, 0].tolist()))

    def rows(self, name, data, *args):
        calls.append((self.rank, name, args))
        return BatchedDataDict({name: data["input_ids"] + 100 * self.rank})

    def get_logprobs(self, data, *args):
        return self.rows("logprobs", data, *args)

    def get_reference_policy_logprobs(self, data, *args):
        return self.rows("reference_logprobs", data, *args)

    def get_topk_logits(self, data, *args):
        return self.rows("topk_logits", data, *args)

    def score(self, data):
        return self.rows("scores", data)

    def generate(self, data, *args):
        calls.append((self.rank, "generate", args))
        return BatchedDataDict(output_ids=data["input_ids"][:, : 1 + self.rank])


@pytest.fixture
def policy(ray):  # noqa: F811
    """Two data-parallel ranks of two tensor-parallel ones."""
    config = tiny_config(tp=2, generation={"_pad_token_id": 9})
    with RayPolicy(config, 4, Worker, cpus_per_worker=0.5, heartbeat_timeout_s=None) as policy:
        calls.clear()
        yield policy


def batch(rows):
    return BatchedDataDict(input_ids=torch.arange(rows)[:, None] + torch.arange(3) * 10, input_lengths=torch.ones(rows))


def test_a_step_is_shared_among_data_parallel_ranks(policy):
    found = policy.train(batch(8), "loss", True, 4, 2)
    assert found == {"rank": 0, "all_mb_metrics": {"rows": [0, 1, 4, 5, 2, 3, 6, 7]}}
    assert calls == [(rank, "train", ("loss", True, 4, 2)) for rank in range(4)]
    calls.clear()
    assert policy.train(batch(8), "loss")["all_mb_metrics"]["rows"] == list(range(8))
    assert calls[0][2] == ("loss", False, 8, None)


def test_a_step_in_pieces_parts_no_pairs(policy):
    pairs = SimpleNamespace(unit=2)
    policy.begin_train_step(pairs, 8)
    assert calls == [(rank, "begin_train_step", (pairs, 8, None)) for rank in range(4)]
    calls.clear()
    policy.train_microbatch(batch(6))
    assert [rows for _, _, rows in calls] == [[0, 1], [0, 1], [2, 3, 4, 5], [2, 3, 4, 5]]
    for rows in (2, 5):
        with pytest.raises(ValueError, match=f"data has {rows} rows for 2 data-parallel ranks, in units of 2"):
            policy.train_microbatch(batch(rows))
    assert policy.finish_train_step() == {"rank": 0, "all_mb_metrics": {"ranks": [0, 2]}}


def test_scores_come_back_in_the_order_of_rows(policy):
    expected = batch(3)["input_ids"] + torch.tensor([0, 0, 200])[:, None]
    for name, given in (("logprobs", (4,)), ("reference_logprobs", (4,)), ("topk_logits", (7, 4)), ("scores", ())):
        calls.clear()
        method = {"topk_logits": "get_topk_logits", "scores": "score", "logprobs": "get_logprobs"}.get(name)
        found = getattr(policy, method or "get_reference_policy_logprobs")(batch(3), *given)
        assert torch.equal(found[name], expected)
        assert calls == [(rank, name, given) for rank in range(4)]
    one = policy.get_logprobs(batch(1))["logprobs"]  # a rank without rows takes part with the last one
    assert torch.equal(one, batch(1)["input_ids"])


def test_every_worker_samples_answers_to_its_rows(policy):
    found = policy.generate(batch(5), True, 11)
    assert [args for _, _, args in calls] == [(True, 11, [0, 1]), (True, 11, [2, 3]), (True, 11, [4]), (True, 11, [4])]
    pad = 9
    answers = [[0, pad, pad], [1, pad, pad], [2, 12, pad], [3, 13, pad], [4, 14, 24]]
    assert found["output_ids"].tolist() == answers


def test_calls_reach_every_worker_with_their_arguments(policy):
    for name, given, asked in [
        ("save_checkpoint", ("w", "o", "t", {"a": 1}), ("w", "o", "t", {"a": 1})),
        ("load_checkpoint", ("w", "o"), ("w", "o")),
        ("prepare_for_lp_inference", (True,), (True,)),
        ("prepare_for_training", (), ()),
        ("finish_training", (), ()),
        ("broadcast_weights_for_collective", (), ()),
        ("init_collective", ("host", 3, 4), ("host", 3, 4)),
        *((name, (), ()) for name in ("abort_train_step", "finish_inference", "offload_before_refit")),
        *((name, (), ()) for name in ("offload_after_refit", "prepare_for_generation", "finish_generation")),
        *((name, (), ()) for name in ("start_gpu_profiling", "stop_gpu_profiling")),
    ]:
        calls.clear()
        begun = getattr(policy, name)(*given)
        assert calls == [(rank, name, asked) for rank in range(4)]
        assert begun is None or policy.wait(begun) == [5, 6, 7, 8]
    assert (policy.return_model_config(), policy.get_free_memory_bytes()) == (5, 5)
    assert policy.get_gpu_info() == [5, 6, 7, 8]
    assert (policy.prepare_refit_info(), policy.prepare_weights_for_ipc()) == (5, 5)


def test_workers_are_made_with_the_arguments_of_the_policy(ray):  # noqa: F811
    given = {"init_optimizer": False, "init_reference_model": False, "tokenizer": "t", "weights_path": "w"}
    more = {"gpus_per_worker": 1, "env_vars": {"A": "1"}, "heartbeat_timeout_s": None}
    policy = RayPolicy(tiny_config(), 1, Worker, **given, **more)
    worker = policy._actors[0].call.function.__self__.worker
    assert worker.made == given | {"config": policy._make["config"], "optimizer_path": None}
    assert (ray.needs[0]["num_cpus"], ray.needs[0]["num_gpus"]) == (1, 1)
    policy.shutdown()


@pytest.mark.parametrize("workers", [0, 3])
def test_a_number_of_workers_that_cannot_be_is_refused(ray, monkeypatch, workers):  # noqa: F811
    with pytest.raises(ValueError, match=f"num_workers is {workers}: it must be a multiple of 2"):
        RayPolicy(tiny_config(tp=2), workers, Worker)
    with pytest.raises(ValueError, match="worker_cls is .*, with parallel_key None"):
        RayPolicy(tiny_config(), 2, lambda **_: None)
    monkeypatch.setattr(Worker, "parallel_key", "megatron_cfg")
    with pytest.raises(ValueError, match=f"num_workers is {workers}: it must be a multiple of 4"):
        RayPolicy(tiny_config() | {"megatron_cfg": {"tensor_model_parallel_size": 4}}, workers, Worker)

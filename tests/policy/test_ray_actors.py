"""Actors that start, are called and end together, with a stand-in for Ray that runs them in this process, at once."""

import os
import time
from types import SimpleNamespace

import pytest

from megatron_ext.policy.data.agreement_of_ranks import FailedElsewhere
from megatron_ext.policy.ray.actors import RayActors, Timeouts
from tests.policy.ray_at_once import RayError, ray  # noqa: F401  # a fixture

pytest.importorskip("ray")


class Worker:
    """A worker that says how it was made, and fails as it is told to."""

    def __init__(self, **made):
        self.rank, self.made = int(os.environ["RANK"]), made
        names = ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "TORCHELASTIC_USE_AGENT_STORE")
        self.joined = [os.environ[name] for name in names]
        if made["weights_path"] == "broken":
            raise ValueError("no such weights")

    def tell(self):
        return self.rank, self.joined, self.made

    def is_alive(self):
        return True

    def shutdown(self):
        return None

    def on(self, rank, *results):
        """One of `results` by turns where this is `rank`, else the rank."""
        result = results[self.rank % len(results)] if rank in (self.rank, "all") else self.rank
        if isinstance(result, Exception):
            raise result
        return result


def started(ray, bundle=None, call_s=None, weights_path=None):  # noqa: F811
    group = RayActors(Worker, {"config": 3}, 2, bundle or {"CPU": 0.5}, {"NAME": "x"}, Timeouts(5, call_s, None))
    group._start(weights_path, None)
    return group


def test_workers_get_their_rank_address_arguments_and_room(ray):  # noqa: F811
    group = started(ray, weights_path="weights")
    joined = ["2", "192.0.2.7", "29", "0", "True"]
    made = {"config": 3, "weights_path": "weights", "optimizer_path": None}
    assert group._all("tell") == [(0, joined, made), (1, joined, made)]
    needs = [{key: value for key, value in one.items() if key != "scheduling_strategy"} for one in ray.needs]
    env_vars = {"CUDA_VISIBLE_DEVICES": "", "NAME": "x"}
    assert needs == [{"num_cpus": 0.5, "num_gpus": 0, "runtime_env": {"env_vars": env_vars}}] * 2
    places = [one["scheduling_strategy"] for one in ray.needs]
    assert [place.placement_group_bundle_index for place in places] == [0, 1]
    assert places[0].placement_group.bundles == [{"CPU": 0.5}] * 2
    ray.needs.clear()
    started(ray, {"CPU": 2, "GPU": 1})
    assert (ray.needs[0]["num_gpus"], ray.needs[0]["runtime_env"]) == (1, {"env_vars": {"NAME": "x"}})


def test_an_error_names_its_rank_before_those_that_heard_of_it(ray):  # noqa: F811
    group = started(ray)
    with pytest.raises(ValueError, match="enough") as caught:
        group._all("on", "all", FailedElsewhere("rank 1 failed"), ValueError("enough"))
    assert caught.value.__notes__ == ["on rank 1 of 2"]
    assert group._all("on", 0, "fine") == ["fine", 1]
    assert group.is_alive()
    assert not ray.killed


def test_a_dead_rank_ends_the_group_until_it_is_restarted(ray):  # noqa: F811
    group = started(ray)
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 died: of old age\. The other workers were ended"):
        group._all("on", 1, RayError("\tactor_id: 77\nof old\nage"))
    assert (len(ray.killed), len(ray.removed)) == (2, 1)
    with pytest.raises(RuntimeError, match=r"rank 1 of 2 died: of old age; call restart\(weights_path\)"):
        group._all("tell")
    assert not group.is_alive()
    with pytest.raises(ValueError, match="no such weights"):
        group.restart("broken")
    with pytest.raises(RuntimeError, match="the actors did not start: ValueError: no such weights"):
        group._all("tell")
    group.restart("weights", "optimizer")
    assert group._all("tell")[1][2] == {"config": 3, "weights_path": "weights", "optimizer_path": "optimizer"}
    with group:
        assert group.is_alive()
    with pytest.raises(RuntimeError, match=r"shutdown\(\) ended the actors"):
        group._all("tell")
    assert (len(ray.killed), len(ray.removed)) == (6, 3)


def test_ranks_that_do_not_answer_are_named(ray):  # noqa: F811
    group, began = started(ray), time.monotonic()
    with pytest.raises(RuntimeError, match=r"^ranks \[1\] of 2 did not answer within 0.05 s$"):
        group._collect(group._begin("on", 1, "never"), 0.05)
    assert time.monotonic() - began >= 0.05  # they had that long
    assert not ray.killed  # they go on
    with pytest.raises(RuntimeError, match=r"^ranks \[1\] of 2 did not answer; rank 0 raised ValueError: enough\. The"):
        group._all("on", "all", ValueError("enough"), "never")
    assert len(ray.killed) == 2
    group = started(ray, call_s=0.05)
    group._liveness = SimpleNamespace(doing=lambda ranks: f"; {ranks} sleep", end=lambda: ray.killed.append("watch"))
    with pytest.raises(
        RuntimeError, match=r"ranks \[0\] of 2 did not .* within call_timeout_s, 0.05 s; \[0\] sleep\. The"
    ):
        group._all("on", 0, "never")
    assert ray.killed[-1] == "watch"


def test_no_room_for_the_actors_is_said(ray):  # noqa: F811
    ray.room = False
    with pytest.raises(RuntimeError, match=r"no room for 2 actors with {'CPU': 0.5} each; it has {'CPU': 1}"):
        started(ray)
    assert len(ray.removed) == 1

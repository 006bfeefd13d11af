"""Ranks that are stopped or hang are named, and life goes on after; those that are busy are left alone."""

import ctypes
import inspect
import os
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from megatron_ext.policy import DTensorPolicyWorker, NLLLoss, RayPolicy, outside_wait
from megatron_ext.policy.ray import liveness
from megatron_ext.policy.ray.heartbeat import PERIOD_S
from megatron_ext.policy.ray.liveness import LOOK_S, ActorLocation, HostMonitor, Liveness, RankReport
from tests.policy.problems import tiny_batch, tiny_config
from tests.policy.test_ray_policy import SMALL, WORKERS, ray  # noqa: F401  # a fixture

# 6 s and a look or two, on a machine that does other things too; without a watch it takes hours. That it is under 10
# seconds on one that does not: `test_named_within_10_seconds`.
SOON_S = 120


class Patient(DTensorPolicyWorker):
    """A worker whose ranks can be made to stand still in many ways."""

    def process(self):
        return os.getpid()

    def sleep_while_others_wait(self, rank, seconds, told=None):
        if self.rank == rank:
            if told is None:
                time.sleep(seconds)
            else:
                with outside_wait(told):
                    time.sleep(seconds)
        dist.barrier()

    def sleep_on_all(self, seconds):
        time.sleep(seconds)
        return self.rank

    def compute_while_others_wait(self, rank, seconds):
        until = time.monotonic() + seconds
        x = torch.randn(64, 64)
        while self.rank == rank and time.monotonic() < until:
            x = x @ x / 100
        dist.barrier()
        return self.rank

    def hold_the_lock(self, rank, seconds):
        """One call of C, in which no other thread of Python runs: neither tells anything nor uses the processor."""
        if self.rank == rank:
            ctypes.PyDLL(None).sleep(seconds)
        dist.barrier()


class SleepsOnce(NLLLoss):
    """A loss that stops rank 1 for good."""

    def __call__(self, *args):
        if dist.get_rank() == 1:
            time.sleep(10_000)
        return super().__call__(*args)


@pytest.fixture(scope="module")
def policy(ray):  # noqa: F811
    with RayPolicy(tiny_config(), WORKERS, Patient, **SMALL, heartbeat_timeout_s=4) as policy:
        yield policy


def gone(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{process}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
def test_a_stopped_and_a_hung_rank_are_named_and_life_after(ray, tmp_path):  # noqa: F811
    data, weights = tiny_batch(), str(tmp_path / "weights")
    with RayPolicy(tiny_config(), WORKERS, Patient, **SMALL) as policy:
        policy.train(data, NLLLoss())
        policy.save_checkpoint(weights)
        saved = policy.get_logprobs(data)["logprobs"]
        process = policy._all("process")[1]
        os.kill(process, signal.SIGSTOP)
        start = time.monotonic()
        stopped = rf"rank 1 of 2 \(host .*, process {process}\) is stopped \(as by SIGSTOP\), .* s; it was in "
        with pytest.raises(RuntimeError, match=stopped + r".*restart\(weights_path\) goes on"):
            policy.train(data, NLLLoss())
        assert time.monotonic() - start < SOON_S
        with pytest.raises(RuntimeError, match="is stopped .*call restart"):
            policy.train(data, NLLLoss())
        policy.restart(weights)
        assert gone(process)
        torch.testing.assert_close(policy.get_logprobs(data)["logprobs"], saved, rtol=1e-6, atol=1e-6)

        start = time.monotonic()
        with pytest.raises(RuntimeError, match="no rank moves: rank 1 of 2 .* is in train, at SleepsOnce") as caught:
            policy.train(data, SleepsOnce())
        assert time.monotonic() - start < SOON_S
        assert "(test_liveness.py:" in str(caught.value)
        assert "; rank 0 of 2 " in str(caught.value)
        assert "is in train, waiting for others in " in str(caught.value)
        policy.restart(weights)
        torch.testing.assert_close(policy.get_logprobs(data)["logprobs"], saved, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        ("compute_while_others_wait", 1, 6),
        ("sleep_while_others_wait", 0, 6, "the reward server"),
        ("sleep_on_all", 6),
        ("hold_the_lock", 1, 6),
    ],
)
def test_a_long_step_goes_on(policy, call):
    policy._all(*call)
    assert policy.is_alive()


@pytest.mark.slow
def test_a_call_that_may_take_no_longer(ray, tmp_path):  # noqa: F811
    with RayPolicy(tiny_config(), WORKERS, Patient, **SMALL, call_timeout_s=6) as policy:
        assert policy._all("sleep_on_all", 0.1) == [0, 1]
        with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] of 2 did not answer within call_timeout_s, 6 s; rank"):
            policy._all("sleep_on_all", 10_000)
        assert not policy.is_alive()


class HostsAtOnce:
    """What `Liveness` asks of Ray, with monitors that run in this process and answer at once, unless `silent()`."""

    exceptions = SimpleNamespace(RayError=ConnectionError)

    def __init__(self, silent=lambda: False):
        self.cloudpickle = SimpleNamespace(register_pickle_by_value=lambda _: None)
        self.silent = silent

    def remote(self, **options):
        assert options == {"num_cpus": 0, "max_restarts": -1}

        def on_node(scheduling_strategy):
            node = scheduling_strategy.node_id

            def make(here):
                monitor = liveness.HostMonitor(here)
                asked = SimpleNamespace(remote=lambda: (node, monitor.report()))
                return SimpleNamespace(report=asked, note=monitor.note)

            return SimpleNamespace(remote=make)

        return lambda _: SimpleNamespace(options=on_node)

    def wait(self, asked, **_):
        return ([], asked) if self.silent() and asked[0][0] == NODES[1] else (asked, [])

    def get(self, asked):
        return asked[1]


NODES = "ab" * 28, "cd" * 28


@pytest.mark.parametrize(
    "what",
    [
        r"rank 1 of 2 .* is stopped \(as by SIGSTOP\), no thread of it has run for .* s; it was in train",
        "rank 1 of 2 .* is frozen, no thread of it has run for .* s; it was in train",
        "no rank moves: rank 0 of 2 .* in train, at f, idle for .*; rank 1 of 2 .* in train, waiting for others in f",
        r"host b with ranks \[1\] of 2 has not answered for .* s: .*network is cut; rank 1 of 2 .* in train",
    ],
    ids=["stopped", "frozen", "hung", "lost"],
)
@pytest.mark.parametrize("after_s", [0.05, 0.35, 0.95])  # a second
def test_named_within_10_seconds(monkeypatch, what, after_s):
    """By default, with a clock that is set by hand: ranks tell where they are each `PERIOD_S`, the driver looks half as
    seldom again as it wants to. Whether they do, and what a real process shows, is for the tests above."""
    clock, goes_wrong_at = 0.0, 11 + after_s
    timeout_s = inspect.signature(RayPolicy.__init__).parameters["heartbeat_timeout_s"].default
    hang, stop, lost = "no rank" in what, "is stopped" in what, "network" in what

    def wrong():
        return clock >= goes_wrong_at

    def threads(process):
        halted = wrong() and (stop or "frozen" in what) and process == 101
        return "T" if halted and stop else "S", 7 if halted else int(clock * 100)

    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: clock))  # all else keeps the time
    monkeypatch.setattr(liveness, "_threads", threads)
    places = [ActorLocation(NODES[rank], "ab"[rank], 100 + rank) for rank in (0, 1)]
    watch = Liveness(HostsAtOnce(lambda: lost and wrong()), places, timeout_s)
    fault, told, moved, looked = None, 0.0, 0.0, 0.0
    while fault is None:
        clock = round(clock + 0.05, 2)
        if clock >= told + PERIOD_S:
            moved = moved if hang and told >= goes_wrong_at else clock  # since the last beat
            told = clock
            for rank in (0, 1):
                doing = f"in train, {('at', 'waiting for others in')[rank]} f"
                beat = {"doing": doing, "waits": rank == 1, "idle_s": clock - moved}
                if hang or not (wrong() and rank == 1):
                    watch.monitor(rank).note(rank, beat)
        if clock >= looked + 1.5 * LOOK_S:
            looked, fault = clock, watch.fault([0, 1])
            assert fault is None or wrong(), fault
        assert clock < goes_wrong_at + 10
    assert re.match(what, fault), fault
    assert clock >= goes_wrong_at + timeout_s - 1.5 * LOOK_S - PERIOD_S  # no earlier than it says


def test_a_driver_that_was_stopped_itself_takes_no_host_for_lost(monkeypatch):
    clock = 0.0
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: clock))
    quiet = False
    watch = Liveness(HostsAtOnce(lambda: quiet), [ActorLocation(node, "host", 2**30) for node in NODES], 6)
    assert watch.fault([0, 1]) is None
    quiet, clock = True, 3600.0
    assert watch.fault([0, 1]) is None
    for _ in range(4):
        clock += 1
        assert watch.fault([0, 1]) is None
    assert watch.fault([0]) is None  # who waits for rank 0 alone does not need that host
    clock += 1
    assert "host host with ranks [1] of 2 has not answered for 6 s" in watch.fault([0, 1])


def test_a_monitor_that_ends_leaves_its_host_known(monkeypatch):
    """Ray starts it again; meanwhile neither its host nor a rank is taken for lost."""
    clock, ended = 0.0, False
    monkeypatch.setattr(liveness, "time", SimpleNamespace(monotonic=lambda: clock))
    hosts = HostsAtOnce()
    monkeypatch.setattr(hosts, "get", lambda asked: exec("raise ConnectionError") if ended else asked[1])
    watch = Liveness(hosts, [ActorLocation(node, "host", 2**30) for node in NODES], 6)
    for clock in range(20):
        ended = 4 < clock < 14
        assert watch.fault([0, 1]) is None


def test_a_beat_in_words():
    beat = {"doing": "in train, at f", "waits": False, "idle_s": 0.5}
    assert liveness._doing(RankReport("S", 0.0, beat, 2.0)) == "in train, at f"
    old = "in train, at f, as it told 4 s ago, idle for 1 s"
    assert liveness._doing(RankReport("S", 0.0, beat | {"idle_s": 1.0}, 4.0)) == old
    assert liveness._doing(RankReport("S", 0.0, None, 0.0)) == "in a call of which it has told nothing yet"


@pytest.mark.parametrize(
    "timeouts, message",
    [({"call_timeout_s": 0}, "call_timeout_s is 0"), ({"heartbeat_timeout_s": 1}, "heartbeat_timeout_s is 1")],
)
def test_timeouts_that_cannot_be(timeouts, message):
    with pytest.raises(ValueError, match=message):
        RayPolicy(tiny_config(), 2, **timeouts)


def test_processes_may_end_by_themselves(tmp_path):
    """Within their grace they are left alone; one that does not end by then is killed."""
    code = "import pathlib, sys, time; time.sleep(float(sys.argv[2])); pathlib.Path(sys.argv[1]).touch()"
    ended, late = tmp_path / "ended", tmp_path / "late"
    processes = [subprocess.Popen([sys.executable, "-c", code, str(ended), "0.3"])]
    HostMonitor({0: processes[0].pid}).end(30.0)
    assert ended.exists()
    processes.append(subprocess.Popen([sys.executable, "-c", code, str(late), "600"]))
    HostMonitor({0: processes[1].pid}).end(0.2)
    assert processes[1].wait(60) == -signal.SIGKILL
    processes[0].wait()
    assert not late.exists()


def test_a_stopped_process_has_no_thread_that_runs():
    sleeper = subprocess.Popen(["sleep", "600"])
    states = set()
    for number in (signal.SIGSTOP, signal.SIGCONT, signal.SIGKILL):
        sleeper.send_signal(number)
        if number == signal.SIGKILL:
            sleeper.wait()
        time.sleep(0.05)
        states.add(liveness._threads(sleeper.pid)[0])
    assert states == {"T", "S", ""}
    before = liveness._threads(os.getpid())[1]
    time.sleep(0.01)
    assert liveness._threads(os.getpid())[1] > before > 0

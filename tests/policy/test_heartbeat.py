"""A beat says where a call stands, and a sample of a process what it has used."""

import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import psutil
import pytest

from megatron_ext.policy import outside_wait
from megatron_ext.policy.ray import heartbeat, host_monitor
from megatron_ext.policy.ray.actors import _worker_call
from megatron_ext.policy.ray.heartbeat import Heartbeat

IN_TORCH = compile("def wait(event): event.wait()", "/lib/torch/distributed/distributed_c10d.py", "exec")


@pytest.fixture
def beats(monkeypatch):
    """A heartbeat whose thread is not started."""
    threads = SimpleNamespace(Thread=lambda **_: SimpleNamespace(start=lambda: None), get_ident=threading.get_ident)
    monkeypatch.setattr(heartbeat, "threading", threads)
    return Heartbeat(lambda beat: None)


def stands(event):
    event.wait()


@contextmanager
def in_call(beats, function):
    """A thread in a call of `function`, which waits."""
    event, began = threading.Event(), threading.Event()

    def run():
        with beats.during("train"):
            began.set()
            _worker_call(function, (event,), {})

    thread = threading.Thread(target=run)
    thread.start()
    began.wait()
    while heartbeat._stack(sys._current_frames()[thread.ident])[-1].f_code is not function.__code__:
        pass
    try:
        yield
    finally:
        event.set()
        thread.join()
    assert beats._call is None


def settled(beats):
    """The beat of a call that has come to stand."""
    beat = beats._beat(*beats._call)
    while (again := beats._beat(*beats._call)) != beat:
        beat = again
    return beat


def test_a_beat_tells_the_line_of_the_user_and_who_waits(beats):
    with in_call(beats, stands):
        beat = settled(beats)
        with outside_wait("a server"):
            assert beats._beat(*beats._call)["outside"] == "a server"
    words = r"Condition\.wait \(threading\.py:\d+\), from stands \(test_heartbeat\.py:\d+\)"
    assert re.fullmatch(words, beat.pop("doing"))
    assert isinstance(beat.pop("at"), int)
    assert beat == {"call": "train", "waits": False, "outside": None}
    names = {}
    exec(IN_TORCH, names)
    with in_call(beats, names["wait"]):
        beat = settled(beats)
    assert beat["waits"]
    assert beat["doing"] == "wait (distributed_c10d.py:1)"


def test_a_beat_is_sent_each_period_while_a_call_lasts(beats, monkeypatch):
    slept, sent = [], []

    def sleep(seconds):
        slept.append(seconds)
        if len(slept) == 4:
            raise SystemExit
        beats._call = None if len(slept) == 2 else ("train", 0.0, threading.get_ident())

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(sleep=sleep))
    beats._send = sent.append
    with pytest.raises(SystemExit):
        beats._run()
    assert slept == [heartbeat.PERIOD_S] * 4
    assert [beat["call"] for beat in sent] == ["train", "train"]


def test_a_sample_says_what_a_process_has_used():
    before, own, after = psutil.Process().num_threads(), host_monitor._sample(os.getpid()), os.times()
    assert own.processor_s == pytest.approx(after.user + after.system, abs=1.0)
    assert abs(own.threads - before) <= abs(psutil.Process().num_threads() - before)
    assert own.switches > 0
    assert own.nbytes > 0
    sleeper = subprocess.Popen(["sleep", "600"])
    assert host_monitor._runs(sleeper.pid)
    assert not host_monitor._children_run(sleeper.pid)
    sleeper.kill()
    sleeper.wait()
    assert not host_monitor._runs(sleeper.pid)
    assert not host_monitor._children_run(sleeper.pid)
    assert host_monitor._sample(sleeper.pid) is None


@pytest.mark.parametrize(
    "change, moves",
    [
        ({}, False),
        ({"state": psutil.STATUS_RUNNING}, True),
        ({"processor_s": 1.10}, True),
        ({"processor_s": 1.05}, False),  # 3 % of a processor, and 0.3 % for each thread, are idle
        ({"nbytes": 2 << 16}, False),
        ({"nbytes": (2 << 16) + 1}, True),
    ],
)
def test_a_process_moves_that_computes_reads_or_writes(change, moves):
    before = host_monitor.Sample(10.0, psutil.STATUS_SLEEPING, 3, 1.0, 1 << 16, 10)
    assert host_monitor._moved(before, before._replace(clock_s=11.0, **change)) == moves
    alone = host_monitor.Sample(10.0, psutil.STATUS_SLEEPING, 3, 0.0, 0, 0)
    assert not host_monitor._moved(alone, alone._replace(clock_s=11.0, processor_s=host_monitor._IDLE_SHARE))

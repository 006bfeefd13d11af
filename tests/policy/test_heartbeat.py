"""A beat says where a call stands, and for how long its process has stood still."""

import os
import re
import subprocess
import threading
import time
from types import SimpleNamespace

import psutil
import pytest

from megatron_ext.policy import outside_wait
from megatron_ext.policy.ray import heartbeat
from megatron_ext.policy.ray.actors import _worker_call
from megatron_ext.policy.ray.heartbeat import beating

IN_TORCH = compile("def wait(event): event.wait()", "/lib/torch/distributed/distributed_c10d.py", "exec")


@pytest.fixture
def moves(monkeypatch):
    """A period of 10 ms, and whether the process moves as it is set here."""
    moves = []
    monkeypatch.setattr(heartbeat, "PERIOD_S", 0.01)
    monkeypatch.setattr(heartbeat, "_moves", lambda *_: bool(moves))
    return moves


def stands(event):
    event.wait()


def beats_of(function, seconds=0.2):
    """Beats of a thread in a call of `function`, which waits for `seconds`."""
    event, sent = threading.Event(), []

    def run():
        with beating(sent.append, "train"):
            _worker_call(function, (event,), {})

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(seconds)
    event.set()
    thread.join()
    return sent


def test_a_beat_tells_the_line_of_the_user_and_who_waits(moves):
    words = r"in train, at Condition\.wait \(threading\.py:\d+\), from stands \(test_heartbeat\.py:\d+\)"
    beat = beats_of(stands)[-1]
    assert re.fullmatch(words, beat["doing"])
    assert (beat["waits"], beat.keys()) == (False, {"doing", "waits", "idle_s"})
    names = {}
    exec(IN_TORCH, names)
    beat = beats_of(names["wait"])[-1]
    assert beat["waits"]
    assert beat["doing"] == "in train, waiting for others in wait (distributed_c10d.py:1)"


def test_beats_come_each_period_while_a_call_lasts(moves):
    sent = beats_of(stands)
    assert len(sent) >= 3
    time.sleep(0.05)
    count = len(sent)  # one may have been on its way
    time.sleep(0.05)
    assert len(sent) == count


def test_a_call_is_idle_that_neither_moves_nor_waits_outside(moves):
    def outside(event):
        with outside_wait("a server"):
            event.wait()

    def other_lines(event):
        while not event.is_set():
            time.sleep(0.003)
            time.sleep(0.003)

    idle = [beat["idle_s"] for beat in beats_of(stands)]
    assert idle == sorted(idle)
    assert 0.05 < idle[-1] < 60
    beat = beats_of(outside)[-1]
    assert beat["idle_s"] < 0.05
    assert beat["doing"].endswith(", waiting for a server")
    assert min(beat["idle_s"] for beat in beats_of(other_lines)[1:]) < 0.05
    moves.append(True)
    assert max(beat["idle_s"] for beat in beats_of(stands)) < 0.05


def test_a_process_says_what_it_has_used_and_started():
    own, before, after = psutil.Process(), heartbeat._used(psutil.Process()), os.times()
    assert before[1] == pytest.approx(after.user + after.system, abs=1.0)
    assert before[2] > 0
    started = subprocess.Popen(["sleep", "600"])
    child = psutil.Process(started.pid)
    assert child in own.children(recursive=True)
    while child.status() != psutil.STATUS_SLEEPING:  # it is being loaded
        time.sleep(0.01)
    sleeper = SimpleNamespace(num_threads=lambda: 10**6, children=lambda recursive: [child], status=child.status)
    assert not heartbeat._moves(sleeper, heartbeat._used(own))
    started.kill()
    started.wait()
    assert heartbeat._moves(sleeper, heartbeat._used(own)), "a process that has just ended has moved"


@pytest.mark.parametrize(
    "change, moves",
    [
        ({}, False),
        ({"status": "running"}, True),
        ({"child": "running"}, True),
        ({"child": "disk-sleep"}, True),
        ({"processor_s": 0.10}, True),
        ({"processor_s": 0.05}, False),  # 3 % of a processor, and 0.3 % for each thread, are idle
        ({"nbytes": 1 << 16}, False),
        ({"nbytes": (1 << 16) + 1}, True),
    ],
)
def test_a_process_moves_that_computes_reads_or_writes(monkeypatch, change, moves):
    at = {"status": "sleeping", "child": "sleeping", "processor_s": 0.0, "nbytes": 0} | change
    child = SimpleNamespace(status=lambda: at["child"])
    process = SimpleNamespace(num_threads=lambda: 10, status=lambda: at["status"], children=lambda recursive: [child])
    monkeypatch.setattr(heartbeat, "_used", lambda _: (11.0, 1.0 + at["processor_s"], 7 + at["nbytes"]))
    assert heartbeat._moves(process, (10.0, 1.0, 7)) == moves

"""Once a second, what a rank is doing during a call: its stack frame, and whether its counters still move.

A thread of the rank's process looks at the call's thread from outside. The call itself does nothing for it.
"""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

PERIOD_S = 1.0
# Of one processor: what idle threads use that wake a hundred times a second each (gloo has several a group).
_IDLE_SHARE, _IDLE_SHARE_OF_A_THREAD = 0.03, 0.003
_IDLE_BYTES = 1 << 16  # read and written in a period, by this thread too
_PROGRESS_FREE_S = 2.0  # before the processes that this one has started are looked at
# Where a call that does not move waits for other ranks; autograd's engine runs collectives without a Python frame.
_WAITS_IN = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/autograd/graph.py",
    "megatron_ext/distributed/collectives.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "megatron/core/distributed/param_and_grad_buffer.py",
)
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])

_outside: list[str] = []  # what the process waits for outside of the policy, innermost last


@contextmanager
def outside_wait(what: str) -> Iterator[None]:
    """While it lasts this rank may stand still, and the others wait for it, without the policy being taken for hung.

    For waits on what is no rank of the policy: a reward server that a loss asks, generators that join.
    """
    _outside.append(what)
    try:
        yield
    finally:
        _outside.pop()


class _Call(NamedTuple):
    name: str
    begun: float
    thread: int  # by Python's id
    native_thread: int  # by the system's


class Heartbeat:
    """Tells `send` of the call that this process works on, every `PERIOD_S`.

    A beat is a dict: "call", its name; "call_s", since when; "doing", the innermost function and the one of the policy
    that led there; "idle_s", how long neither the call nor its process or processes that it started has moved: no
    other line of Python, no processor time, nothing read or written; "waits", whether it stands where ranks wait for
    others; "outside", see `outside_wait`.
    """

    def __init__(self, send: Callable[[dict[str, Any]], object]):
        self._send = send
        self._call: _Call | None = None
        self._where: Any = None  # in the call, at the last beat
        self._moved_at, self._last = 0.0, _Usage.now()
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        self._call = _Call(call, time.monotonic(), threading.get_ident(), threading.get_native_id())
        try:
            yield
        finally:
            self._call = None

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            call, usage = self._call, _Usage.now()
            beat = None if call is None else self._beat(call, usage)
            self._last = usage
            if beat is not None:
                self._send(beat)

    def _beat(self, call: _Call, usage: "_Usage") -> dict[str, Any] | None:
        """None where the call has just ended. No frame is kept: it would keep the call's tensors."""
        frames = _stack(sys._current_frames().get(call.thread))
        if not frames:
            return None
        now = time.monotonic()
        where = (call.begun, [(frame.f_code, frame.f_lasti) for frame in frames])
        moves = where != self._where or usage.moved_since(self._last) or _runs(call.native_thread)
        if moves or (now - self._moved_at > _PROGRESS_FREE_S and _children_run()):
            self._moved_at = now
        self._where = where
        return {
            "call": call.name,
            "call_s": now - call.begun,
            "doing": _told(frames),
            "idle_s": now - self._moved_at,
            "waits": any(_waits(frame) for frame in frames),
            "outside": _outside[-1] if _outside else None,
        }


class _Usage:
    """What this process has used so far, but for the thread that asks."""

    def __init__(self, seconds: float, processor_s: float, nbytes: int, threads: int):
        self.seconds, self.processor_s, self.nbytes, self.threads = seconds, processor_s, nbytes, threads

    @classmethod
    def now(cls) -> "_Usage":
        return cls(
            time.monotonic(), time.process_time() - time.thread_time(), _bytes_moved(), len(threading.enumerate())
        )

    def moved_since(self, last: "_Usage") -> bool:
        share = (self.processor_s - last.processor_s) / max(self.seconds - last.seconds, 1e-3)
        threads = _count("/proc/self/task") or self.threads
        return share > _IDLE_SHARE + _IDLE_SHARE_OF_A_THREAD * threads or self.nbytes - last.nbytes > _IDLE_BYTES


def _bytes_moved() -> int:
    try:
        with open("/proc/self/io") as file:
            return sum(int(line.split()[1]) for line in file if line.startswith(("rchar", "wchar")))
    except OSError:  # no Linux, or not allowed
        return 0


def _count(folder: str) -> int:
    return len(os.listdir(folder)) if os.path.isdir(folder) else 0


def _runs(thread: int, process: int | str = "self") -> bool:
    """Whether a thread has or waits for a processor, or waits for a disk."""
    try:
        with open(f"/proc/{process}/task/{thread}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "RD"
    except OSError:
        return False


def _children_run() -> bool:
    """Whether a process that this one has started, or one of theirs, runs: a compiler, for instance."""
    left = [os.getpid()]
    found: set[int] = set()
    while left:
        process = left.pop()
        try:
            threads = os.listdir(f"/proc/{process}/task")
            if process != os.getpid() and any(_runs(int(thread), process) for thread in threads):
                return True
            for thread in threads:
                with open(f"/proc/{process}/task/{thread}/children") as file:
                    started = {int(child) for child in file.read().split()} - found
                found |= started
                left += started
        except OSError:
            continue
    return False


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Frames of a call, innermost first, without Ray's."""
    frames = []
    while frame is not None and frame.f_code.co_name != "_worker_call":
        frames.append(frame)
        frame = frame.f_back
    return frames


def _waits(frame: FrameType) -> bool:
    return frame.f_code.co_filename.replace(os.sep, "/").endswith(_WAITS_IN)


def _told(frames: list[FrameType]) -> str:
    """The innermost function; where that is a library's, also the innermost one of the policy or its user."""
    own = next((frame for frame in frames if not _is_library(frame.f_code.co_filename)), frames[0])
    innermost = next((frame for frame in frames if _waits(frame)), frames[0])
    return _line(own) if own is innermost else f"{_line(innermost)}, from {_line(own)}"


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) and "megatron_ext" not in file


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_qualname} ({os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno})"

"""Once a second, where a rank is in its call: told to its host's monitor by a thread beside the call.

The call itself does nothing for it. Whether the process uses anything, the monitor sees by itself: see `host_monitor`.
"""

import os
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

PERIOD_S = 1.0
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


class Heartbeat:
    """Tells `send` of the call that this process works on, every `PERIOD_S`.

    A beat is a dict: "call", its name; "at", a number that changes when it runs another line; "doing", the innermost
    function and the one of the policy that led there; "waits", whether it stands where ranks wait for others;
    "outside", see `outside_wait`.
    """

    def __init__(self, send: Callable[[dict[str, Any]], object]):
        self._send = send
        self._call: tuple[str, float, int] | None = None  # its name, when it began, the thread's id
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        self._call = call, time.monotonic(), threading.get_ident()
        try:
            yield
        finally:
            self._call = None

    def _run(self) -> None:
        while True:
            time.sleep(PERIOD_S)
            if (call := self._call) is not None and (beat := self._beat(*call)) is not None:
                self._send(beat)

    def _beat(self, name: str, begun: float, thread: int) -> dict[str, Any] | None:
        """None where the call has just ended. No frame is kept: it would keep the call's tensors."""
        frames = _stack(sys._current_frames().get(thread))
        if not frames:
            return None
        return {
            "call": name,
            "at": hash((begun, *((frame.f_code, frame.f_lasti) for frame in frames))),
            "doing": _told(frames),
            "waits": any(_waits(frame) for frame in frames),
            "outside": _outside[-1] if _outside else None,
        }


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

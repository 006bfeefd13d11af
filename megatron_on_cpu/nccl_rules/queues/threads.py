"""The threads of a rank's program: the launches that they wait for, and the threads that nothing can wake.

A thread of a pool that has no work, or one that waits for another thread's result, launches nothing unless a thread of
this process wakes it. Such threads are idle; where every thread is idle or waits for a launch, none can launch more.
"""

import sys
import threading
import time
from pathlib import Path
from types import FrameType

from megatron_on_cpu.nccl_rules.queues.launches import Launch, lines_from

_IDLE_S = 0.9  # the wait at one place after which a thread is idle: in a shorter one it may have been woken just now
_OURS = "nccl-rules"  # the name of the backend's own thread
# Functions that wait for another thread, as (module, name); a `timeout` of None or -1 in them is for ever.
_WAITS = {("threading", "wait"), ("threading", "join"), ("threading", "_wait_for_tstate_lock"), ("thread", "_worker")}


class Threads:
    """Threads of this process; `waits` has, for each that has launched something, the launch it waits for or None."""

    def __init__(self) -> None:
        self.waits: dict[int, Launch | None] = {}
        self._places: dict[int, tuple[tuple[int, int], float]] = {}  # by thread: where it waits, and since when

    def launches(self, thread: int) -> None:
        self.waits.setdefault(thread, None)

    def states(self) -> tuple[list[Launch | None], list[str]]:
        """Return the launches that threads wait for, with a None for each thread that may launch more, and the lines of
        code at which the latter are."""
        alive = [thread.ident for thread in threading.enumerate() if thread.name != _OURS and thread.ident is not None]
        frames = sys._current_frames()
        waiting = {thread: launch for thread, launch in self.waits.items() if launch is not None and thread in alive}
        busy = [thread for thread in alive if thread not in waiting and not self._idle(thread, frames.get(thread))]
        may_launch = [thread for thread in alive if thread in self.waits or thread == threading.main_thread().ident]
        running = [thread for thread in may_launch if thread not in waiting] if busy else []
        places = [" < ".join(lines_from(frames.get(thread))) for thread in running]
        return [*waiting.values(), *(None for _ in running)], places

    def _idle(self, thread: int, frame: FrameType | None) -> bool:
        if frame is None or not _waits_for_a_thread(frame):
            self._places.pop(thread, None)
            return False
        place, now = (id(frame), frame.f_lasti), time.monotonic()
        before = self._places.get(thread)
        if before is None or before[0] != place:
            self._places[thread] = before = (place, now)
        return now - before[1] >= _IDLE_S


def _waits_for_a_thread(frame: FrameType) -> bool:
    code = frame.f_code
    known = (Path(code.co_filename).stem, code.co_name) in _WAITS
    return known and frame.f_locals.get("timeout") in (None, -1)

"""Decides twice a second during a call whether a rank is lost, stopped or hung; a busy one may take any time.

    lost      its host answers nothing: it is down or frozen, or its network is cut
    stopped   the operating system runs no thread of its process (SIGSTOP, a frozen container)
    hung      no rank moves, and at least one waits for the others in a collective

A rank that waits by spinning, as for a collective on a GPU, looks busy: NCCL's own timeout ends that wait.
"""

import logging
import math
import os
import re
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.policy import outside_waits

PERIOD_S = 1.0  # between two beats of a rank
LOOK_S = 0.5  # between two calls of `fault`: a fault is known at most two calls and a beat after its timeout
_OLD_S = 3.0  # an older beat says nothing about the present
_LOG = logging.getLogger(__name__)
# Files in which a call that stands still waits for other ranks; autograd's engine runs collectives without a frame.
_WAITS_IN = (
    "torch/distributed/distributed_c10d.py",
    "torch/distributed/_functional_collectives.py",
    "torch/autograd/graph.py",
    "megatron_ext/distributed/collectives.py",
    "megatron/core/pipeline_parallel/p2p_communication.py",
    "megatron/core/distributed/param_and_grad_buffer.py",
)
_LIBRARIES = (sysconfig.get_paths()["stdlib"], sysconfig.get_paths()["purelib"])
# A call in words; whether it waits for other ranks; seconds since its line changed or its process last moved.
Beat = tuple[str, bool, float]


@contextmanager
def beating(send: Callable[[Beat], object], call: str) -> Iterator[None]:
    """Send a beat of this thread each `PERIOD_S`, while the context lasts; in `outside_wait` it counts as moving."""
    import psutil  # comes with Ray's extra

    thread, ended, process = threading.get_ident(), threading.Event(), psutil.Process()

    def beat() -> None:
        before, since, nbytes = None, 0.0, 0
        while not ended.wait(PERIOD_S):
            if not (lines := _lines(thread)):  # before its first line, or in compiled code that has no frames
                continue
            moves, nbytes = _moves(process, nbytes)
            if moves or lines != before or outside_waits.now:
                before, since = lines, time.monotonic()
            waits_in = next((line for file, line in lines if file.endswith(_WAITS_IN)), None)
            own = next((line for file, line in lines if not file.startswith(_LIBRARIES) or "megatron_ext" in file), "")
            told = f"in {call}, {'waiting for others in' if waits_in else 'at'} {waits_in or lines[0][1]}"
            told += f", from {own}" if own not in told else ""
            told += "".join(f", waiting for {what}" for what in outside_waits.now[-1:])
            idle_s = time.monotonic() - since
            told += f", idle for {idle_s:.0f} s" if idle_s >= PERIOD_S else ""
            send((told, waits_in is not None, idle_s))

    threading.Thread(target=beat, name="heartbeat", daemon=True).start()
    try:
        yield
    finally:
        ended.set()


def _lines(thread: int) -> list[tuple[str, str]]:
    """List file and line of each frame of a call, innermost first, without Ray's frames."""
    frame, found = sys._current_frames().get(thread), []
    while frame is not None and frame.f_code.co_name != "_worker_call":
        code, file = frame.f_code, os.path.basename(frame.f_code.co_filename)
        found.append((code.co_filename, f"{code.co_qualname} ({file}:{frame.f_lineno})"))
        frame = frame.f_back
    return found


def _moves(process: Any, before: int) -> tuple[bool, int]:
    """Return whether the process has computed, read or written, or whether it or a child of it runs; and the bytes that
    it has read and written until now."""
    nbytes = 0
    with suppress(Exception):  # macOS has no counters, and a system may refuse them
        counters = process.io_counters()
        nbytes = counters.read_chars + counters.write_chars
    # CPU percent since the last call: idle threads wake a hundred times a second each, and gloo has several a group.
    if process.cpu_percent() > 3 + 0.3 * process.num_threads() or nbytes - before > 1 << 16:
        return True, nbytes
    with suppress(Exception):  # a child has ended
        family = [process, *process.children(recursive=True)]
        return any(one.status() in ("running", "disk-sleep") for one in family), nbytes
    return True, nbytes


class ActorLocation(NamedTuple):
    """Location of an actor: Ray's id of its node, its host's name, its process."""

    node: str
    host: str
    process: int


class HostMonitor:
    """Process beside the ranks of a host, which answers also while they are stopped, or hold their interpreter's lock.

    Ray pickles this class by value, so that the process does not load torch.
    """

    def __init__(self, processes: dict[int, int]):
        nothing = math.inf, ("in a call of which it has told nothing yet", False, 0.0)
        self._processes, self._beats = processes, dict.fromkeys(processes, nothing)
        self._ran = dict.fromkeys(processes, (0.0, 0))  # when a thread ran last, and all context switches until then

    def note(self, rank: int, beat: Beat) -> None:
        self._beats[rank] = time.monotonic(), beat

    def report(self) -> dict[int, tuple[Beat, float]]:
        """Return for each rank its last beat, and the seconds for which no thread of its process has run."""
        found, now = {}, time.monotonic()
        for rank, process in self._processes.items():
            switches = _switches(process)
            if not switches or switches != self._ran[rank][1]:
                self._ran[rank] = now, switches
            came, beat = self._beats[rank]
            if now - came >= _OLD_S:
                beat = f"{beat[0]}, as it told {now - came:.0f} s ago", False, 0.0
            found[rank] = beat, now - self._ran[rank][0]
        return found

    def resume(self) -> None:
        """Let stopped ranks run, so that they hear Ray's request to end: Ray < 2.52 does nothing beyond asking."""
        for process in self._processes.values():
            with suppress(OSError):  # it has ended
                os.kill(process, signal.SIGCONT)


def _switches(process: int) -> int:
    """Count how often all threads of a process have given up a processor, as of /proc; 0: unknown."""
    with suppress(OSError):
        status = "".join(path.read_text() for path in Path(f"/proc/{process}/task").glob("*/status"))
        return sum(map(int, re.findall(r"ctxt_switches:\s*(\d+)", status)))
    return 0


class Liveness:
    """Liveness of the actors at `places`, by rank. `timeout_s`: how long one may be lost or stopped, or all hung.

    Starts a monitor process on each host, which needs no CPU of Ray's: `monitors` has each rank's monitor.
    """

    def __init__(self, ray: Any, places: Sequence[ActorLocation], timeout_s: float, start_timeout_s: float):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        self._ray, self._places, self._timeout_s, self._of_node = ray, places, timeout_s, {}
        for node in sorted({place.node for place in places}):
            here = {rank: place.process for rank, place in enumerate(places) if place.node == node}
            there = ray.remote(
                num_cpus=0, max_restarts=-1, scheduling_strategy=NodeAffinitySchedulingStrategy(node, False)
            )
            self._of_node[node] = there(HostMonitor).remote(here)
        self.monitors = [self._of_node[place.node] for place in places]
        self._names = [f"rank {i} of {len(places)} (host {x.host}, process {x.process})" for i, x in enumerate(places)]
        ray.get([monitor.report.remote() for monitor in self._of_node.values()], timeout=start_timeout_s)
        self._reports: dict[int, tuple[Beat, float]] = {}

    def end(self) -> None:
        """End the monitors, after they have resumed stopped ranks, which then hear that Ray ends them."""
        asked = [monitor.resume.remote() for monitor in self.monitors]
        self._ray.wait(asked, num_returns=len(asked), timeout=PERIOD_S)
        for monitor in self.monitors:
            self._ray.kill(monitor)

    def fault(self, pending: Collection[int], at_most_s: float = math.inf) -> str | None:
        """Return the fault of ranks that have not answered yet; None: there is none, as far as `at_most_s` shows.

        Waits only for the monitors.
        """
        ray, asked = self._ray, {monitor.report.remote(): node for node, monitor in self._of_node.items()}
        for timeout_s in (min(self._timeout_s, at_most_s), LOOK_S):  # again: this process may have been stopped itself
            done, silent = ray.wait([*asked], num_returns=len(asked), timeout=timeout_s)
        for answer in done:
            try:
                self._reports |= ray.get(answer)
            except ray.exceptions.RayError as error:  # Ray starts the monitor again
                _LOG.warning("the monitor of a host does not answer (%s): its ranks are not watched", error)
        for answer in silent if at_most_s >= self._timeout_s else ():
            if lost := [rank for rank in pending if self._places[rank].node == asked[answer]]:
                return (
                    f"host {self._places[lost[0]].host} with ranks {lost} of {len(self._places)} has not answered for "
                    f"{self._timeout_s:.0f} s: it is down or frozen, or its network is cut{self.doing(lost)}"
                )
        reports = {rank: self._reports[rank] for rank in pending if rank in self._reports}
        for rank, ((told, _, _), still_s) in reports.items():
            if still_s >= self._timeout_s:
                why = "stopped (by SIGSTOP, or a frozen container)"
                return f"{self._names[rank]} is {why}, no thread of it has run for {still_s:.0f} s; it was {told}"
        idle = len(reports) == len(pending) and all(s >= self._timeout_s for (_, _, s), _ in reports.values())
        if idle and not silent and any(waits for (_, waits, _), _ in reports.values()):
            return "no rank moves" + self.doing(pending).replace(";", ":", 1)
        return None

    def doing(self, ranks: Collection[int]) -> str:
        """Describe what the ranks did at their last beat, first those that do not wait for others: the likely cause."""
        told = [(waits, rank, words) for rank, ((words, waits, _), _) in self._reports.items() if rank in ranks]
        return "".join(f"; {self._names[rank]} is {words}" for _, rank, words in sorted(told))

"""Use of one host by its ranks, as the operating system tells, and their progress, as the ranks tell themselves.

One such process runs beside the ranks of a host, and answers also while they are stopped, or hold their interpreter's
lock. It imports the standard library and psutil alone: Ray sends this file by value, and the process loads no torch.
"""

import contextlib
import glob
import os
import signal
import time
from typing import Any, NamedTuple

import psutil

_LONGEST_GAP_S = 3.0  # between two samples: longer, and they say nothing of what was between
# Of one processor: what idle threads use that wake a hundred times a second each (gloo has several a group).
_IDLE_SHARE, _IDLE_SHARE_OF_A_THREAD = 0.03, 0.003
_IDLE_BYTES = 1 << 16  # read and written between two samples
_CHILDREN_AFTER_S = 2.0  # of standing still: looking for what a rank has started takes a while
_ACTIVE = psutil.STATUS_RUNNING, psutil.STATUS_DISK_SLEEP


class Sample(NamedTuple):
    """Sample of a process: its time; the state of the main thread; how often the threads have given up a processor
    (-1: not known); processor seconds and bytes that the process has used so far; its number of threads."""

    clock_s: float
    state: str
    switches: int
    processor_s: float
    nbytes: int
    threads: int


class HostMonitor:
    """Times are by this host's monotonic clock, and only differences of them leave it."""

    def __init__(self) -> None:
        self._beats: dict[int, tuple[float, dict[str, Any]]] = {}  # by rank: when it came, and the beat
        self._seen: dict[int, tuple[Sample | None, Any]] = {}  # by rank, at the last look: the process, and the beat
        self._since: dict[tuple[int, str], float] = {}

    def note(self, rank: int, beat: dict[str, Any]) -> None:
        """Note what a rank says of itself; see `heartbeat.Heartbeat`."""
        self._beats[rank] = time.monotonic(), beat

    def report(self, processes: dict[int, int]) -> dict[int, dict[str, Any]]:
        """For each rank of `{rank: process id}`, to be asked each second or more often:

        "still_s": how long none of its threads has run; "state", as of psutil: why. "idle_s": how long neither the call
        nor its process, or processes that it started, has moved: no other line of Python, no processor time, nothing
        read or written. "beat" is its last one (None: there was none), "beat_age_s" its age.
        """
        return {rank: self._look(rank, process) for rank, process in processes.items()}

    def end(self, processes: list[int], grace_s: float = 0.0) -> None:
        """Ends what Ray's own request does not: a stopped process does not answer it.

        Those that end by themselves within `grace_s` are left to do so: of one that is killed before it has told Ray,
        Ray prints that it died of an unexpected system error.
        """
        until = time.monotonic() + grace_s
        while time.monotonic() < until and any(map(_runs, processes)):
            time.sleep(0.05)
        for process in processes:
            with contextlib.suppress(OSError):  # it has ended
                os.kill(process, signal.SIGKILL)

    def _look(self, rank: int, process: int) -> dict[str, Any]:
        now, sample = time.monotonic(), _sample(process)
        came, beat = self._beats.get(rank, (now, None))
        before, beat_before = self._seen.get(rank, (None, None))
        self._seen[rank] = sample, beat
        still = idle = False
        if sample is not None and before is not None and sample.clock_s - before.clock_s <= _LONGEST_GAP_S:
            still = sample.state not in _ACTIVE and sample.switches == before.switches >= 0
            same_line = beat is None or beat_before is None or beat["at"] == beat_before["at"]
            idle = same_line and not _moved(before, sample)
            if idle and now - self._since[rank, "idle_s"] > _CHILDREN_AFTER_S:
                idle = not _children_run(process)
        for name, holds in (("still_s", still), ("idle_s", idle)):
            if not holds:
                self._since[rank, name] = now
        times = {name: now - self._since[rank, name] for name in ("still_s", "idle_s")}
        return {**times, "state": sample and sample.state, "beat": beat, "beat_age_s": now - came}


def _runs(process: int) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
    return False


def _moved(before: Sample, now: Sample) -> bool:
    idle_share = _IDLE_SHARE + _IDLE_SHARE_OF_A_THREAD * now.threads
    share = (now.processor_s - before.processor_s) / max(now.clock_s - before.clock_s, 0.1)
    return now.state in _ACTIVE or share > idle_share or now.nbytes - before.nbytes > _IDLE_BYTES


def _sample(process: int) -> Sample | None:
    """None: it has ended, which Ray says by itself."""
    try:
        found = psutil.Process(process)
        used, nbytes = found.cpu_times(), 0
        with contextlib.suppress(psutil.AccessDenied, AttributeError):  # macOS has no such counters
            nbytes = found.io_counters().read_chars + found.io_counters().write_chars
        threads = glob.glob(f"/proc/{process}/task/*/status")  # psutil counts switches of the main thread alone
        switches = sum(_switches(path) for path in threads) if threads else -1
        processor_s = used.user + used.system
        return Sample(time.monotonic(), found.status(), switches, processor_s, nbytes, found.num_threads())
    except psutil.Error:
        return None


def _switches(path: str) -> int:
    with contextlib.suppress(OSError), open(path) as file:
        return sum(int(line.split()[1]) for line in file if "ctxt_switches" in line)
    return 0


def _children_run(process: int) -> bool:
    """Return whether a process that this one has started, or a child of that, runs: a compiler, for instance."""
    with contextlib.suppress(psutil.Error):
        return any(child.status() in _ACTIVE for child in psutil.Process(process).children(recursive=True))
    return False

"""Process states of the actors on one host, as the operating system reports them, and each one's last heartbeat.

One such process runs beside the actors of a host. It answers also while they are stopped, or while a long call holds
their interpreter's lock. Imports the standard library alone, so that Ray can send this file by value and the process
need not load torch. The states are read from Linux's /proc; elsewhere they are unknown.
"""

import os
import signal
import time
from typing import Any

# Samples further apart than this say nothing of what was between: nobody asked, or this process was stopped itself.
_LONGEST_GAP_S = 3.0


class HostMonitor:
    """Times are by this host's monotonic clock, and only differences of them leave it."""

    def __init__(self) -> None:
        self._beats: dict[int, tuple[float, dict[str, Any]]] = {}  # by rank: when it came, and the beat
        self._samples: dict[int, tuple[float, bool, int]] = {}  # by process: when, whether stopped, switches of threads
        self._stopped_since: dict[int, float] = {}
        self._still_since: dict[int, float] = {}

    def note(self, rank: int, beat: dict[str, Any]) -> None:
        """What a rank says of itself; see `heartbeat.Heartbeat`."""
        self._beats[rank] = (time.monotonic(), beat)

    def report(self, processes: dict[int, int]) -> dict[int, dict[str, Any]]:
        """For each rank of `{rank: process id}`, to be asked each second or more often:

        "stopped_s": how long it has been in the state of SIGSTOP; "still_s": how long none of its threads has run (a
        frozen container); both 0 where it runs. "beat" is its last one (None: there was none), "beat_age_s" its age.
        """
        return {rank: self._look(rank, process) for rank, process in processes.items()}

    def end(self, processes: list[int]) -> None:
        """Ends what Ray's own request does not: a stopped process does not answer it."""
        for process in processes:
            try:
                os.kill(process, signal.SIGKILL)
            except OSError:  # it has ended
                continue

    def _look(self, rank: int, process: int) -> dict[str, Any]:
        now = time.monotonic()
        came, beat = self._beats.get(rank, (now, None))
        found = {"stopped_s": 0.0, "still_s": 0.0, "beat": beat, "beat_age_s": now - came}
        stopped, switches = _state(process)
        before = self._samples.get(process)
        self._samples[process] = (now, stopped, switches)
        if before is None or now - before[0] > _LONGEST_GAP_S or not (stopped and before[1]):
            self._stopped_since[process] = now
        if before is None or now - before[0] > _LONGEST_GAP_S or switches < 0 or switches != before[2]:
            self._still_since[process] = now
        return found | {
            "stopped_s": now - self._stopped_since[process],
            "still_s": now - self._still_since[process],
        }


def _state(process: int) -> tuple[bool, int]:
    """Whether a process is stopped, and how often its threads have given up a processor; -1: not known."""
    try:
        with open(f"/proc/{process}/stat") as file:
            stopped = file.read().rpartition(")")[2].split()[0] == "T"
        switches = 0
        for thread in os.listdir(f"/proc/{process}/task"):
            with open(f"/proc/{process}/task/{thread}/status") as file:
                fields = dict(line.split(":", 1) for line in file)
            if fields["State"].split()[0] == "R":  # waits for a processor, if it has none
                return False, -1
            switches += int(fields["voluntary_ctxt_switches"]) + int(fields["nonvoluntary_ctxt_switches"])
        return stopped, switches
    except (OSError, KeyError, IndexError):  # it has ended, which Ray says by itself; or this is no Linux
        return False, -1

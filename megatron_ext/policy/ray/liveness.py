"""Decides twice a second during a call whether a rank is lost, stopped or hung; a busy one may take any time.

    lost      its host answers nothing: it is down or frozen, or its network is cut
    stopped   the operating system does not run the process (SIGSTOP, a frozen container)
    hung      no rank moves, and at least one waits for the others in a collective

Where a rank waits by spinning, as for a collective on a GPU, it looks busy: NCCL's own timeout ends that.
"""

import logging
import os
import re
import signal
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from megatron_ext.policy.ray.heartbeat import PERIOD_S

LOOK_S = 0.5  # seconds between two calls of `fault`; a fault is known at most three calls and a beat after its timeout
_LOG = logging.getLogger(__name__)
_OLD_S = 3.0  # a beat, or a look at a process, that is older says nothing of now


class ActorLocation(NamedTuple):
    """Location of an actor: Ray's id of its node, its host's name, its process."""

    node: str
    host: str
    process: int


class RankReport(NamedTuple):
    """Report of a rank: its process's state in /proc, seconds without a running thread, its last beat and its age."""

    state: str
    still_s: float
    beat: dict[str, Any] | None
    age_s: float


class HostMonitor:
    """Process beside the ranks of a host, which answers also while they are stopped, or hold their interpreter's lock.

    Ray sends its class by value: the process loads no torch.
    """

    def __init__(self, processes: dict[int, int]):
        self._processes = processes
        self._beats: dict[int, tuple[float, dict[str, Any]]] = {}
        self._looks: dict[int, tuple[float, float, int]] = {}  # time of the last one, since when it is still, switches

    def note(self, rank: int, beat: dict[str, Any]) -> None:
        self._beats[rank] = time.monotonic(), beat

    def report(self) -> dict[int, RankReport]:
        return {rank: self._look(rank, process) for rank, process in self._processes.items()}

    def _look(self, rank: int, process: int) -> RankReport:
        now, (state, switches) = time.monotonic(), _threads(process)
        looked, since, before = self._looks.get(rank, (now, now, 0))
        if state in ("", "R", "D") or switches != before or now - looked > _OLD_S:
            since = now
        self._looks[rank] = now, since, switches
        came, beat = self._beats.get(rank, (now, None))
        return RankReport(state, now - since, beat, now - came)

    def end(self, grace_s: float) -> None:
        """Ends the ranks: a stopped one does not hear Ray's request. Of one that ends by itself Ray prints no error."""
        until = time.monotonic() + grace_s
        while time.monotonic() < until and any(_threads(one)[0] not in ("", "Z") for one in self._processes.values()):
            time.sleep(0.05)
        for process in self._processes.values():
            with suppress(OSError):  # it has ended
                os.kill(process, signal.SIGKILL)


def _threads(process: int) -> tuple[str, int]:
    """State of the main thread ("": unknown), and how often all threads have given up a processor, both as of /proc."""
    with suppress(OSError):
        folder = Path(f"/proc/{process}")
        status = [path.read_text() for path in (folder / "status", *folder.glob("task/*/status"))]
        switches = re.findall(r"ctxt_switches:\s*(\d+)", "".join(status[1:]))
        return re.findall(r"State:\s*(\w)", status[0])[0], sum(map(int, switches))
    return "", 0


class Liveness:
    """Liveness of the actors at `places`, by rank. `timeout_s`: how long one may be lost or stopped, or all hung.

    Starts a process on each host, which needs no CPU of Ray's.
    """

    def __init__(self, ray: Any, places: Sequence[ActorLocation], timeout_s: float):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
        monitor = ray.remote(num_cpus=0, max_restarts=-1)(HostMonitor)
        self._ray, self._places, self._timeout_s = ray, places, timeout_s
        self._monitors, self._looked = {}, time.monotonic()
        for node in sorted({place.node for place in places}):
            here = {rank: place.process for rank, place in enumerate(places) if place.node == node}
            there = NodeAffinitySchedulingStrategy(node, soft=False)
            self._monitors[node] = monitor.options(scheduling_strategy=there).remote(here)
        self._asked = {node: monitor.report.remote() for node, monitor in self._monitors.items()}
        self._silent_s: dict[str, float] = {}  # of those that have ever answered, as far as somebody looked
        self._reports: dict[int, RankReport] = {}

    def monitor(self, rank: int) -> Any:
        """The actor that wants the beats of this rank."""
        return self._monitors[self._places[rank].node]

    def fault(self, pending: Collection[int]) -> str | None:
        """Return what is wrong with the ranks that have not answered yet; None: nothing. Does not wait."""
        self._collect()
        for node, silent_s in self._silent_s.items():
            if silent_s >= self._timeout_s and (lost := [r for r in pending if self._places[r].node == node]):
                return (
                    f"host {self._places[lost[0]].host} with ranks {lost} of {len(self._places)} has not answered for "
                    f"{silent_s:.0f} s: it is down or frozen, or its network is cut{self.doing(lost)}"
                )
        reports = {rank: self._reports[rank] for rank in pending if rank in self._reports}
        for rank, report in reports.items():
            if report.still_s >= self._timeout_s:
                how = "stopped (as by SIGSTOP)" if report.state == "T" else "frozen"
                since = f"no thread of it has run for {report.still_s:.0f} s"
                return f"{self._name(rank)} is {how}, {since}; it was {_doing(report)}"
        beats = [report.beat for report in reports.values() if report.beat and report.age_s < _OLD_S]
        idle = len(beats) == len(pending) and all(beat["idle_s"] >= self._timeout_s for beat in beats)
        if idle and any(beat["waits"] for beat in beats) and max(self._silent_s.values()) < _OLD_S:
            return "no rank moves" + self.doing(pending).replace(";", ":", 1)
        return None

    def doing(self, ranks: Collection[int]) -> str:
        """Describe what the ranks did when they told it last: first who does not wait for others, the likely cause."""
        self._collect()
        reports = [(rank, self._reports[rank]) for rank in ranks if rank in self._reports]
        reports.sort(key=lambda item: bool(item[1].beat and item[1].beat["waits"]))
        return "".join(f"; {self._name(rank)} is {_doing(report)}" for rank, report in reports)

    def _name(self, rank: int) -> str:
        place = self._places[rank]
        return f"rank {rank} of {len(self._places)} (host {place.host}, process {place.process})"

    def end(self, grace_s: float = 0.0) -> None:
        """Ends the processes of the actors, also stopped ones, and those on the hosts.

        `grace_s`: how long actors that Ray has asked to end may take to.
        """
        begun = [monitor.end.remote(grace_s) for monitor in self._monitors.values()]
        self._ray.wait(begun, num_returns=len(begun), timeout=grace_s + PERIOD_S)
        for monitor in self._monitors.values():
            self._ray.kill(monitor)

    def _collect(self) -> None:
        """Takes what the hosts have answered, and asks them again."""
        now = time.monotonic()
        passed_s, self._looked = min(now - self._looked, PERIOD_S), now  # less, where this process was stopped itself
        for node, asked in self._asked.items():
            if node in self._silent_s:
                self._silent_s[node] += passed_s
            if self._ray.wait([asked], timeout=0)[0]:
                self._silent_s[node], self._asked[node] = 0.0, self._monitors[node].report.remote()
                try:
                    self._reports |= self._ray.get(asked)
                except self._ray.exceptions.RayError as error:  # Ray starts the monitor again; it tells of a dead host
                    _LOG.warning("the monitor of a host does not answer (%s): its ranks are not watched", error)


def _doing(report: RankReport) -> str:
    if report.beat is None:
        return "in a call of which it has told nothing yet"
    told = report.beat["doing"] + (f", as it told {report.age_s:.0f} s ago" if report.age_s >= _OLD_S else "")
    return told + (f", idle for {report.beat['idle_s']:.0f} s" if report.beat["idle_s"] >= PERIOD_S else "")

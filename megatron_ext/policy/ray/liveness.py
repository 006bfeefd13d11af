"""Asks each host of a group twice a second during a call, and decides whether a rank is lost, stopped or hung.

    lost      its host answers nothing: it is down or frozen, or its network is cut
    stopped   the operating system does not run the process (SIGSTOP, a frozen container)
    hung      no rank moves, and at least one waits for the others in a collective
    busy      anything else: a step may take as long as it likes

Where a rank waits by spinning, as for a collective on a GPU, it looks busy: NCCL's own timeout ends that.
"""

import time
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.policy.ray.heartbeat import PERIOD_S

LOOK_S = 0.5  # seconds between two calls of `fault`; a fault is known at most three calls and a beat after its timeout
_FRESH_S = 3.0  # seconds after which a beat is too old to say what its rank is doing now


@dataclass(frozen=True)
class Whereabouts:
    """Location of an actor: Ray's id of its node, its host's name, its process."""

    node: str
    host: str
    process: int


class Liveness:
    """Liveness of the actors at `places`, by rank. `timeout_s`: how long one may be lost or stopped, or all hung.

    Starts a process on each host, which needs no CPU of Ray's.
    """

    def __init__(self, ray: Any, places: Sequence[Whereabouts], timeout_s: float):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        from megatron_ext.policy.ray import host_monitor

        ray.cloudpickle.register_pickle_by_value(host_monitor)
        monitor = ray.remote(num_cpus=0, max_restarts=0)(host_monitor.HostMonitor)
        self._ray, self._places, self._timeout_s = ray, places, timeout_s
        self._monitors = {
            node: monitor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            for node in sorted({place.node for place in places})
        }
        self._asked = {node: self._ask(node) for node in self._monitors}
        self._silent_s: dict[str, float] = {}  # of those that have ever answered, as far as somebody looked
        self._looked = time.monotonic()
        self._reports: dict[int, dict[str, Any]] = {}

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
                    f"{silent_s:.0f} s: it is down or frozen, or its network is cut{self._told(lost)}"
                )
        reports = {rank: self._reports[rank] for rank in pending if rank in self._reports}
        for rank, report in reports.items():
            if report["still_s"] >= self._timeout_s:
                how = "stopped (as by SIGSTOP)" if report["state"] == "stopped" else "frozen"
                since = f"no thread of it has run for {report['still_s']:.0f} s"
                return f"{self._name(rank)} is {how}, {since}; it was {_doing(report)}"
        if len(reports) == len(pending) and self._hangs(list(reports.values())):
            return "no rank moves" + self._told(pending).replace(";", ":", 1)
        return None

    def doing(self, ranks: Collection[int]) -> str:
        """Describe, for a message, what the ranks were doing when they told it last."""
        self._collect()
        return self._told(ranks)

    def end(self, grace_s: float = 0.0) -> None:
        """Ends the processes of the actors, also stopped ones, and those on the hosts.

        `grace_s`: how long actors that Ray has asked to end may take to.
        """
        begun = [
            monitor.end.remote([place.process for place in self._places if place.node == node], grace_s)
            for node, monitor in self._monitors.items()
        ]
        self._ray.wait(begun, num_returns=len(begun), timeout=grace_s + PERIOD_S)
        for monitor in self._monitors.values():
            self._ray.kill(monitor)

    def _collect(self) -> None:
        """Takes what the hosts have answered, and asks them again."""
        now = time.monotonic()
        passed_s, self._looked = min(now - self._looked, PERIOD_S), now  # less, where this process was stopped itself
        for node, asked in list(self._asked.items()):
            if node in self._silent_s:
                self._silent_s[node] += passed_s
            if not self._ray.wait([asked], timeout=0)[0]:
                continue
            self._silent_s[node] = 0.0
            try:
                self._reports |= self._ray.get(asked)
                self._asked[node] = self._ask(node)
            except self._ray.exceptions.RayError as error:  # that of a host that is down comes from its actors too
                warnings.warn(f"the monitor of a host ended, its ranks are no longer watched: {error}", stacklevel=2)
                for known in (self._monitors, self._asked, self._silent_s):
                    known.pop(node, None)

    def _ask(self, node: str) -> Any:
        here = {rank: place.process for rank, place in enumerate(self._places) if place.node == node}
        return self._monitors[node].report.remote(here)

    def _hangs(self, reports: list[dict[str, Any]]) -> bool:
        return (
            max(self._silent_s.values()) < _FRESH_S
            and all(report["beat"] and report["beat_age_s"] < _FRESH_S for report in reports)
            and all(report["idle_s"] >= self._timeout_s and not report["beat"]["outside"] for report in reports)
            and any(report["beat"]["waits"] for report in reports)
        )

    def _name(self, rank: int) -> str:
        place = self._places[rank]
        return f"rank {rank} of {len(self._places)} (host {place.host}, process {place.process})"

    def _told(self, ranks: Collection[int]) -> str:
        """First who does not wait for others: he is the likely cause."""
        reports = [(rank, self._reports[rank]) for rank in ranks if rank in self._reports]
        reports.sort(key=lambda item: bool((item[1]["beat"] or {}).get("waits")))
        return "".join(f"; {self._name(rank)} is {_doing(report)}" for rank, report in reports)


def _doing(report: Mapping[str, Any]) -> str:
    beat = report["beat"]
    if beat is None:
        return "in a call of which it has told nothing yet"
    told = f"in {beat['call']}, {'waiting for others in' if beat['waits'] else 'at'} {beat['doing']}"
    if beat["outside"] is not None:
        told += f", waiting for {beat['outside']}"
    if report["beat_age_s"] >= _FRESH_S:
        told += f", as it told {report['beat_age_s']:.0f} s ago"
    return told + (f", idle for {report['idle_s']:.0f} s" if report["idle_s"] >= PERIOD_S else "")

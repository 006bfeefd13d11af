"""Polls the actors of a group each half second during a call, and decides whether a rank is dead, stopped or hung.

    stopped   the operating system does not run the process (SIGSTOP, a frozen container)
    hung      no rank moves, and at least one waits for the others in a collective
    busy      anything else: a step may take as long as it likes

Where a rank waits by spinning, as for a collective on a GPU, it looks busy: NCCL's own timeout ends that.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_ext.policy.ray import process_states
from megatron_ext.policy.ray.heartbeat import PERIOD_S

LOOK_S = 0.5  # how often `fault` is asked: a fault is known two or three looks and a beat after its time is over
_FRESH_S = 3.0  # an older beat says nothing of now


@dataclass(frozen=True)
class Whereabouts:
    """Of an actor: Ray's id of its node, its host's name, its process."""

    node: str
    host: str
    process: int


class Liveness:
    """Of the actors at `places`, by rank. `timeout_s` is how long one may be stopped, or all of them hung.

    Starts a process on each host, which needs no CPU of Ray's.
    """

    def __init__(self, ray: Any, places: Sequence[Whereabouts], timeout_s: float):
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        ray.cloudpickle.register_pickle_by_value(process_states)
        monitor = ray.remote(num_cpus=0, max_restarts=0)(process_states.HostMonitor)
        self._ray, self._places, self._timeout_s = ray, places, timeout_s
        self._monitors = {
            node: monitor.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            for node in sorted({place.node for place in places})
        }
        self._asked: dict[str, Any] = {}
        self._reports: dict[int, dict[str, Any]] = {}
        self._hung: dict[int, dict[str, Any]] = {}  # the beats that made them look hung first, by rank

    def monitor(self, rank: int) -> Any:
        """The actor that wants the beats of this rank."""
        return self._monitors[self._places[rank].node]

    def fault(self, pending: Collection[int]) -> str | None:
        """What is wrong with the ranks that have not answered yet, None if nothing is. Does not wait."""
        self._collect()
        reports = {rank: self._reports[rank] for rank in pending if rank in self._reports}
        for rank, report in reports.items():
            for name, told in (("stopped_s", "is stopped (as by SIGSTOP)"), ("still_s", "is frozen, no thread of it")):
                if report[name] >= self._timeout_s:
                    ran = " has run" if name == "still_s" else ""
                    return f"{self._name(rank)} {told}{ran} for {report[name]:.0f} s; it was {_doing(report)}"
        if len(reports) < len(pending):
            return None
        if not self._hangs(list(reports.values())):
            self._hung = {}
            return None
        # A second look, at other beats: one may have been under way while the ranks moved on.
        if not self._hung or any(report["beat"] == self._hung.get(rank) for rank, report in reports.items()):
            self._hung = self._hung or {rank: report["beat"] for rank, report in reports.items()}
            self._reports = {}
            return None
        lines = [f"{self._name(rank)} is {_doing(report)}" for rank, report in self._sorted(reports)]
        return "no rank moves: " + "; ".join(lines)

    def doing(self, ranks: Collection[int]) -> str:
        """What these were doing when they told it last, for a message."""
        self._collect()
        reports = {rank: self._reports[rank] for rank in ranks if rank in self._reports}
        return "".join(f"; {self._name(rank)} is {_doing(report)}" for rank, report in self._sorted(reports))

    def end(self) -> None:
        """Ends the processes of the actors, also stopped ones, and those on the hosts."""
        begun = [
            monitor.end.remote([place.process for place in self._places if place.node == node])
            for node, monitor in self._monitors.items()
        ]
        self._ray.wait(begun, num_returns=len(begun), timeout=PERIOD_S)
        for monitor in self._monitors.values():
            self._ray.kill(monitor)

    def _collect(self) -> None:
        """Takes what the hosts have answered, and asks them again."""
        for node, monitor in list(self._monitors.items()):
            asked = self._asked.get(node)
            if asked is not None:
                if not self._ray.wait([asked], timeout=0)[0]:
                    continue
                try:
                    self._reports |= self._ray.get(asked)
                except self._ray.exceptions.RayError as error:  # that of a lost host comes from its actors too
                    warnings.warn(
                        f"the monitor of a host ended, its ranks are no longer watched: {error}", stacklevel=2
                    )
                    del self._monitors[node]
                    continue
            here = {rank: place.process for rank, place in enumerate(self._places) if place.node == node}
            self._asked[node] = monitor.report.remote(here)

    def _hangs(self, reports: list[dict[str, Any]]) -> bool:
        beats = [report["beat"] for report in reports if report["beat"] and report["beat_age_s"] < _FRESH_S]
        return (
            len(beats) == len(reports) > 0
            and all(beat["idle_s"] >= self._timeout_s and beat["outside"] is None for beat in beats)
            and any(beat["waits"] for beat in beats)
        )

    def _name(self, rank: int) -> str:
        place = self._places[rank]
        return f"rank {rank} of {len(self._places)} (host {place.host}, process {place.process})"

    def _sorted(self, reports: Mapping[int, dict[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
        """First who does not wait for others: he is the likely cause."""
        return sorted(reports.items(), key=lambda item: bool((item[1]["beat"] or {}).get("waits")))


def _doing(report: Mapping[str, Any]) -> str:
    beat = report["beat"]
    if beat is None:
        return "in a call of which it has told nothing yet"
    told = f"in {beat['call']}, {'waiting for others in' if beat['waits'] else 'at'} {beat['doing']}"
    if beat["outside"] is not None:
        told += f", waiting for {beat['outside']}"
    if report["beat_age_s"] >= _FRESH_S:
        told += f", as it told {report['beat_age_s']:.0f} s ago"
    return told + (f", idle for {beat['idle_s']:.0f} s" if beat["idle_s"] >= PERIOD_S else "")

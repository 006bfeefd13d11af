"""Comparison of the orders in which ranks launch operations of several communicators.

Kernels of two communicators that run at once may each hold what the other needs. Two operations have to be launched in
the same order on every rank they share, unless the program waits for the first before it launches the second; and the
orders of more than two communicators must not form a circle.
"""

import warnings
from typing import Any

from megatron_on_cpu.nccl_rules.queues.circles import LaunchCircles, Step, in_words
from megatron_on_cpu.nccl_rules.queues.launches import MADE, Launch

_KEPT = 4096  # parts whose launch is remembered
_UNDER_WAY = 64  # launches that are not waited for and are remembered


class LaunchOrderHazard(RuntimeError):
    """Ranks launched operations of communicators in different orders; on GPUs they may wait for each other."""


class LaunchOrderWarning(UserWarning):
    """Warning of a `LaunchOrderHazard`, given with the order "warn"."""


class LaunchOrder:
    """Operations that rank `rank` has launched, in order; `mode` is "raise", "warn" or "ignore"."""

    def __init__(self, mode: str, rank: int):
        self._mode, self._rank = mode, rank
        self._circles = LaunchCircles(rank)
        self._under_way: dict[int, Launch] = {}  # not waited for, by number
        self._numbers: dict[str, tuple[int, str]] = {}  # by the part's name: its launch's number and description
        self._told: set[tuple[str, ...]] = set()

    def launched(self, launch: Launch) -> LaunchOrderHazard | None:
        """Record a launch. Like `heard` and `compare`, return the hazard if it is to be raised."""
        if self._mode == "ignore" or launch.parts[0].mine == MADE:
            return None
        for other in self._under_way.values():
            if other.communicator is launch.communicator:
                continue
            for part in other.parts:
                for peer in sorted(part.sends.keys() & {peer for mine in launch.parts for peer in mine.sends}):
                    launch.before.setdefault(peer, []).append((other.name(part), other.describe()))
        steps = self._steps(launch)
        self._under_way[launch.number] = launch
        if len(self._under_way) > _UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]
        for part in launch.parts:
            self._numbers[launch.name(part)] = (launch.number, launch.describe())
        while len(self._numbers) > _KEPT:
            del self._numbers[next(iter(self._numbers))]
        return self._learn(self._rank, steps)

    def news(self, peer: int) -> list[Step]:
        """Return the steps that the next message to `peer` carries."""
        return self._circles.news(peer)

    def heard(self, peer: int, header: dict[str, Any]) -> LaunchOrderHazard | None:
        """Take in the steps that a message of `peer` carries."""
        return self._learn(peer, [Step(*step) for step in header["news"]])

    def _steps(self, launch: Launch) -> list[Step]:
        """Return the steps from the last launch under way to `launch`. Earlier launches have steps to that last one."""
        if not self._under_way:
            return []
        other = self._under_way[next(reversed(self._under_way))]
        return [
            Step(self._rank, other.name(part), launch.name(mine), other.describe(), launch.describe())
            for part in other.parts
            for mine in launch.parts
        ]

    def _learn(self, source: int, steps: list[Step]) -> LaunchOrderHazard | None:
        circle = self._circles.learn(source, steps)
        if circle is None:
            return None
        return self._hazard(in_words(circle), tuple(sorted(step.then_described for step in circle)))

    def waited_for(self, launch: Launch) -> None:
        """Forget `launch`, which the program has waited for, and all earlier launches on the same communicator."""
        over = [
            number
            for number, other in self._under_way.items()
            if other.communicator is launch.communicator and number <= launch.number
        ]
        for number in over:
            del self._under_way[number]

    def compare(self, peer: int, header: dict[str, Any], part_name: str) -> LaunchOrderHazard | None:
        """Compare this rank's order with that in the `header` of a message of `peer` for part `part_name`."""
        here = self._numbers.get(f"{header['communicator']} {part_name}")
        for name, theirs in header["before"] if here is not None else ():
            assert here is not None
            earlier = self._numbers.get(name)
            if earlier is not None and earlier[0] < here[0]:
                continue
            text = (
                f"launch order of two communicators: rank {peer} launched {theirs} and, without waiting for it, "
                f"{header['what']}; rank {self._rank} launched first {here[1]}"
                + (f" and then {earlier[1]}" if earlier is not None else ", and the other one not yet")
                + ". On GPUs each may hold what the other needs."
            )
            if (hazard := self._hazard(text, (theirs, here[1]))) is not None:
                return hazard
        return None

    def _hazard(self, text: str, lines: tuple[str, ...]) -> LaunchOrderHazard | None:
        """Return the hazard in the mode "raise"; otherwise warn, once for the same lines, and return None."""
        if self._mode == "raise":
            return LaunchOrderHazard(text)
        if lines not in self._told:
            self._told.add(lines)
            warnings.warn(text, LaunchOrderWarning, stacklevel=2)
        return None

"""Whether two ranks launch operations of two communicators in the same order.

Kernels of two communicators that run at once may each hold what the other needs. Their order has to be the same on
every rank they share, unless the program waits for the first before it launches the second.
"""

import warnings
from typing import Any

from megatron_ext.emulation.nccl_rules.queues.launches import MADE, Launch, Part

_KEPT = 4096  # parts whose launch is remembered
_UNDER_WAY = 64  # launches that are not waited for, likewise


class LaunchOrderHazard(RuntimeError):
    """Two ranks launched operations of two communicators in different orders; on GPUs they may wait for each other."""


class LaunchOrderWarning(UserWarning):
    """What `LaunchOrderHazard` is, as a warning."""


class LaunchOrder:
    """What this rank has launched, and in which order; `mode` is "raise", "warn" or "ignore"."""

    def __init__(self, mode: str):
        self._mode = mode
        self._under_way: dict[int, Launch] = {}  # not waited for, by number
        self._numbers: dict[str, tuple[int, str]] = {}  # of each part: its launch's number and description
        self._told: set[tuple[str, str]] = set()

    def launched(self, launch: Launch) -> None:
        if self._mode == "ignore" or launch.parts[0].mine == MADE:
            return
        for other in self._under_way.values():
            if other.communicator is launch.communicator:
                continue
            for part in other.parts:
                for peer in sorted(part.sends.keys() & {peer for mine in launch.parts for peer in mine.sends}):
                    launch.before.setdefault(peer, []).append((_name(other, part), other.describe()))
        self._under_way[launch.number] = launch
        if len(self._under_way) > _UNDER_WAY:
            del self._under_way[next(iter(self._under_way))]
        for part in launch.parts:
            self._numbers[_name(launch, part)] = (launch.number, launch.describe())
        while len(self._numbers) > _KEPT:
            del self._numbers[next(iter(self._numbers))]

    def waited_for(self, launch: Launch) -> None:
        """It is over for the program, and with it all that was launched before on the same communicator."""
        over = [
            number
            for number, other in self._under_way.items()
            if other.communicator is launch.communicator and number <= launch.number
        ]
        for number in over:
            del self._under_way[number]

    def compare(self, rank: int, peer: int, header: dict[str, Any], part_name: str) -> LaunchOrderHazard | None:
        """`header` is of a part that both ranks have launched. Returns the hazard where it is to be raised."""
        here = self._numbers.get(f"{header['communicator']} {part_name}")
        for name, theirs in header["before"] if here is not None else ():
            assert here is not None
            earlier = self._numbers.get(name)
            if earlier is not None and earlier[0] < here[0]:
                continue
            text = (
                f"launch order of two communicators: rank {peer} launched {theirs} and, without waiting for it, "
                f"{header['what']}; rank {rank} launched first {here[1]}"
                + (f" and then {earlier[1]}" if earlier is not None else ", and the other one not yet")
                + ". On GPUs each may hold what the other needs."
            )
            if self._mode == "raise":
                return LaunchOrderHazard(text)
            lines = (theirs, here[1])
            if lines not in self._told:
                self._told.add(lines)
                warnings.warn(text, LaunchOrderWarning, stacklevel=2)
        return None


def _name(launch: Launch, part: Part) -> str:
    return f"{launch.communicator.name} {part.name}"

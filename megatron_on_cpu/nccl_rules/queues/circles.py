"""Circles of three and more communicators, in the order in which ranks launch operations of them.

Rank 0 launches A and then B, rank 1 B and then C, rank 2 C and then A, and none waits in between: no two ranks differ
in the order of what both launch, and still each kernel may hold what the next one needs. Each rank tells the others
its steps (which operation it launched behind which) in the headers of its later messages, and passes on those of other
ranks. A rank that knows all steps of a circle reports it, at the latest when an operation of all ranks follows.
"""

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

_KEPT = 512  # steps that are remembered


class Step(NamedTuple):
    """A rank launched one operation while another one that it had not waited for was under way."""

    rank: int
    first: str  # names of the operations, see `Launch.name`
    then: str
    first_described: str
    then_described: str


class LaunchCircles:
    """The steps that rank `rank` knows of."""

    def __init__(self, rank: int):
        self._rank = rank
        self._steps: deque[tuple[int, Step]] = deque()  # with the rank that told the step, oldest first
        self._forgotten = 0
        self._told: dict[int, int] = {}  # by peer: the number of steps up to its last `news`
        self._after: dict[str, dict[str, Step]] = {}  # by the first operation, then by the second

    def news(self, peer: int) -> list[Step]:
        """Return the steps added since the last call for `peer`, without those that `peer` took or told."""
        start = max(self._told.get(peer, 0) - self._forgotten, 0)
        self._told[peer] = self._forgotten + len(self._steps)
        new = [self._steps[at] for at in range(start, len(self._steps))]
        return [step for source, step in new if peer not in (source, step.rank)]

    def learn(self, source: int, steps: Iterable[Step]) -> list[Step] | None:
        """Add steps told by rank `source`; return the circle of three or more communicators that they close, or None.

        A circle of messages alone is no hazard: in rings each rank sends to the next one before it receives.
        """
        found = None
        for step in steps:
            if step.then in self._after.get(step.first, {}):
                continue
            self._keep(source, step)
            way = self._way(step.then, step.first)
            if way is not None and _is_hazard([step, *way]):
                found = found or [step, *way]
        return found

    def _keep(self, source: int, step: Step) -> None:
        self._steps.append((source, step))
        self._after.setdefault(step.first, {})[step.then] = step
        if len(self._steps) > _KEPT:
            _, old = self._steps.popleft()
            self._forgotten += 1
            del self._after[old.first][old.then]
            if not self._after[old.first]:
                del self._after[old.first]

    def _way(self, start: str, end: str) -> list[Step] | None:
        """Return the fewest steps that lead from operation `start` to `end`, or None."""
        came_by: dict[str, Step] = {}
        reached = deque([start] if start in self._after else [])
        while reached and end not in came_by:
            for then, step in self._after.get(reached.popleft(), {}).items():
                if then not in came_by:
                    came_by[then] = step
                    reached.append(then)
        if end not in came_by:
            return None
        way = [came_by[end]]
        while way[0].first != start:
            way.insert(0, came_by[way[0].first])
        return way


def _is_hazard(circle: list[Step]) -> bool:
    """Tell whether a circle may hang; only the operations count at which it passes from one rank to another."""
    names = [step.then for step, after in zip(circle, circle[1:] + circle[:1], strict=True) if step.rank != after.rank]
    communicators, channels, _ = zip(*(name.rsplit(" ", 2) for name in names), strict=True)
    return len(set(communicators)) > 2 and "all" in channels


def in_words(circle: list[Step]) -> str:
    steps = "; ".join(
        f"rank {step.rank} launched {step.first_described} and, without waiting for it, {step.then_described}"
        for step in circle
    )
    return f"launch order of communicators goes round: {steps}. On GPUs each may hold what the next one needs."

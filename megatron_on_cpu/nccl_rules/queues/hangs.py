"""Detection of hangs: whether a wait can ever end, from the states of all ranks, and the report of a hang.

A rank describes its state by `progress`, a count that grows with all that it does; `ended`; `threads`, for each thread
that may launch something the launch it waits for, as (communicator, place in its queue), or None for a thread that
runs; `running`, the lines of code at which the running threads are; and `communicators`, for each the launches in its
queue and the number of parts of each channel that have started.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_on_cpu.nccl_rules.queues.launches import Communicator, Part

State = dict[str, Any]
_SHOWN = 4  # launches of a queue
ENDED: State = {"progress": 0, "ended": True, "threads": [], "running": [], "communicators": {}}


def queue_state(communicator: Communicator, arrived: Mapping[tuple[str, str, int], Container[int]]) -> dict[str, Any]:
    """Describe a communicator of this rank; `arrived` has the peers that came, by (communicator, channel, number)."""

    def part_state(part: Part) -> dict[str, Any]:
        came = arrived.get((communicator.name, part.theirs, part.number), ())
        needs = sorted({peer for peer in part.needs if peer not in came} | part.lost)
        return {"mine": part.mine, "theirs": part.theirs, "number": part.number, "needs": needs}

    return {
        "ranks": communicator.ranks,
        "started": communicator.started,
        "queue": [
            {"what": launch.describe(), "parts": [part_state(part) for part in launch.parts]}
            for launch in communicator.queue
        ],
    }


@dataclass(frozen=True)
class Node:
    """A launch in the queue of a rank's communicator, or the rank's program (`communicator` is "")."""

    rank: int
    communicator: str = ""
    place: int = 0


class Waits:
    """The graph of waits between all ranks; a program that runs may launch anything, and so end waits of others."""

    def __init__(self, states: dict[int, State]):
        self._states = states
        self._ends: set[Node] = set()  # nodes that can go on
        nodes = [Node(rank) for rank in states]
        nodes += [
            Node(rank, name, place)
            for rank, state in states.items()
            for name, communicator in state["communicators"].items()
            for place in range(len(communicator["queue"]))
        ]
        while found := {node for node in nodes if node not in self._ends and not self.waits_for(node)}:
            self._ends |= found

    def stuck(self, node: Node) -> bool:
        return node not in self._ends

    def waits_for(self, node: Node) -> list[Node]:
        """Return the nodes that have to go on before `node` does; for the program of a rank that has ended, itself."""
        return [needed for needed in self._needs(node) if needed not in self._ends]

    def _needs(self, node: Node) -> list[Node]:
        state = self._states[node.rank]
        if not node.communicator:
            if state["ended"]:
                return [node]
            waiting = [wait for wait in state["threads"] if wait is not None]
            if len(waiting) < len(state["threads"]) or not waiting:
                return []
            places = [Node(node.rank, name, place) for name, place in waiting]
            return places if all(place not in self._ends for place in places) else []
        if node.place:
            return [Node(node.rank, node.communicator, node.place - 1), *self._meetings(node)]
        return self._meetings(node)

    def _meetings(self, node: Node) -> list[Node]:
        needed = []
        for part in self._states[node.rank]["communicators"][node.communicator]["queue"][node.place]["parts"]:
            for peer in part["needs"]:
                meeting = self._meeting(peer, node.communicator, part["theirs"], part["number"])
                needed += [meeting] if meeting is not None else []
        return needed

    def _meeting(self, peer: int, name: str, channel: str, number: int) -> Node | None:
        """Return the node that must go on before rank `peer` starts part `number` of `channel`; None if none must."""
        state = self._states[peer]
        communicator = state["communicators"].get(name)
        if communicator is not None:
            if communicator["started"].get(channel, 0) > number:
                return None
            for place, launch in enumerate(communicator["queue"]):
                if any(part["mine"] == channel and part["number"] == number for part in launch["parts"]):
                    return Node(peer, name, place - 1) if place else None
        return Node(peer)

    def circle(self, start: Node) -> list[Node]:
        """Return the circle of nodes, each waiting for the next one, that is reached from `start`.

        If the path from `start` leads to a rank that has ended, return the whole path, with this rank last."""
        path: list[Node] = []
        node = start
        while node not in path:
            path.append(node)
            node = self.waits_for(node)[0]
        if node == path[-1]:  # a rank that has ended
            return path
        return path[path.index(node) :]


def stuck_ranks(states: dict[int, State]) -> list[int]:
    waits = Waits(states)
    return [rank for rank in states if waits.stuck(Node(rank))]


def report(states: dict[int, State], start: int) -> str | None:
    """Return why rank `start` waits forever: the circle, then the queues of every rank in it; None if it does not."""
    waits = Waits(states)
    if not waits.stuck(Node(start)):
        return None
    circle = waits.circle(Node(start))
    ranks = sorted({node.rank for node in circle})
    ended = [rank for rank in ranks if states[rank]["ended"]]
    if ended:
        names = " and ".join(f"rank {rank}" for rank in ended)
        lines = [f"hang: {names} ended while others wait for it, which on GPUs would last for good."]
    else:
        lines = ["hang: these ranks wait for each other in a circle, which on GPUs would last for good."]
    for rank in [*ranks, *sorted(set(states) - set(ranks))]:
        if waits.stuck(Node(rank)):
            lines += _describe(rank, states[rank])
    return "\n".join(lines)


def stall(states: dict[int, State], start: int, what: str) -> str:
    """Return a warning that rank `start` waits for `what`, with the lines at which the programs of all ranks are."""
    lines = [
        f"rank {start} has waited for long for {what}. A wait blocks the program here, on a GPU only the current "
        "stream: if another rank waits for a signal of this one over the store or gloo, the program may be right there."
    ]
    for rank, state in sorted(states.items()):
        lines += [f"rank {rank} runs at {place}" for place in state["running"]]
        lines += _describe(rank, state) if state["ended"] or (rank != start and not state["running"]) else []
    return "\n".join(lines)


def _describe(rank: int, state: State) -> list[str]:
    if state["ended"]:
        return [f"rank {rank} has ended"]
    lines = [f"rank {rank}"]
    for name, place in filter(None, state["threads"]):
        launch = state["communicators"][name]["queue"][place]
        lines.append(f"  its program waits for {launch['what']} on communicator {name}")
    for name, communicator in state["communicators"].items():
        queue = communicator["queue"]
        if queue:
            lines.append(
                f"  communicator {name} (ranks {', '.join(map(str, communicator['ranks']))}), in launch order:"
            )
            lines += [f"    {'runs' if not i else 'next'}  {launch['what']}" for i, launch in enumerate(queue[:_SHOWN])]
            lines += [f"    and {len(queue) - _SHOWN} more"] if len(queue) > _SHOWN else []
    return lines

"""Graph of what waits for what on all ranks' GPUs together: a hang is a circle in this graph.

Each rank's program, what it submits in which order, is fixed. So nothing needs to be tried out: every start and every
end of a submission is a node, every rule of CUDA and NCCL is an edge from what comes first to what waits for it, and
the programs run through, whatever the kernels take, if and only if the graph has no circle.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise, product
from typing import NamedTuple

from tests.streams.recording import Message, Submission

Program = Sequence[Submission]


class Rules(NamedTuple):
    """Rules by which a machine runs what is submitted.

    Attributes:
        eager: communicators are made with the groups. Messages between two ranks then take the group's; else one of
            the pair, and the first use of each communicator blocks the hosts of its ranks until all are there.
        queues: hardware queues (CUDA_DEVICE_MAX_CONNECTIONS), over which streams are spread. Each starts its entries in
            the order of submission, of whatever stream they are.
        rendezvous: nothing of a message is buffered: who sends waits for who receives, and a collective ends only when
            all its ranks have begun it. Else who has nothing to receive is done at once.
        one_at_a_time: a rank begins nothing before all that it was given before has ended, as if each kernel of NCCL
            took the whole GPU. Stricter than any machine.
    """

    eager: bool
    queues: int
    rendezvous: bool
    one_at_a_time: bool = False


EVERY = [Rules(*combination) for combination in product((False, True), (1, 8, 32), (False, True))]
STRICTEST = [rules for rules in EVERY if rules.queues == 1 and rules.rendezvous]
ONE_AT_A_TIME = [rules._replace(one_at_a_time=True) for rules in STRICTEST]


class Hang(AssertionError):
    """The programs wait for each other in a circle, or do not fit each other."""


def communicator(message: Message, rank: int, rules: Rules) -> tuple:
    if message.to_one_rank and not rules.eager:
        return (message.group, *sorted((rank, message.peer)))
    return (message.group,)


def check(programs: Sequence[Program], rules: Rules) -> None:
    """Raises Hang, which names each rank's line in the circle, if the programs of all ranks cannot run through."""
    graph = _Graph(programs, rules)
    circle = graph.circle()
    if circle:
        lines = "\n".join(f"  {graph.text(node)} waits for {graph.text(before)}" for node, before in circle)
        raise Hang(f"{rules}: these wait for each other\n{lines}")


class _Graph:
    """Nodes are (rank, number of the submission, moment); a submission's moments are when the host begins with it and
    has submitted it, when it starts on the GPU and when it ends."""

    def __init__(self, programs: Sequence[Program], rules: Rules):
        self.programs, self.rules = programs, rules
        self.before: dict[tuple[int, int, str], list[tuple[int, int, str]]] = defaultdict(list)
        for rank, program in enumerate(programs):
            self._on_one_rank(rank, program)
        self._between_ranks()

    def _on_one_rank(self, rank: int, program: Program) -> None:
        streams: dict[object, int] = {}
        last_of_stream: dict[object, int] = {}
        last_of_queue: dict[int, int] = {}
        for at, one in enumerate(program):
            begun, submitted, start, end = ((rank, at, moment) for moment in ("begun", "submitted", "start", "end"))
            self.before[submitted].append(begun)
            self.before[start].append(submitted)
            self.before[end].append(start)
            if at:
                self.before[begun].append((rank, at - 1, "submitted"))
            if one.what == "host wait":
                self.before[submitted] += [(rank, other, "end") for other in one.after]
                continue
            stream = communicator(one.message, rank, self.rules) if one.message else one.stream
            queue = streams.setdefault(stream, len(streams)) % self.rules.queues
            self.before[start] += [(rank, other, "end") for other in one.after]
            if stream in last_of_stream:
                self.before[start].append((rank, last_of_stream[stream], "end"))
            if queue in last_of_queue:
                moment = "end" if self.rules.one_at_a_time else "start"
                self.before[start].append((rank, last_of_queue[queue], moment))
            last_of_stream[stream] = last_of_queue[queue] = at

    def _between_ranks(self) -> None:
        first: dict[tuple, dict[int, int]] = defaultdict(dict)
        collectives: dict[tuple, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
        one_way: dict[tuple, dict[str, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
        for rank, program in enumerate(self.programs):
            for at, one in enumerate(program):
                if one.message is None:
                    continue
                message, key = one.message, communicator(one.message, rank, self.rules)
                first[key].setdefault(rank, at)
                if message.to_one_rank:
                    ends = (rank, message.peer) if message.kind == "send" else (message.peer, rank)
                    one_way[key, ends][message.kind].append((rank, at))
                else:
                    collectives[key][rank].append(at)
        if not self.rules.eager:
            for places in first.values():
                for rank, other in product(places, places):
                    if rank != other:
                        self.before[rank, places[rank], "submitted"].append((other, places[other], "begun"))
        for (_, ends), both in one_way.items():
            self._pairs(ends, both["send"], both["receive"])
        for (group, *_), found in collectives.items():
            self._collectives(group, found)

    def _pairs(self, ends: tuple[int, int], sends: list[tuple[int, int]], receives: list[tuple[int, int]]) -> None:
        if len(sends) != len(receives):
            raise Hang(f"rank {ends[0]} sends {len(sends)} messages to rank {ends[1]}, which receives {len(receives)}")
        for send, receive in zip(sends, receives, strict=True):
            sizes = [self.programs[rank][at].message.nbytes for rank, at in (send, receive)]
            if sizes[0] != sizes[1]:
                raise Hang(f"{self.text((*send, 'start'))} has {sizes[0]} bytes, what receives it {sizes[1]}")
            self.before[*receive, "end"].append((*send, "start"))
            if self.rules.rendezvous:
                self.before[*send, "end"].append((*receive, "start"))

    def _collectives(self, group: tuple[str, tuple[int, ...]], found: dict[int, list[int]]) -> None:
        ranks = group[1]
        counts = {rank: len(found[rank]) for rank in ranks}
        if len(set(counts.values())) != 1:
            raise Hang(f"the ranks of group {group} launch different numbers of collectives: {counts}")
        for together in zip(*(found[rank] for rank in ranks), strict=True):
            entries = dict(zip(ranks, together, strict=True))
            messages = {rank: self.programs[rank][at].message for rank, at in entries.items()}
            if len({(message.kind, message.peer, message.nbytes) for message in messages.values()}) != 1:
                texts = ", ".join(self.text((rank, at, "start")) for rank, at in entries.items())
                raise Hang(f"these meet in one collective: {texts}")
            for rank, other in product(ranks, ranks):
                if rank != other and (self.rules.rendezvous or _needs(messages[rank], rank, other)):
                    self.before[rank, entries[rank], "end"].append((other, entries[other], "start"))

    def circle(self) -> list[tuple]:
        """(node, what it waits for) around a circle; empty if there is none."""
        after, left = defaultdict(list), {}
        for node, earlier in self.before.items():
            left[node] = len(earlier)
            for other in earlier:
                after[other].append(node)
        free = [node for node in after if not self.before.get(node)]
        while free:
            for node in after[free.pop()]:
                left[node] -= 1
                if not left[node]:
                    free.append(node)
        node = next((node for node, count in left.items() if count), None)
        if node is None:
            return []
        path = [node]
        while True:
            path.append(next(other for other in self.before[path[-1]] if left.get(other)))
            if path[-1] in path[:-1]:
                path = path[path.index(path[-1]) :]
                return list(pairwise(path))

    def text(self, node: tuple[int, int, str]) -> str:
        rank, at, moment = node
        one = self.programs[rank][at]
        what = one.what
        if one.message is not None:
            peer = f" {one.message.peer}" if one.message.peer >= 0 else ""
            what = f"{one.message.kind}{peer} in group {one.message.group[0]}"
        return f"rank {rank} #{at} {what} ({moment}) at {one.line}"


def _needs(message: Message, rank: int, other: int) -> bool:
    """Return whether a collective cannot end on `rank` before `other` has begun it, although messages are buffered."""
    if message.kind == "broadcast":
        return other == message.peer
    return rank == message.peer if message.kind == "reduce" else True

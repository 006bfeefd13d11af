"""Program of each stage of a pipeline: passes and launches in an order with which no machine makes the stages hang.

There is one order for all passes and all messages of the pipeline, and each stage's program is its part of it. Whatever
waits, waits for something that comes earlier in this order, and all stages of a message launch it at the same place. So
the earliest entry that has not ended can always run: every stage of it has ended all its earlier entries. This needs no
queue of its own for any stream, no buffer for any message and no communicator of its own for any kind of message; it
holds even where a stage does a single thing at a time.

Passes stand in the order in which they end in the simulation (`pass_order`), and a message stands where its last source
has ended. A stage that has a pass under way at that time has launched its part of the message before that pass, so that
the message need not wait for its end.
"""

import heapq
from functools import lru_cache

from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import Run, Times, pass_order
from megatron_ext.experimental.pipeline_vocabulary.order.passes import (
    Exchange,
    Pass,
    Sent,
    Shape,
    members,
    needed,
    sources,
)

Entry = Pass | Exchange


@lru_cache(maxsize=8)
def stage_programs(shape: Shape, times: Times) -> tuple[tuple[Entry, ...], ...]:
    """Return each stage's program, for passes and messages that take about as long as `times` says."""
    programs: list[list[Entry]] = [[] for _ in range(shape.stages)]
    for stages, entry in joint_order(shape, pass_order(shape, times)):
        for stage in stages:
            programs[stage].append(entry)
    return tuple(map(tuple, programs))


def joint_order(shape: Shape, runs: tuple[tuple[Run, ...], ...]) -> list[tuple[tuple[int, ...], Entry]]:
    """Put all passes and exchanges of a simulated step into one order, each with its stages."""
    urgency = {kind: rank for rank, kind in enumerate(Sent)}
    passes = [(line % shape.stages, run.what) for line, found in enumerate(runs) for run in found]
    waits_for = {(stage, what): list(needed(stage, what, shape)) for stage, what in passes}
    missing = {one: len(sources(one, shape)) for exchanges in waits_for.values() for one in exchanges}
    feeds: dict[tuple[int, Pass], list[Exchange]] = {}
    for one in sorted(missing, key=lambda one: urgency[one.kind]):
        for source in sources(one, shape):
            feeds.setdefault(source, []).append(one)
    order: list[tuple[tuple[int, ...], Entry]] = []
    lines = [iter(line) for line in runs]
    ends = [(run.end, -number, run.what) for number, line in enumerate(lines) for run in [next(line)]]
    heapq.heapify(ends)
    put_off = []  # entries that end at the same moment as a pass that they wait for
    while ends:
        entry = heapq.heappop(ends)
        number, what = -entry[1], entry[2]
        stage = number % shape.stages
        if any(missing[one] for one in waits_for[stage, what]):
            put_off.append(entry)
            continue
        order.append(((stage,), what))
        for one in feeds.get((stage, what), ()):
            missing[one] -= 1
            if not missing[one]:
                order.append((members(one, shape), one))
        for run in lines[number]:
            heapq.heappush(ends, (run.end, -number, run.what))
            break
        for entry in put_off:
            heapq.heappush(ends, entry)
        put_off.clear()
    if put_off:
        raise ValueError(f"the passes {[what for *_, what in put_off]} wait for passes that come after them")
    return order

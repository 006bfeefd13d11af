"""The order in which each pipeline stage runs its passes where all stages share embedding and lm head.

Layers run as in Megatron's one-forward-one-backward schedule, plain or interleaved, with `extra` forward passes more
before the first backward: while a micro-batch's loss is on its way through all stages, the last stage has the forward
pass of the next one to do. The passes of the vocabulary layers go wherever a simulation with given durations finds a
stage free for them. Every stage computes the same order from the same numbers, so nothing is communicated.

The idea of sharing both vocabulary layers over the stages, and of hiding their passes in the schedule, is that of
Yeung, Qi, Lin and Wan, "Balancing Pipeline Parallelism with Vocabulary Parallelism" (arXiv 2411.05288). Theirs is a
repeated pattern of passes; this is a list schedule.
"""

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import NamedTuple

from megatron_ext.experimental.pipeline_vocabulary.order.passes import Kind, Pass, Sent, Shape, needed, sources


class Times(NamedTuple):
    """Durations of passes and messages, in any unit.

    Attributes:
        forward, backward: of the layers, `[stage][chunk]`.
        lookup, products, weight, rows: of the vocabulary layers, on each stage.
        send: activations or gradients from stage to stage.
        tokens, embedding: token ids to all stages; the embedding's sum on the first stage.
        hidden, statistics, sum: hidden states to all stages; the statistics' exchange; the sum of dx on the last stage.
        grad_loss, grad_embedding: the losses' gradient to all stages; that of the embedding.
    """

    forward: tuple[tuple[float, ...], ...]
    backward: tuple[tuple[float, ...], ...]
    lookup: float = 0.0
    products: float = 0.0
    weight: float = 0.0
    rows: float = 0.0
    send: float = 0.0
    tokens: float = 0.0
    embedding: float = 0.0
    hidden: float = 0.0
    statistics: float = 0.0
    sum: float = 0.0
    grad_loss: float = 0.0
    grad_embedding: float = 0.0


class Run(NamedTuple):
    """One pass in a simulation's timeline."""

    what: Pass
    start: float
    end: float


class NoOrder(ValueError):
    """Failure to find an order in which all passes can run."""


Needs = Callable[[int, Pass], Iterable[tuple[int, Pass, float]]]  # (stage, pass, delay after its end)

# Of several ready passes a stage first runs those that other stages wait for. Even the last of these comes before the
# next forward pass, so that no more than one additional micro-batch is in flight.
_MOST_URGENT_FIRST = (
    Kind.RESULT,
    Kind.TOKENS,
    Kind.LOOKUP,
    Kind.PRODUCTS,
    Kind.LOSS,
    Kind.BACKWARD,
    Kind.ROWS,
    Kind.WEIGHT,
)
_RANK = {kind: rank for rank, kind in enumerate((*_MOST_URGENT_FIRST, Kind.FORWARD))}
_WORTH_A_PASS = 0.003
_HELD = 2  # micro-batches whose exponentials a stage keeps


def pass_order(shape: Shape, times: Times) -> tuple[tuple[Run, ...], ...]:
    """Find each stage's passes in their order, with simulated times, for the best number of extra forward passes. A
    stage keeps the activations of each, so one more has to shorten the step by more than `_WORTH_A_PASS`.

    If RESULT runs beside the passes, as many lines follow with the passes that each stage runs there.

    Raises:
        NoOrder: in an interleaved schedule the micro-batches left after whole groups wait for later ones.
    """
    needs, duration = pass_needs(shape, times), pass_duration(times)
    found = [simulate(queues_of(shape, extra), needs, duration) for extra in range(1, most_extra(shape) + 1)]
    limit = min(map(length, found)) * (1 + _WORTH_A_PASS)
    return next(runs for runs in found if length(runs) <= limit)


def most_extra(shape: Shape) -> int:
    """Return the most extra forward passes that are tried: one micro-batch in all chunks.

    If RESULT is a pass like others it waits for the pass under way, on some stage for a whole backward pass, and the
    losses of all stages wait for it. Without interleaving a second micro-batch gives the last stage work meanwhile.
    """
    if shape.forward_only:
        return 1
    return shape.chunks if shape.beside else max(2, shape.chunks)


def queues_of(shape: Shape, extra: int) -> list[list[list[Pass]]]:
    """Return the queues of each line in `pass_order`."""
    queues = [stage_queues(stage, shape, extra) for stage in range(shape.stages)]
    return queues + [[[Pass(Kind.RESULT, n) for n in range(shape.micro_batches)]] for _ in queues if shape.beside]


def worker(stage: int, kind: Kind, shape: Shape) -> int:
    """Return the line in `pass_order` in which a stage runs passes of a kind."""
    return stage + shape.stages if shape.beside and kind is Kind.RESULT else stage


def length(runs: Sequence[Sequence[Run]]) -> float:
    """Return the time at which the last pass of a timeline ends."""
    return max(stage[-1].end for stage in runs)


def layer_order(stage: int, shape: Shape, extra: int) -> list[Pass]:
    """List a stage's forward and backward passes of layers: Megatron's order, with `extra` forward passes in front."""
    last_stage_first = 2 if shape.chunks > 1 else 1
    total = shape.micro_batches * shape.chunks
    warmup = (shape.stages - stage - 1) * last_stage_first + (shape.chunks - 1) * shape.group + extra
    warmup = total if shape.forward_only else min(total, warmup)
    turns = [
        (micro_batch, chunk)
        for start in range(0, shape.micro_batches, shape.group)
        for chunk in range(shape.chunks)
        for micro_batch in range(start, min(start + shape.group, shape.micro_batches))
    ]
    forward = [Pass(Kind.FORWARD, micro_batch, chunk) for micro_batch, chunk in turns]
    order = forward[:warmup]
    if shape.forward_only:
        return order
    for at, (micro_batch, chunk) in enumerate(turns):
        order += forward[warmup + at : warmup + at + 1]
        order.append(Pass(Kind.BACKWARD, micro_batch, shape.chunks - 1 - chunk))
    return order


def simulate(
    queues: Sequence[Sequence[Sequence[Pass]]], needs: Needs, duration: Callable[[int, Pass], float]
) -> tuple[tuple[Run, ...], ...]:
    """Make a timeline for each stage, which runs the passes of each queue in order, the most urgent ready one first.

    No pass is begun that would end after a RESULT is known to be ready: all stages' backward passes wait for it.
    """
    waiting = [[list(reversed(queue)) for queue in stage] for stage in queues]
    ends: dict[tuple[int, Pass], float] = {}
    ready_at: dict[tuple[int, Pass], float] = {}
    missing: dict[tuple[int, Pass], int] = {}  # how many passes that it waits for have no end yet
    waiting_for: dict[tuple[int, Pass], list[tuple[tuple[int, Pass], float]]] = {}
    free_at = [0.0] * len(queues)
    runs: list[list[Run]] = [[] for _ in queues]
    moments = [(0.0, stage) for stage in range(len(queues))]  # when a stage looks for a pass to run

    def look_at(first: tuple[int, Pass]) -> None:
        """Find when the inputs of the pass are there, or which passes it still waits for."""
        at, count = 0.0, 0
        for source_stage, source, delay in needs(*first):
            end = ends.get((source_stage, source))
            if end is None:
                waiting_for.setdefault((source_stage, source), []).append((first, delay))
                count += 1
            elif end + delay > at:
                at = end + delay
        ready_at[first], missing[first] = at, count
        if not count:
            heapq.heappush(moments, (at, first[0]))

    while moments:
        now, stage = heapq.heappop(moments)
        if free_at[stage] > now:
            continue
        found, result_at = None, math.inf
        for queue in waiting[stage]:
            if not queue:
                continue
            first = stage, queue[-1]
            if first not in missing:
                look_at(first)
            at = math.inf if missing[first] else ready_at[first]
            if at <= now and (found is None or _RANK[queue[-1].kind] < _RANK[found[-1].kind]):
                found = queue
            elif queue[-1].kind is Kind.RESULT:
                result_at = at
        if found is None or result_at < now + duration(stage, found[-1]):
            continue
        what = found.pop()
        end = now + duration(stage, what)
        free_at[stage] = ends[stage, what] = end
        runs[stage].append(Run(what, now, end))
        heapq.heappush(moments, (end, stage))
        for other, delay in waiting_for.pop((stage, what), ()):
            ready_at[other] = max(ready_at[other], end + delay)
            missing[other] -= 1
            if not missing[other]:
                heapq.heappush(moments, (ready_at[other], other[0]))
    left = [queue[-1] for stage in waiting for queue in stage if queue]
    if left:
        raise NoOrder(f"the passes {left} wait for each other: no order can run them")
    return tuple(tuple(stage) for stage in runs)


def stage_queues(stage: int, shape: Shape, extra: int) -> list[list[Pass]]:
    """Return a stage's passes as queues: its layers, and each kind of pass of the vocabulary layers."""
    micro_batches = range(shape.micro_batches)
    layers = []
    for what in layer_order(stage, shape, extra):
        if what.kind is Kind.FORWARD and shape.is_front(stage, what):
            # The next micro-batch's ids are on their way while this one's layers run.
            ahead = what.micro_batch + 1
            layers += [Pass(Kind.TOKENS, 0)] if ahead == 1 else []
            layers += [Pass(Kind.TOKENS, ahead)] if ahead < shape.micro_batches else []
        if what.kind is Kind.BACKWARD and shape.is_back(stage, what):
            layers.append(Pass(Kind.LOSS, what.micro_batch))
        layers.append(what)
    queues = [layers, [Pass(Kind.LOOKUP, n) for n in micro_batches], [Pass(Kind.PRODUCTS, n) for n in micro_batches]]
    if not shape.beside:
        queues.append([Pass(Kind.RESULT, n) for n in micro_batches])
    if not shape.forward_only:
        queues += [[Pass(Kind.WEIGHT, n) for n in micro_batches], [Pass(Kind.ROWS, n) for n in micro_batches]]
    elif stage == shape.stages - 1:
        queues.append([Pass(Kind.LOSS, n) for n in micro_batches])
    return queues


def pass_duration(times: Times) -> Callable[[int, Pass], float]:
    """Make the function that gives a stage's duration of a pass."""
    same = {
        Kind.LOOKUP: times.lookup,
        Kind.PRODUCTS: times.products,
        Kind.WEIGHT: times.weight,
        Kind.ROWS: times.rows,
    }

    def duration(stage: int, what: Pass) -> float:
        if what.kind is Kind.FORWARD:
            return times.forward[stage][what.chunk]
        return times.backward[stage][what.chunk] if what.kind is Kind.BACKWARD else same.get(what.kind, 0.0)

    return duration


def message_times(times: Times) -> dict[Sent, float]:
    """Return each exchange's duration, counted from when all of its tensors are there."""
    return {
        Sent.FORWARD: times.send,
        Sent.BACKWARD: times.send,
        Sent.HIDDEN: times.hidden,
        Sent.STATISTICS: times.statistics,
        Sent.SUM: times.sum,
        Sent.TOKENS: times.tokens,
        Sent.EMBEDDING: times.embedding,
        Sent.GRAD_LOSS: times.grad_loss,
        Sent.GRAD_EMBEDDING: times.grad_embedding,
        Sent.GRAD_FURTHER: times.grad_embedding,
    }


def pass_needs(shape: Shape, times: Times) -> Needs:
    """Return the passes that each pass waits for, and the duration of the message between."""
    takes = message_times(times)

    @cache
    def needs(stage: int, what: Pass) -> list[tuple[int, Pass, float]]:
        found = [
            (worker(source_stage, source.kind, shape), source, takes[exchange.kind])
            for exchange in needed(stage, what, shape)
            for source_stage, source in sources(exchange, shape)
        ]
        if what.kind is Kind.LOSS and shape.forward_only:
            found.append((worker(stage, Kind.RESULT, shape), Pass(Kind.RESULT, what.micro_batch), 0.0))
        elif what.kind is Kind.PRODUCTS and what.micro_batch >= _HELD and not shape.forward_only:
            found.append((stage, Pass(Kind.WEIGHT, what.micro_batch - _HELD), 0.0))
        elif what.kind is Kind.BACKWARD and shape.is_back(stage, what):
            found.append((stage, Pass(Kind.LOSS, what.micro_batch), 0.0))
        return found

    return needs

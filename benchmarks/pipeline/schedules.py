"""Timelines of one case under each schedule.

`megatron_ext.experimental.pipeline_vocabulary.order.pass_order` makes our timelines, and the order of layers in all of
them. In Megatron's own schedules embedding and head are part of the first and last passes of layers: their passes stand
directly beside these in the same queue.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from benchmarks.pipeline.costs import Setup
from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import (
    Kind,
    Pass,
    Run,
    Shape,
    Times,
    layer_order,
    length,
    pass_duration,
    pass_needs,
    pass_order,
    simulate,
    stage_queues,
)

Layers = tuple[tuple[int, ...], ...]  # [stage][chunk]


class Stage(NamedTuple):
    """Memory that one rank of a stage holds."""

    state_bytes: float
    in_flight: float  # micro-batches' activations of all its layers at once, at most
    activation_bytes: float  # the head's included


@dataclass(frozen=True)
class Timeline:
    """A simulated step."""

    setup: Setup
    runs: tuple[tuple[Run, ...], ...]
    layers: Layers
    shared: bool  # all stages share embedding and head
    sent_bytes: float  # by one rank for one micro-batch

    @property
    def seconds(self) -> float:
        return length(self.runs)

    @property
    def busy_seconds(self) -> list[float]:
        """Return the seconds for which each stage computes in a step."""
        return [sum(run.end - run.start for run in line) for line in self.runs]

    @property
    def bubble(self) -> float:
        """Return the fraction of the step in which a stage computes nothing, averaged over all stages."""
        return 1 - sum(self.busy_seconds) / (len(self.runs) * self.seconds)

    @property
    def link_load(self) -> float:
        """Return the fraction of the step in which a rank's link sends."""
        return self.sent_bytes * self.setup.micro_batches / self.setup.link.bytes_per_s / self.seconds

    @property
    def stages(self) -> list[Stage]:
        return [self._stage(at) for at in range(len(self.runs))]

    def _stage(self, stage: int) -> Stage:
        setup, last = self.setup, len(self.runs) - 1
        shares = 2 / len(self.runs) if self.shared else (stage == 0) + (stage == last)
        layers = sum(self.layers[stage])
        parameters = setup.parameters(layers, shares)
        of_layer = setup.layer_activation_bytes
        of_head = setup.head_activation_bytes(setup.ranks if self.shared else setup.tensor_parallel)
        peak = _peak(self.runs[stage], lambda what: self.layers[stage][what.chunk] * of_layer, of_head)
        in_flight = _peak(self.runs[stage], lambda what: self.layers[stage][what.chunk], 0.0) / max(1, layers)
        return Stage(setup.state_bytes(parameters), in_flight, peak)


def _peak(line: Iterable[Run], of_layers: Callable[[Pass], float], of_head: float) -> float:
    """Return the peak of bytes that live from the beginning of a forward pass to the end of its backward pass."""
    changes = []
    for what, start, end in line:
        if what.kind in (Kind.FORWARD, Kind.PRODUCTS):
            changes.append((start, 1, of_layers(what) if what.kind is Kind.FORWARD else of_head))
        elif what.kind in (Kind.BACKWARD, Kind.WEIGHT):
            changes.append((end, 0, -(of_layers(what) if what.kind is Kind.BACKWARD else of_head)))
    alive = most = 0.0
    for *_, change in sorted(changes):
        alive += change
        most = max(most, alive)
    return most


def even(setup: Setup, chunks: int) -> Layers:
    return ((setup.model.layers // (setup.stages * chunks),) * chunks,) * setup.stages


def stock(setup: Setup, layers: Layers) -> Timeline:
    """Simulate Megatron's 1F1B, interleaved where stages have several chunks."""
    chunks, last = len(layers[0]), setup.stages - 1
    shape = setup.shape(chunks)
    head = setup.head_seconds(setup.tensor_parallel)
    per_layer = setup.layer_seconds
    times = Times(
        forward=tuple(tuple(n * per_layer for n in stage) for stage in layers),
        backward=tuple(tuple(2 * n * per_layer for n in stage) for stage in layers),
        lookup=setup.lookup_seconds,
        products=head.statistics,
        weight=head.product + head.weight,
        rows=setup.rows_seconds(setup.tensor_parallel),
        send=setup.message(setup.slice_bytes),
    )
    of_ours = pass_needs(shape, times)

    def needs(stage: int, what: Pass) -> Iterable[tuple[int, Pass, float]]:
        """Return only those needs in which layers wait for layers."""
        return [one for one in of_ours(stage, what) if {what.kind, one[1].kind} <= {Kind.FORWARD, Kind.BACKWARD}]

    def queue(stage: int) -> Iterator[Pass]:
        for what in layer_order(stage, shape, extra=0):
            if (what.kind, stage, what.chunk) == (Kind.FORWARD, 0, 0):
                yield Pass(Kind.LOOKUP, what.micro_batch)
            if (what.kind, stage, what.chunk) == (Kind.BACKWARD, last, chunks - 1):
                yield Pass(Kind.WEIGHT, what.micro_batch)
            yield what
            if (what.kind, stage, what.chunk) == (Kind.FORWARD, last, chunks - 1):
                yield Pass(Kind.PRODUCTS, what.micro_batch)
            if (what.kind, stage, what.chunk) == (Kind.BACKWARD, 0, 0):
                yield Pass(Kind.ROWS, what.micro_batch)

    runs = simulate([[list(queue(stage))] for stage in range(setup.stages)], needs, pass_duration(times))
    return Timeline(setup, runs, layers, shared=False, sent_bytes=chunks * setup.stock_sent_bytes)


def ours(setup: Setup, chunks: int, one_queue: bool = False) -> Timeline:
    """Simulate our schedule. `one_queue`: CUDA_DEVICE_MAX_CONNECTIONS is 1, and nothing runs beside the passes."""
    runs = pass_order(setup.shape(chunks)._replace(beside=not one_queue), setup.times(chunks))[: setup.stages]
    sent = chunks * setup.stock_sent_bytes + setup.our_extra_sent_bytes
    return Timeline(setup, runs, even(setup, chunks), shared=True, sent_bytes=sent)


def redistributed(setup: Setup, chunks: int) -> Timeline:
    """Simulate Megatron's schedule with the best redistribution of whole layers that a search finds.

    The search begins with each number of layers on the last stage and the rest spread evenly. It moves one layer at a
    time from one of the fullest stages to the stage where the step becomes shortest, until no move shortens the step.
    """
    found = [_improved(stock(setup, layers)) for layers in _starts(setup, chunks)]
    return min(found, key=lambda timeline: timeline.seconds)


def _starts(setup: Setup, chunks: int) -> Iterator[Layers]:
    each, left = setup.model.layers // (setup.stages * chunks), setup.model.layers % (setup.stages * chunks)
    assert left == 0, "the cases' layers divide evenly"
    yield even(setup, chunks)
    cells = [(stage, chunk) for chunk in range(chunks) for stage in range(setup.stages)]
    for on_last in range(each):
        moved, counts = each - on_last, dict.fromkeys(cells, each)
        counts[setup.stages - 1, chunks - 1] = on_last
        others = [cell for cell in cells if cell[0] not in (0, setup.stages - 1)] or [cells[0]]
        for at in range(moved):
            counts[others[at * len(others) // moved]] += 1
        yield tuple(tuple(counts[stage, chunk] for chunk in range(chunks)) for stage in range(setup.stages))


def _improved(best: Timeline) -> Timeline:
    while True:
        busy = best.busy_seconds
        fullest = busy.index(max(busy))
        moved = [stock(best.setup, layers) for layers in _moves(best.layers, fullest)]
        shorter = min(moved, key=lambda timeline: timeline.seconds, default=best)
        if shorter.seconds >= best.seconds:
            return best
        best = shorter


def _moves(layers: Layers, source: int) -> Iterator[Layers]:
    """Yield each move of one layer from the fullest chunk of `source` to the emptiest chunk of another stage."""
    giver = max(range(len(layers[source])), key=layers[source].__getitem__)
    if layers[source][giver] == 0:
        return
    for target in range(len(layers)):
        if target == source:
            continue
        taker = min(range(len(layers[target])), key=layers[target].__getitem__)
        made = [list(stage) for stage in layers]
        made[source][giver] -= 1
        made[target][taker] += 1
        yield tuple(map(tuple, made))


def paper(setup: Setup, algorithm: int) -> Timeline:
    """Simulate the vocabulary parallelism of arXiv 2411.05288, head and embedding in all stages, by algorithm 1 or 2.

    Both exchange the statistics in three all-reduces. Algorithm 2 multiplies exponentials and weight before the
    exchange, as ours does, and has one micro-batch more in flight than 1F1B. Algorithm 1 multiplies afterwards, for dx
    and dW in one pass, and has two more. Products and elementwise work take the same times as ours, and the embedding
    is ours. The passes are placed by our list schedule instead of the paper's repeated pattern.
    """
    shape, times = setup.shape(1), setup.times(1)
    statistics = 3 * 2 * setup.collective(4 * setup.tokens)
    sent = setup.stock_sent_bytes + setup.our_extra_sent_bytes - setup.statistics_bytes + 3 * 2 * 4 * setup.tokens
    if algorithm == 2:
        runs = pass_order(shape, times._replace(statistics=statistics))[: setup.stages]
    else:
        head = setup.head_seconds(setup.ranks)
        times = times._replace(products=head.statistics, weight=head.product + head.weight, statistics=statistics)
        runs = _two_barriers(shape, times)
    return Timeline(setup, runs, even(setup, 1), shared=True, sent_bytes=sent)


def _two_barriers(shape: Shape, times: Times) -> tuple[tuple[Run, ...], ...]:
    """Simulate algorithm 1, in which the backward pass waits for every stage's second pass of the head."""
    last = shape.stages - 1
    of_ours = pass_needs(shape, times._replace(sum=0.0))

    def needs(stage: int, what: Pass) -> Iterable[tuple[int, Pass, float]]:
        if what.kind is Kind.BACKWARD and stage == last:
            return [(other, Pass(Kind.WEIGHT, what.micro_batch), times.sum) for other in range(shape.stages)]
        if what.kind is Kind.WEIGHT:
            return [(last, Pass(Kind.LOSS, what.micro_batch), times.grad_loss)]
        if what.kind is Kind.PRODUCTS:
            return [(last, Pass(Kind.FORWARD, what.micro_batch), times.hidden)]
        return of_ours(stage, what)

    queues = []
    for stage in range(shape.stages):
        layers, *others = stage_queues(stage, shape, extra=2)
        losses = [what for what in layers if what.kind is Kind.LOSS]
        queues.append([[what for what in layers if what.kind is not Kind.LOSS], losses, *others])
    results = [[[Pass(Kind.RESULT, n) for n in range(shape.micro_batches)]] for _ in queues]
    return simulate([*queues, *results], needs, pass_duration(times))[: shape.stages]


SCHEDULES: dict[str, Callable[[Setup], Timeline]] = {
    "1F1B": lambda setup: stock(setup, even(setup, 1)),
    "1F1B, layers redistributed": lambda setup: redistributed(setup, 1),
    "paper, algorithm 1": lambda setup: paper(setup, 1),
    "paper, algorithm 2": lambda setup: paper(setup, 2),
    "ours": lambda setup: ours(setup, 1),
    "interleaved": lambda setup: stock(setup, even(setup, setup.chunks)),
    "interleaved, layers redistributed": lambda setup: redistributed(setup, setup.chunks),
    "ours, interleaved": lambda setup: ours(setup, setup.chunks),
}

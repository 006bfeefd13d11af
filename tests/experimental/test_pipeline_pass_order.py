"""The order of passes where all stages share embedding and lm head: complete, without deadlock, within its memory."""

import functools
import itertools
import time

import pytest
from megatron.core import parallel_state
from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches, get_schedule_table

from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import (
    Kind,
    NoOrder,
    Pass,
    Shape,
    Times,
    layer_order,
    length,
    most_extra,
    pass_duration,
    pass_needs,
    pass_order,
    queues_of,
    simulate,
)
from tests.streams.every_order import times

KINDS_OF_EACH_STAGE = {Kind.LOOKUP, Kind.PRODUCTS, Kind.WEIGHT, Kind.ROWS}

SHAPES = [
    Shape(stages, chunks, micro_batches, stages, forward_only)
    for stages, chunks, most in (
        (2, 1, 9),
        (2, 2, 8),
        (2, 4, 4),
        (3, 2, 6),
        (4, 1, 9),
        (4, 2, 8),
        (8, 1, 17),
        (8, 2, 8),
    )
    for micro_batches in sorted({1, stages - 1, most})
    for forward_only in (False, True)
] + [Shape(4, 2, 12, 6), Shape(4, 3, 7, 5), Shape(2, 2, 9, 2)]
SHAPES += [shape._replace(beside=False) for shape in SHAPES[::5]]


@functools.cache
def runs_of(shape, head=0.3):
    """Return the passes of each stage, without those that run beside them."""
    return pass_order(shape, times(shape, head))[: shape.stages]


def waits_for(shape, stage, what):
    """Return the passes that must end before `what`, and the messages in between, independently of the code."""
    kind, n, chunk = what
    every, last = range(shape.stages), shape.stages - 1
    if kind is Kind.LOOKUP:
        return [(0, Pass(Kind.TOKENS, n), "tokens")]
    if kind is Kind.FORWARD and (stage, chunk) == (0, 0):
        return [(one, Pass(Kind.LOOKUP, n), "embedding") for one in every]
    if kind is Kind.FORWARD:
        before = (stage - 1, chunk) if stage else (last, chunk - 1)
        return [(before[0], Pass(Kind.FORWARD, n, before[1]), "send")]
    if kind is Kind.PRODUCTS:
        return [(last, Pass(Kind.FORWARD, n, shape.chunks - 1), "hidden")]
    if kind is Kind.LOSS:
        message = "statistics" if shape.forward_only else "statistics and sum"
        return [(one, Pass(Kind.PRODUCTS, n), message) for one in every]
    if kind is Kind.RESULT:
        return [(one, Pass(Kind.PRODUCTS, n), "statistics") for one in every]
    if kind is Kind.BACKWARD and (stage, chunk) == (last, shape.chunks - 1):
        return [(last, Pass(Kind.LOSS, n), None)]
    if kind is Kind.BACKWARD:
        after = (stage + 1, chunk) if stage < last else (0, chunk + 1)
        return [(after[0], Pass(Kind.BACKWARD, n, after[1]), "send"), (stage, Pass(Kind.FORWARD, n, chunk), None)]
    if kind is Kind.WEIGHT:
        back = Pass(Kind.BACKWARD, n, shape.chunks - 1)
        return [(last, back, "grad_loss"), (stage, Pass(Kind.PRODUCTS, n), None)]
    if kind is Kind.ROWS:
        return [(0, Pass(Kind.BACKWARD, n, 0), "grad_embedding")]
    return []


def most_at_once(begins, ends):
    """The most intervals that overlap: one ends before another begins at the same moment."""
    alive = most = 0
    for _, change in sorted([(at, 1) for at in begins] + [(at, -1) for at in ends]):
        alive += change
        most = max(most, alive)
    return most


@pytest.mark.essential
@pytest.mark.parametrize("head", [0.3, 4.0])
def test_each_pass_runs_once_after_what_it_waits_for(head):
    for shape in SHAPES:
        given = times(shape, head)
        runs = runs_of(shape, head)
        ended = {(stage, run.what): run.end for stage, line in enumerate(runs) for run in line}
        batches = range(shape.micro_batches)
        layers = [Kind.FORWARD] if shape.forward_only else [Kind.FORWARD, Kind.BACKWARD]
        whole = KINDS_OF_EACH_STAGE - ({Kind.WEIGHT, Kind.ROWS} if shape.forward_only else set())
        whole |= set() if shape.beside else {Kind.RESULT}
        for stage, line in enumerate(runs):
            expected = {Pass(kind, n, chunk) for kind in layers for n in batches for chunk in range(shape.chunks)}
            expected |= {Pass(kind, n) for kind in whole for n in batches}
            expected |= {Pass(Kind.TOKENS, n) for n in batches} if stage == 0 else set()
            expected |= {Pass(Kind.LOSS, n) for n in batches} if stage == shape.stages - 1 else set()
            assert len(line) == len(expected)
            assert {run.what for run in line} == expected
            assert all(before.end <= after.start for before, after in itertools.pairwise(line))
            for run in line:
                for other, what, message in waits_for(shape, stage, run.what):
                    delay = sum(getattr(given, name) for name in message.split(" and ")) if message else 0.0
                    assert ended[other, what] + delay <= run.start + 1e-9, (shape, stage, run.what, what)


def test_layers_run_in_megatrons_order(monkeypatch):
    """Layers without extra passes follow Megatron's number of warm-up passes and its table of chunks."""
    for shape in SHAPES:
        for stage in range(shape.stages):
            monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_world_size", lambda n=shape.stages: n)
            monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda n=stage: n)
            interleaved = shape.chunks if shape.chunks > 1 else None
            name = "get_virtual_pipeline_model_parallel_world_size"
            monkeypatch.setattr(parallel_state, name, lambda n=interleaved: n)
            counts = get_pp_rank_microbatches(shape.micro_batches, shape.chunks, shape.group, shape.forward_only)
            warmup, left = counts[2:4]
            turns = get_schedule_table(shape.micro_batches, shape.chunks, shape.group)
            theirs = [Pass(Kind.FORWARD, *turn) for turn in turns[:warmup]]
            backward = [Pass(Kind.BACKWARD, n, shape.chunks - 1 - chunk) for n, chunk in turns]
            for at in range(left):
                theirs += [Pass(Kind.FORWARD, *turns[warmup + at]), backward[at]]
            theirs += [] if shape.forward_only else backward[left:]
            assert layer_order(stage, shape, extra=0) == theirs


def test_schedule_keeps_stage_order_and_loss_before_backward():
    for shape in SHAPES:
        runs = runs_of(shape)
        for stage, line in enumerate(runs):
            layers = [run.what for run in line if run.what.kind in (Kind.FORWARD, Kind.BACKWARD)]
            assert layers in [layer_order(stage, shape, extra) for extra in range(1, most_extra(shape) + 1)]
        if not shape.forward_only:
            order = [run.what for run in runs[-1]]
            for what in order:
                if what.kind is Kind.LOSS:
                    behind = [
                        one for one in order[order.index(what) + 1 :] if one.kind in (Kind.FORWARD, Kind.BACKWARD)
                    ]
                    assert behind[0] == Pass(Kind.BACKWARD, what.micro_batch, shape.chunks - 1)


@pytest.mark.parametrize("head", [0.3, 4.0])
def test_bounds_of_micro_batches_in_flight_and_of_exponentials(head):
    """Two more where RESULT is a pass like others and nothing is interleaved."""
    for shape in SHAPES:
        if shape.forward_only:
            continue
        for stage, line in enumerate(runs_of(shape, head)):
            alive = most = stock = 0
            for run in line:
                alive += {Kind.FORWARD: 1, Kind.BACKWARD: -1}.get(run.what.kind, 0)
                most = max(most, alive)
            alive = 0
            for what in layer_order(stage, shape, extra=0):
                alive += 1 if what.kind is Kind.FORWARD else -1
                stock = max(stock, alive)
            more = 2 if shape.chunks == 1 and not shape.beside else 1
            assert most <= stock + more * shape.chunks, "that many micro-batches in all chunks"
            held = [[run.start for run in line if run.what.kind is Kind.PRODUCTS]]
            held.append([run.end for run in line if run.what.kind is Kind.WEIGHT])
            assert most_at_once(*held) <= 2


def test_too_few_micro_batches_left_over_are_refused():
    """Megatron refuses any number of them between none and that of the stages."""
    shape = Shape(5, 4, 6, 5)
    with pytest.raises(NoOrder, match="wait for each other"):
        pass_order(shape, times(shape))


def test_passes_that_wait_for_each_other_are_refused():
    first, second = Pass(Kind.FORWARD, 0), Pass(Kind.BACKWARD, 0)
    with pytest.raises(ValueError, match="wait for each other"):
        simulate(
            [[[first]], [[second]]], lambda stage, what: [(1 - stage, (second, first)[stage], 0.0)], lambda *_: 1.0
        )


def test_the_vocabulary_layers_fill_gaps():
    """A step takes no longer than 1F1B of layers that take a stage's share of the head longer."""
    shape = Shape(8, 1, 32, 8)
    free = Times(((1.0,),) * 8, ((2.0,),) * 8, products=0.3, weight=0.15)
    assert length(pass_order(shape, free)) <= (32 + 7) * 3.45


def test_the_best_number_of_extra_forward_passes_is_taken():
    shape = Shape(2, 2, 8, 2)
    given = Times(((1.0, 1.0),) * 2, ((2.0, 2.0),) * 2, products=0.3, weight=0.15, statistics=1.0, sum=1.0)
    needs, duration = pass_needs(shape, given), pass_duration(given)
    tried = [simulate(queues_of(shape, extra), needs, duration) for extra in (1, 2)]
    assert length(pass_order(shape, given)) == min(map(length, tried)) < max(map(length, tried))


def test_one_queue_hides_waits_behind_a_second_micro_batch():
    """Waits for backward passes under way leave the last stage another forward pass to do meanwhile."""
    shape = Shape(8, 1, 32, 8)
    one_queue, given = shape._replace(beside=False), times(shape, head=0.1)
    several = length(pass_order(shape, given)[:8])
    assert length(pass_order(one_queue, given)) <= 1.02 * several
    needs, duration = pass_needs(one_queue, given), pass_duration(given)
    assert length(simulate(queues_of(one_queue, extra=1), needs, duration)) > 1.05 * several


def test_order_of_sixteen_stages_takes_about_a_second():
    shape = Shape(16, 1, 128, 16)
    begin = time.process_time()
    pass_order(shape, times(shape, head=0.31))
    assert time.process_time() - begin < 4

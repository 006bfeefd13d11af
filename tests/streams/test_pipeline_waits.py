"""Stages that share the vocabulary cannot hang, whatever a machine's queues, buffers and communicators are."""

import random
from collections import Counter

import pytest
import torch.distributed as dist

from megatron_ext.experimental.pipeline_vocabulary.order.passes import Exchange, Kind, Sent, Shape, members
from megatron_ext.experimental.pipeline_vocabulary.order.stage_programs import stage_programs
from tests.gpt import model_parallel
from tests.ranks import ranks
from tests.streams.every_order import check_number, check_shape, run_one_at_a_time, times
from tests.streams.recording import Log, Message, Submission
from tests.streams.stage_recording import recorded_stages, recorded_step
from tests.streams.waits import EVERY, ONE_AT_A_TIME, STRICTEST, Hang, Rules, check

pytestmark = pytest.mark.slow

MTP = {"mtp_num_layers": 2}


def messages_of(stage: int, exchange: Exchange, shape: Shape) -> list[tuple[str, int]]:
    """Messages that a stage launches for an exchange, each with the other rank or the root."""
    kind = exchange.kind
    if kind in (Sent.FORWARD, Sent.BACKWARD):
        sender, receiver = members(exchange, shape)
        return [("send", receiver) if stage == sender else ("receive", sender)]
    if kind is Sent.EMBEDDING:
        return [("reduce", 0), ("reduce", shape.last)][: 1 + shape.further]
    if kind is Sent.STATISTICS:
        return [("all_gather", -1)]
    if kind is Sent.SUM:
        return [("reduce", shape.last)]
    return [("broadcast", 0 if kind in (Sent.TOKENS, Sent.GRAD_EMBEDDING) else shape.last)]


@pytest.mark.parametrize("one_queue", [False, True], ids=["queues", "one-queue"])
@pytest.mark.parametrize(
    "sizes,settings",
    [
        pytest.param((2, 2, 4), {}, id="pp2-interleaved"),
        pytest.param((4, 1, 8), {}, id="pp4"),
        pytest.param((2, 1, 3), MTP, id="pp2-mtp"),
        pytest.param((2, 1, 3), {"forward_only": True}, id="pp2-forward-only"),
        pytest.param((4, 2, 8), MTP, id="pp4-interleaved-mtp"),
        pytest.param((8, 1, 16), {}, id="pp8"),
        pytest.param((8, 2, 8), {}, id="pp8-interleaved"),
        pytest.param((16, 1, 17), {}, id="pp16"),
    ],
)
def test_what_the_stages_launch_runs_through_on_every_machine(sizes, settings, one_queue, monkeypatch):
    """Recorded from the code itself, and message for message what its program says: the other tests have that alone."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1" if one_queue else "8")
    logs = recorded_stages(sizes, **settings)
    assert [log.shape.beside for log in logs] == [not one_queue] * sizes[0]
    for rules in [*EVERY, *ONE_AT_A_TIME]:
        check([log.submissions for log in logs], rules)
    for stage, log in enumerate(logs):
        planned = [
            message
            for entry in log.program
            if isinstance(entry, Exchange)
            for message in messages_of(stage, entry, log.shape)
        ]
        of_passes = [one for one in log.submissions if "same_on_ranks" not in one.line]  # that their order is the same
        found = [one.message for one in of_passes if one.message is not None]
        launched = [
            ("all_gather" if message.kind.startswith("all_gather") else message.kind, message.peer)
            for message in found
            if message.kind != "all_reduce" and len(message.group[1]) == sizes[0]
        ]
        assert launched == planned


def check_this_world(sizes: tuple[int, int, int], **settings) -> None:
    """Check what all ranks of this world launch, and really send."""
    log = recorded_step(sizes, Log(real=True), **settings)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, log.submissions)
    for rules in [*EVERY, *ONE_AT_A_TIME]:
        check(every, rules)


@ranks(2)
def test_shapes_that_the_host_waits_for():
    with model_parallel(pp=2):
        check_this_world((2, 1, 3), variable_seq_lengths=True, moe_token_dispatcher_type="alltoall")


@ranks(4)
@pytest.mark.parametrize("overrides", [{}, {"sequence_parallel": True}], ids=["tp", "sp"])
def test_with_tensor_parallelism(overrides):
    with model_parallel(pp=2, tp=2):
        check_this_world((2, 1, 4), **overrides)


@pytest.mark.parametrize("stages", range(2, 17))
def test_many_orders(stages):
    """2 to 16 stages and 1 to 4 chunks, with the micro-batches at which orders change; `every_order` has all."""
    for chunks in range(1, 5):
        for micro_batches in sorted({1, 2, stages - 1, stages, stages + 1, 2 * stages + 1, 64}):
            further = micro_batches % 3 == 0
            if check_number(stages, chunks, micro_batches, further) and micro_batches < 64:
                check_shape(Shape(stages, chunks, micro_batches, stages, forward_only=True, further=further), 0.3)


def test_a_program_in_another_order_is_a_hang():
    """A message that one stage launches later than the others, and a pass before what it waits for."""
    shape = Shape(3, 1, 4, 3)
    right = stage_programs.__wrapped__(shape, times(shape, 0.3))
    run_one_at_a_time(shape, right)
    at = next(at for at, entry in enumerate(right[1]) if isinstance(entry, Exchange))
    late = [list(program) for program in right]
    late[1].append(late[1].pop(at))
    with pytest.raises(Hang, match="the stages wait in"):
        run_one_at_a_time(shape, late)
    early = [list(program) for program in right]
    at = next(at for at, entry in enumerate(early[0]) if not isinstance(entry, Exchange) and entry.kind is Kind.LOOKUP)
    early[0].insert(0, early[0].pop(at))
    with pytest.raises(Hang, match="comes before"):
        run_one_at_a_time(shape, early)


# --- the model itself

GROUP = ("group", (0, 1))
OTHER = ("other group", (0, 1))


def kernel(stream: int = 0) -> Submission:
    return Submission("kernel", stream, "")


def message(kind: str, peer: int = -1, group=GROUP, after=()) -> Submission:
    return Submission("message", 0, "", after, Message(group, kind, peer, 8))


def wait(*after: int, stream: int = 0) -> Submission:
    return Submission("wait", stream, "", after)


def hangs(programs, rules: Rules) -> bool:
    try:
        check(programs, rules)
    except Hang:
        return True
    return False


def test_ranks_that_receive_first_hang():
    """Two stages that had a chunk each for the other did this: the next receive came before the send."""
    first, second = ([message("receive", peer), kernel(), message("send", peer)] for peer in (1, 0))
    assert all(hangs([first, second], rules) for rules in EVERY)
    right = [first, [kernel(), message("send", 0), message("receive", 0)]]
    assert not any(hangs(right, rules) for rules in [*EVERY, *ONE_AT_A_TIME])


def test_a_side_streams_wait_holds_back_the_one_queue():
    """Rank 0's side stream waits for a sum that rank 1 joins when it has a message which rank 0 sends afterwards."""
    first = [message("all_reduce", group=OTHER), wait(0, stream=1), kernel(), message("send", 1, after=(2,))]
    second = [message("receive", 0), wait(0), kernel(), message("all_reduce", group=OTHER, after=(2,))]
    for rules in EVERY:
        eager_alone = rules.eager  # where communicators are made at their first use, the hosts wait already
        assert hangs([first, second], rules) == (rules.queues == 1 or not eager_alone), rules


def test_collectives_in_another_order_hang_without_buffers():
    first = [message("broadcast", 0, GROUP), wait(0), kernel(), message("broadcast", 0, OTHER, after=(2,))]
    second = [message("broadcast", 0, OTHER), wait(0), kernel(), message("broadcast", 0, GROUP, after=(2,))]
    for rules in EVERY:
        if rules.eager:
            assert hangs([first, second], rules) == rules.rendezvous, rules
    unlike = [[message("broadcast", 0)], [message("reduce", 0)]]
    with pytest.raises(Hang, match="meet in one collective"):
        check(unlike, EVERY[0])
    with pytest.raises(Hang, match="different numbers"):
        check([[message("reduce", 0)], []], EVERY[0])


def random_programs(rng: random.Random) -> list[list[Submission]]:
    """Three ranks with some kernels, waits and messages, mostly in a common order."""
    programs = [[] for _ in range(3)]
    for _ in range(8):
        kind = rng.choice(("kernel", "one way", "broadcast", "reduce", "wait", "wait"))
        group = rng.choice((("a", (0, 1, 2)), ("b", (0, 1, 2))))
        if kind in ("kernel", "wait"):
            program = rng.choice(programs)
            sent = [at for at, one in enumerate(program) if one.message]
            if kind == "kernel" or not sent:
                program.append(kernel(rng.randrange(2)))
            else:
                program.append(wait(rng.choice(sent), stream=rng.randrange(2)))
            continue
        source, target = rng.sample(range(3), 2)
        made = {rank: message(kind, source, group) for rank in range(3)}
        if kind == "one way":
            made = {source: message("send", target, group), target: message("receive", source, group)}
        for rank, one in made.items():
            kernels = [at for at, other in enumerate(programs[rank]) if other.message is None]
            one.after = tuple(kernels[-1:])
            programs[rank].append(one)
            if len(programs[rank]) > 1 and rng.random() < 0.04:  # out of order here
                before, last = programs[rank][-2:]
                if not before.after and not last.after:
                    programs[rank][-2:] = last, before
    return programs


def test_the_strictest_machine_covers_the_others():
    """Programs that run with one queue and no buffers do with more; those that run one thing at a time do anywhere."""
    rng, seen = random.Random(0), Counter()
    for _ in range(150):
        programs = random_programs(rng)
        found = {rules: hangs(programs, rules) for rules in [*EVERY, *ONE_AT_A_TIME]}
        for rules in EVERY:
            strictest = next(one for one in STRICTEST if one.eager == rules.eager)
            assert found[strictest] or not found[rules]
        if not any(found[rules] for rules in ONE_AT_A_TIME):
            assert not any(found.values())
        seen[sum(found.values())] += 1
    assert seen[0] > 20
    assert sum(number for hanging, number in seen.items() if 0 < hanging < len(found)) > 10, seen

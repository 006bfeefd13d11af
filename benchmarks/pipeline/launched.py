"""How long a step of ours takes when messages are launched as the stages' programs say.

The simulation that orders passes lets each message go as soon as its sources have ended. Launched, a message also waits
on every stage for the passes before it in the program, whose memory it may take, and for the message before it on the
same communicator.
"""

from benchmarks.pipeline.costs import Setup
from megatron_ext.megatron.pipeline.groups import communicator_of
from megatron_ext.megatron.pipeline.order.pass_order import message_times, pass_duration, pass_order
from megatron_ext.megatron.pipeline.order.passes import Exchange, Kind, Sent, needed, sources
from megatron_ext.megatron.pipeline.order.stage_programs import joint_order


def launched_seconds(setup: Setup, chunks: int, one_queue: bool = False) -> float:
    """Of a step. `one_queue`: CUDA_DEVICE_MAX_CONNECTIONS is 1, and nothing runs beside the passes."""
    shape, times = setup.shape(chunks)._replace(beside=not one_queue), setup.times(chunks)
    duration, takes = pass_duration(times), message_times(times)
    free = [0.0] * shape.stages  # when a stage's passes so far have ended
    ended: dict[object, float] = {}
    free_communicator: dict[object, float] = {}
    for stages, entry in joint_order(shape, pass_order(shape, times)):
        if isinstance(entry, Exchange):
            starts = [ended[source] for source in sources(entry, shape)]
            if not (shape.beside and entry.kind in (Sent.STATISTICS, Sent.SUM)):
                starts += [free[stage] for stage in stages]
            communicator = communicator_of(entry.kind), tuple(sorted(stages))
            start = max(*starts, free_communicator.get(communicator, 0.0))
            ended[entry] = free_communicator[communicator] = start + takes[entry.kind]
            continue
        (stage,) = stages
        start = max([0.0, *(ended[one] for one in needed(stage, entry, shape))])
        if shape.beside and entry.kind is Kind.RESULT:
            ended[stage, entry] = start
        else:
            free[stage] = ended[stage, entry] = max(start, free[stage]) + duration(stage, entry)
    return max(free)

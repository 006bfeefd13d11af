"""Seconds of a step of ours when messages are launched as the stages' programs say.

The simulation that orders passes lets each message go as soon as its sources have ended. Launched, a message also waits
on every stage for the passes before it in the program, whose memory it may take, and for the message before it on the
same communicator.

`python -m benchmarks.pipeline.launched` prints the table of docs/pipeline.md.
"""

import argparse
from collections.abc import Iterable

from benchmarks import record
from benchmarks.pipeline.costs import Setup, setups
from benchmarks.pipeline.schedules import ours
from megatron_ext.experimental.pipeline_vocabulary.groups import communicator_of
from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import message_times, pass_duration, pass_order
from megatron_ext.experimental.pipeline_vocabulary.order.passes import Exchange, Kind, Sent, needed, sources
from megatron_ext.experimental.pipeline_vocabulary.order.stage_programs import joint_order


def launched_seconds(setup: Setup, chunks: int, one_queue: bool = False) -> float:
    """Return the seconds of a simulated step. `one_queue`: CUDA_DEVICE_MAX_CONNECTIONS is 1, without any overlap."""
    shape, times = setup.shape(chunks)._replace(beside=not one_queue), setup.times(chunks)
    duration, takes = pass_duration(times), message_times(times)
    free = [0.0] * shape.stages  # the time at which a stage's passes so far have ended
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


def table(setups: Iterable[Setup]) -> str:
    """Return a Markdown table: how much longer launched steps take than simulated ones, and the stages' activations."""
    heads = ("", "several queues", "one queue", "in flight", "activations, GB")
    lines = []
    for setup in setups:
        for name, chunks in ((setup.name, 1), (f"{setup.name}, interleaved", setup.chunks)):
            apart, alone = ours(setup, chunks), ours(setup, chunks, one_queue=True)
            longer = [launched_seconds(setup, chunks, one_queue) / apart.seconds - 1 for one_queue in (False, True)]
            in_flight = [max(stage.in_flight for stage in one.stages) for one in (apart, alone)]
            gigabytes = [max(stage.activation_bytes for stage in one.stages) / 1e9 for one in (apart, alone)]
            lines.append(
                (
                    name,
                    *(f"{100 * part:.1f} %" for part in longer),
                    f"{in_flight[0]:.3g}, {in_flight[1]:.3g}",
                    f"{gigabytes[0]:.1f}, {gigabytes[1]:.1f}",
                )
            )
    return record.markdown(heads, lines)


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0]).parse_args()
    print(table(setup for setup in setups() if setup.link.name == "400 Gb/s"))

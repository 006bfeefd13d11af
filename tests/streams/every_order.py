"""`python -m tests.streams.every_order`: no order of passes of a pipeline that shares its vocabulary can hang.

2 to 16 stages, 1 to 4 chunks of layers on each, 1 to 64 micro-batches, with and without multi-token prediction, with
RESULT beside the passes and among them: 15360 orders, each under the strictest rule, which covers every machine
(`test_pipeline_waits`). Prints the table of docs/pipeline.md. About half an hour on two cores; `--stages 4` takes some.
"""

import argparse
import gc
import os
from collections import Counter
from multiprocessing import Pool

from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import NoOrder, Times
from megatron_ext.experimental.pipeline_vocabulary.order.passes import Exchange, Shape, members, needed, sources
from megatron_ext.experimental.pipeline_vocabulary.order.stage_programs import stage_programs
from tests.streams.waits import Hang

STAGES, CHUNKS, MICRO_BATCHES = range(2, 17), range(1, 5), range(1, 65)


def times(shape: Shape, head: float = 0.3) -> Times:
    """Layers of 1 and 2 a stage, the vocabulary layers a part of that; every message takes a while."""
    even = ((1 / shape.chunks,) * shape.chunks,) * shape.stages
    twice = tuple(tuple(2 * time for time in stage) for stage in even)
    of_head = Times(even, twice, products=head, weight=head / 2, hidden=0.05, statistics=0.02, sum=0.04, grad_loss=0.01)
    return of_head._replace(lookup=0.01, rows=0.02, send=0.03, tokens=0.01, embedding=0.04, grad_embedding=0.04)


def run_one_at_a_time(shape: Shape, programs) -> None:
    """Each stage runs an entry to its end before it begins the next, and meets the others in its exchanges: stricter
    than every machine. Raises Hang if that cannot be, or if a pass comes before what it waits for."""
    at, arrived, ended = [0] * shape.stages, Counter(), set()
    free = list(range(shape.stages))
    while free:
        stage = free.pop()
        if at[stage] == len(programs[stage]):
            continue
        entry = programs[stage][at[stage]]
        together = [stage]
        if isinstance(entry, Exchange):
            arrived[entry] += 1
            together = members(entry, shape)
            if arrived[entry] < len(together):
                continue
            missing = [source for source in sources(entry, shape) if source not in ended]
            ended.add(entry)
        else:
            missing = [exchange for exchange in needed(stage, entry, shape) if exchange not in ended]
            ended.add((stage, entry))
        if missing:
            raise Hang(f"{shape}: {entry} on stage {stage} comes before {missing}")
        for one in together:
            at[one] += 1
            free.append(one)
    left = [programs[stage][at[stage]] for stage in range(shape.stages) if at[stage] < len(programs[stage])]
    if left:
        raise Hang(f"{shape}: the stages wait in {left}")


def check_shape(shape: Shape, head: float) -> None:
    for beside in (True, False):
        one = shape._replace(beside=beside)
        run_one_at_a_time(one, stage_programs.__wrapped__(one, times(one, head)))


def check_number(stages: int, chunks: int, micro_batches: int, further: bool) -> bool:
    """Return whether there is an order: interleaved, Megatron refuses less than a group of micro-batches at the end."""
    shape = Shape(stages, chunks, micro_batches, stages, further=further)
    try:
        check_shape(shape, 4.0 if micro_batches % 3 == 0 else 0.3)  # a head of a third of the layers, or of all thrice
    except NoOrder:
        if chunks > 1 and micro_batches % stages > 0:
            return False
        raise
    return True


def check_stages(stages: int) -> tuple[int, Counter]:
    gc.disable()  # it would look through all that was imported again and again
    found: Counter = Counter()
    for chunks in CHUNKS:
        for micro_batches in MICRO_BATCHES:
            for further in (False, True):
                found["run" if check_number(stages, chunks, micro_batches, further) else "refused"] += 2
    return stages, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stages", type=int, nargs="*", default=list(STAGES), help="numbers of pipeline stages")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    print("| stages | orders that run through | refused: no order |\n| --- | --- | --- |", flush=True)
    all_found: Counter = Counter()
    with Pool(options.processes) as pool:
        for stages, found in pool.imap(check_stages, options.stages):
            print(f"| {stages} | {found['run']} | {found['refused']} |", flush=True)
            all_found += found
    print(f"| all | {all_found['run']} | {all_found['refused']} |")


if __name__ == "__main__":
    main()

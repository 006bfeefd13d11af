"""The programs of all stages of a pipeline with a shared vocabulary, recorded from a real step, a stage at a time.

Each stage is a rank of a world in which nothing is sent (torch's fake process group): what a message would bring is
zeros, and the code launches what it launches.
"""

from contextlib import ExitStack, contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.distributed import collectives
from megatron_ext.experimental.pipeline_vocabulary import linear_steps
from tests.gpt import SEQUENCE, data_parallel, model_parallel, run_schedule, stock_spec, tiny_gpt
from tests.streams.recording import Log, recording


def recorded_stages(sizes: tuple[int, int, int], make_log=Log, forward_only=False, **overrides) -> list[Log]:
    """Record what every stage submits in one step of a tiny GPT. `sizes`: stages, chunks, micro-batches; `overrides` of
    its config. Each log has `shape` and `program` of its stage."""
    stages, chunks, _ = sizes
    logs = []
    for stage in range(stages):
        with one_of_a_world(stage, stages), model_parallel(pp=stages, vp=chunks if chunks > 1 else None):
            logs.append(recorded_step(sizes, make_log(), forward_only, **overrides))
    return logs


def recorded_step(sizes: tuple[int, int, int], log: Log, forward_only=False, **overrides) -> Log:
    """One step on this rank of a world with so many stages."""
    from megatron_ext.experimental import pipeline_vocabulary
    from megatron_ext.experimental.pipeline_vocabulary.stage_run import StageRun

    stages, chunks, micro_batches = sizes
    run = StageRun.run

    def watched(self, program, *others):
        log.shape, log.program = self.shape, program
        return run(self, program, *others)

    with ExitStack() as stack:
        pipeline_vocabulary.share_vocabulary()
        stack.callback(pipeline_vocabulary.restore)
        settings = {"num_layers": stages * chunks, "weights": "init", "tied": False, **overrides}
        wrapped = data_parallel(tiny_gpt(stock_spec, **settings))
        stack.enter_context(mock.patch.object(StageRun, "run", watched))
        if not log.real:  # then statistics are those of one rank only
            stack.enter_context(mock.patch.object(linear_steps, "check_exchange"))
        stack.enter_context(recording(log))
        tokens = torch.zeros(micro_batches, SEQUENCE + 1, dtype=torch.int64)
        run_schedule(wrapped, tokens, micro_batch=1, forward_only=forward_only)
    return log


@contextmanager
def one_of_a_world(rank: int, ranks: int):
    """This process is one rank of a world in which nobody answers."""

    def of_every_rank(value, group):
        """Return what the others would say: the same, but for groups of one rank, which are their own."""
        if not isinstance(value, tuple):
            return [value] * ranks
        groups, *others = value
        return [([[one] if len(group) == 1 else group for group in groups], *others) for one in range(ranks)]

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with mock.patch.object(collectives, "all_gather_object", of_every_rank):
            yield
    finally:
        dist.destroy_process_group()

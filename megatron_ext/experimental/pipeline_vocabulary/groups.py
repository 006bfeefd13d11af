"""The process groups over which stages that share the vocabulary send.

The number of groups decides only which messages travel at the same time: messages on one communicator are sent one
after the other. Their order (`order.stage_programs`) is the same on all stages, so one group for everything would do.
"""

import os
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import collectives
from megatron_ext.experimental.pipeline_vocabulary.order.passes import Sent

_OWN = {  # exchanges that have a group of their own, of the pipeline's ranks
    "backward": (Sent.BACKWARD,),
    "head": (Sent.HIDDEN, Sent.GRAD_LOSS),
    "sum": (Sent.SUM,),
    "embedding": (Sent.TOKENS, Sent.EMBEDDING, Sent.GRAD_EMBEDDING, Sent.GRAD_FURTHER),
}


def communicator_of(kind: Sent) -> str:
    """Name the communicator of an exchange. Exchanges on one communicator are sent one after the other."""
    return next((name for name, kinds in _OWN.items() if kind in kinds), kind.value)


class PipelineGroups:
    """Process groups of this rank's pipeline. All ranks of the job must make them together.

    Activations, and the statistics of all ranks that share the vocabulary, travel over Megatron's own groups. Made here
    are four groups of the pipeline's ranks and one of the tensor-parallel ranks.

    `fault`: why this rank's model cannot be trained so, which it alone may see; it is raised on every rank.
    Communicates: one exchange of the ranks in each group, and whatever making groups communicates.

    Attributes:
        stages, stage: the number of pipeline stages, and this rank's.
        statistics: all ranks that share the vocabulary: those of the pipeline and of tensor parallelism.
        tp: Megatron's tensor-parallel group, for the passes' messages.
        tp_aside: the same ranks, for messages beside the passes.
        one_queue: CUDA_DEVICE_MAX_CONNECTIONS is 1 somewhere, so that nothing can run beside the passes.
    """

    def __init__(self, fault: ValueError | None = None) -> None:
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        self.stages, self.stage = pipeline.size(), pipeline.rank()
        self.last = self.stages - 1
        self.is_first, self.is_last = self.stage == 0, self.stage == self.last
        self.tp = parallel_state.get_tensor_model_parallel_group()
        self.statistics = parallel_state.get_model_parallel_group()
        like = (self.tp, *(pipeline for _ in _OWN))
        own = [dist.get_process_group_ranks(group) for group in like]
        one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
        found = collectives.all_gather_object((own, fault and str(fault), one_queue), dist.group.WORLD)
        _raise_on_all(fault, [text for _, text, _ in found])
        self.one_queue = any(one for *_, one in found)
        self._made = []
        for of_all_ranks in zip(*(ranks for ranks, *_ in found), strict=True):
            own_group, _ = dist.new_subgroups_by_enumeration(sorted({tuple(ranks) for ranks in of_all_ranks}))
            self._made.append(own_group)
        self.tp_aside, *rest = self._made
        self._of = {kind: group for kinds, group in zip(_OWN.values(), rest, strict=True) for kind in kinds}
        self._of[Sent.FORWARD] = pipeline

    def __getitem__(self, kind: Sent) -> Any:
        """Return the group of the pipeline's ranks for one kind of message."""
        return self._of[kind]

    def close(self) -> None:
        """Destroy the groups that were made here."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made = []


def _raise_on_all(own: ValueError | None, faults: list[str | None]) -> None:
    if own is not None:
        raise own
    for rank, text in enumerate(faults):
        if text is not None:
            raise ValueError(f"the models of this job cannot share their vocabulary; rank {rank}: {text}")

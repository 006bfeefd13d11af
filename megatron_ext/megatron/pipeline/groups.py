"""Process groups of their own for what the shared vocabulary sends: each kind of message keeps its own order.

A group that the layers use, or one for two kinds of messages, would tie the order of passes on one stage to that on
another.
"""

from functools import cached_property
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.distributed import collectives

KINDS = ("forward", "backward", "tokens", "embedding", "hidden", "sum", "grad_loss", "grad_embedding")
OF_MTP = ("grad_further",)  # with multi-token prediction


class PipelineGroups:
    """Made by all ranks of the job together. Communicates: which ranks form groups, and what making groups does.

    `fault`: why this rank's model cannot be trained so, which it alone may see; sent along, and raised on every rank.

    Attributes:
        stages, stage: of the pipeline.
        statistics: all ranks that share the vocabulary: those of the pipeline and of tensor parallelism.
        tp: Megatron's tensor-parallel group, for what the passes send.
        tp_aside: the same ranks, for what is sent beside the passes.
    """

    def __init__(self, kinds: tuple[str, ...] = KINDS, fault: ValueError | None = None) -> None:
        pipeline = parallel_state.get_pipeline_model_parallel_group()
        self.stages, self.stage = pipeline.size(), pipeline.rank()
        self.tp = parallel_state.get_tensor_model_parallel_group()
        like = (parallel_state.get_model_parallel_group(), self.tp, *(pipeline for _ in kinds))
        own = [dist.get_process_group_ranks(group) for group in like]
        found = collectives.all_gather_object((own, fault and str(fault)), dist.group.WORLD)
        _raise_on_all(fault, [text for _, text in found])
        self._made = [_own_of(ranks) for ranks in zip(*(ranks for ranks, _ in found), strict=True)]
        self.statistics, self.tp_aside, *rest = self._made
        self._kinds = dict(zip(kinds, rest, strict=True))

    def __getitem__(self, kind: str) -> Any:
        """The pipeline's ranks, for one kind of message."""
        return self._kinds[kind]

    @cached_property
    def last(self) -> int:
        return self.stages - 1

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.last

    def close(self) -> None:
        """Megatron's groups are about to go, or are gone."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made = []


def _raise_on_all(own: ValueError | None, faults: list[str | None]) -> None:
    if own is not None:
        raise own
    for rank, text in enumerate(faults):
        if text is not None:
            raise ValueError(f"the models of this job cannot share their vocabulary; rank {rank}: {text}")


def _own_of(groups: Any) -> Any:
    """Makes a new group of the ranks in each of `groups`, one entry for each rank of the job; returns this rank's."""
    made = [dist.new_group(list(ranks)) for ranks in sorted({tuple(group) for group in groups})]
    return next(group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER)

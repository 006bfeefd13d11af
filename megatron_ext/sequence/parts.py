"""A sequence in parts over the context-parallel ranks, packed or not: from the whole to a part and back."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, group_rank, group_size
from megatron_ext.sequence.zigzag import gather_parts, gather_zigzag, split_zigzag, thd_partition_indices


@dataclass(frozen=True)
class SequenceParts:
    """How Megatron cuts a sequence dim over the context-parallel ranks `group` (None: not at all).

    `cu_seqlens`, integers `[documents + 1]` with padding counted, says where the documents of a packed sequence begin.
    """

    group: Group
    cu_seqlens: Tensor | None = None

    def split(self, x: Tensor, dim: int) -> Tensor:
        """This rank's part of the whole `x`. Communicates nothing."""
        ranks, rank = group_size(self.group), group_rank(self.group)
        if ranks == 1 or self.cu_seqlens is None:
            return split_zigzag(x, ranks, rank, dim)
        return x.index_select(dim, thd_partition_indices(self.cu_seqlens, x.shape[dim], ranks, rank))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """The whole from this rank's part. Communicates one all-gather; backward one reduce-scatter."""
        ranks = group_size(self.group)
        if ranks == 1 or self.cu_seqlens is None:
            return gather_zigzag(x, self.group, dim) if ranks > 1 else x
        whole, total = gather_parts(x, self.group, dim), x.shape[dim] * ranks
        order = torch.cat([thd_partition_indices(self.cu_seqlens, total, ranks, rank) for rank in range(ranks)])
        return whole.index_select(dim, order.argsort())

"""The split of packed or unpacked sequences over context-parallel ranks, and gathering of the parts."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, check_group, group_rank, group_size
from megatron_ext.sequence.zigzag import (
    REFUSED,
    demand,
    gather_parts,
    gather_zigzag,
    merge_zigzag,
    split_zigzag,
    thd_partition_indices,
)

_DIFFERENT = (
    "another rank of cp_group has logits or hidden states of another number of positions, this one has {}: all ranks "
    "must have as many; pad the sequence to the same length on every rank before it is split"
)


@dataclass(frozen=True)
class SequenceParts:
    """Split of a sequence dim over the context-parallel ranks of `group`, as in Megatron; None: no split.

    `cu_seqlens`: where the documents of a packed sequence begin, integers `[documents + 1]` with padding counted.
    """

    group: Group
    cu_seqlens: Tensor | None = None

    @classmethod
    def of(cls, group: Group, packed: Any) -> Self:
        """Make the split from Megatron's `PackedSeqParams` (None: sequences are not packed), whose group overrides
        `group`."""
        if packed is None:
            return cls(group)
        if getattr(packed, "cp_group", None) is not None:
            group = check_group(packed.cp_group, "packed_seq_params.cp_group")
        elif getattr(packed, "local_cp_size", None) == 1:
            group = None
        padded = packed.cu_seqlens_q_padded
        return cls(group, packed.cu_seqlens_q if padded is None else padded)

    def split(self, x: Tensor, dim: int) -> Tensor:
        """Return this rank's part of the whole `x`. Communicates nothing."""
        if (ranks := group_size(self.group)) == 1:
            return x
        rank = group_rank(self.group)
        if self.cu_seqlens is None:
            return split_zigzag(x, ranks, rank, dim)
        return x.index_select(dim, thd_partition_indices(self.cu_seqlens, x.shape[dim], ranks, rank))

    def gather(self, x: Tensor, dim: int) -> Tensor:
        """Return the whole from this rank's part. Communicates one all-gather; backward one reduce-scatter."""
        if group_size(self.group) == 1:
            return x
        if self.cu_seqlens is None:
            return gather_zigzag(x, self.group, dim)
        return self._joined(gather_parts(x, self.group, dim), dim)

    def gather_or_refuse(self, x: Tensor, dim: int, fault: ValueError | None, first: int | None = None) -> Tensor:
        """Gather as `gather` does, or raise on every rank if one has a `fault`: see `told_parts`.

        `first`: how many positions all ranks are known to have; None: as many as this rank. Positions after these
        follow in a second all-gather, after the first one has shown that all ranks have as many; the host waits for
        the first one then.
        """
        if group_size(self.group) == 1:
            if fault is not None:
                raise fault
            return x
        held = x.shape[dim]
        first = held if first is None else first
        parts = told_parts(x.narrow(dim, 0, first), self.group, dim, fault, held)
        if held > first:
            rest = gather_parts(x.narrow(dim, first, held - first), self.group, dim)
            parts = torch.cat([parts, rest.unflatten(dim, (group_size(self.group), held - first))], dim + 1)
        return self._joined(parts.flatten(dim, dim + 1), dim)

    def _joined(self, parts: Tensor, dim: int) -> Tensor:
        """Return the whole from all ranks' parts in rank order."""
        ranks, total = group_size(self.group), parts.shape[dim]
        if self.cu_seqlens is None:
            return merge_zigzag(parts, ranks, dim)
        order = torch.cat([thd_partition_indices(self.cu_seqlens, total, ranks, rank) for rank in range(ranks)])
        return parts.index_select(dim, order.argsort())


def told_parts(x: Tensor, group: Group, dim: int, fault: ValueError | None, held: int | None = None) -> Tensor:
    """Gather every rank's `x` `[..., P, ...]` as `[..., W, P, ...]`, with one more position that tells of a `fault`.

    `held`: how many positions this rank has, of which `x` holds the first; all ranks must have as many.

    Communicates one all-gather; backward one reduce-scatter.

    Raises:
        ValueError: a rank has a fault, which that rank raises, and of which the others' error speaks; or ranks have
            different numbers of positions.
    """
    ranks, positions = group_size(group), x.shape[dim]
    held = positions if held is None else held
    if ranks > 1:
        said = -1.0 if fault is not None else float(held - positions)
        flag = x.new_full((*x.shape[:dim], 1, *x.shape[dim + 1 :]), said)
        x = gather_parts(torch.cat([x, flag], dim), group, dim)
    if fault is not None:
        raise fault
    if ranks == 1:
        return x.unsqueeze(dim)
    told = x.unflatten(dim, (ranks, positions + 1))
    more = told.select(dim + 1, positions)
    demand(~(more < 0).any(), lambda _: REFUSED, more)
    same = (more == held - positions).all()
    if held > positions:
        same = same.cpu()  # the host waits: ranks without further positions take no part in the second all-gather
    demand(same, lambda _: _DIFFERENT.format(held), more)
    return told.narrow(dim + 1, 0, positions)

"""Sums of parts in one order, whichever ranks hold the parts: as the leaves of a binary tree of neighbours.

`((0 + 1) + (2 + 3)) + ((4 + 5) + (6 + 7))`: 1, 2, 4 or 8 ranks each hold a branch of the same tree. The tree is that of
"Deterministic Inference across Tensor Parallel Sizes" (TBIK, arXiv 2511.17826).

Legend: T tokens, D hidden size, R ranks.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.distributed.groups import Group, group_rank, group_size
from megatron_ext.numerics.tensors import accumulation_dtype


def in_tree(parts: Sequence[Tensor], joined: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Join `parts` by twos, neighbours first."""
    if len(parts) == 1:
        return parts[0]
    middle = 1 << (len(parts) - 1).bit_length() - 1
    return joined(in_tree(parts[:middle], joined), in_tree(parts[middle:], joined))


class TreeSum:
    """The sum `in_tree` of parts that come one after the other, in their memory: n parts leave at most log2(n) + 1."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Tensor]] = []

    def add(self, part: Tensor) -> None:
        """Add the next part, whose memory is overwritten."""
        level = 0
        while self._waiting and self._waiting[-1][0] == level:
            part = self._waiting.pop()[1].add_(part)
            level += 1
        self._waiting.append((level, part))

    def total(self) -> Tensor:
        """Return the sum of all parts."""
        found = self._waiting.pop()[1]
        while self._waiting:
            found = self._waiting.pop()[1].add_(found)
        return found


def sum_of_ranks(x_TD: Tensor, like: Tensor, group: Group, sizes: list[int] | None) -> Tensor:
    """Sum every rank's `x` in the tree's order, in fp32 at least, and round once to `like`'s dtype.

    `sizes`: the number of tokens of the sum that each rank keeps; None: all ranks get all of it.

    Communicates: 1 all-to-all of `(R - 1) / R T D` numbers in `x`'s dtype, and without `sizes` 1 all-gather of as many
    in the dtype of `like`. (An all-reduce promises no order.)
    """
    ranks, tokens = group_size(group), x_TD.shape[0]
    if ranks == 1 or tokens == 0:
        return x_TD.to(like.dtype)
    each = sizes or [tokens // ranks + (rank < tokens % ranks) for rank in range(ranks)]
    own = each[group_rank(group)]
    parts_RTD = collectives.all_to_all(x_TD, group, [own] * ranks, each).unflatten(0, (ranks, own))
    parts_RTD = parts_RTD.to(accumulation_dtype(x_TD.dtype))
    found_TD = in_tree(parts_RTD.unbind(0), torch.add).to(like.dtype)
    return found_TD if sizes else collectives.all_gather(found_TD, group, sizes=each)


def start_sum_of_ranks(x_TD: Tensor, like: Tensor, group: Group, sizes: list[int] | None, fixed: bool) -> Pending:
    """Begin to sum every rank's `x`, in its memory where that is possible; if `fixed` in the tree's order.

    Communicates: 1 all-reduce; with `sizes`, the number of tokens that each rank keeps, 1 reduce-scatter; if `fixed` as
    `sum_of_ranks`.
    """
    tokens = x_TD.shape[0]
    if fixed:
        return Pending(sum_of_ranks(x_TD, like, group, sizes))
    if sizes is not None and tokens:
        return collectives.start_reduce_scatter(x_TD, group, sizes=sizes)
    return collectives.start_all_reduce(x_TD, group if tokens else None, in_place=True)

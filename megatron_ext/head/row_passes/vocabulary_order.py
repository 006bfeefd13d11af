"""The order of token ids by logit, the same on every device and dtype: larger logits first, equal ones by lowest id.

Legend: T tokens, N candidates.
"""

import torch
from torch import Tensor

from megatron_ext.head.row_passes.dispatch import passes_of

_GROUP = 64  # columns


def largest_columns(z_TV: Tensor, k: int, any_equals: bool = False) -> Tensor:
    """`[T, k]`, int64: the first k columns of each row, where the ids are the columns.

    The columns are divided into groups of neighbours. Only the k groups with the largest maxima can hold one of the k
    largest logits, so only their columns are compared one by one, and the logits are read once.

    Args:
        any_equals: which of equals are among the k, and in which order, may be any, which is faster.
    """
    groups, rest = divmod(z_TV.shape[1], _GROUP)
    if groups < 2 * k:
        return _first(z_TV, torch.arange(z_TV.shape[1], device=z_TV.device), k, any_equals)
    largest_TN = passes_of(z_TV).group_maxima(z_TV, groups, _GROUP)
    found_TK = largest_columns(largest_TN, k, any_equals)
    ids_TN = (found_TK.unsqueeze(-1) * _GROUP + torch.arange(_GROUP, device=z_TV.device)).flatten(1)
    if rest:
        others = torch.arange(groups * _GROUP, z_TV.shape[1], device=z_TV.device)
        ids_TN = torch.cat([ids_TN, others.expand(z_TV.shape[0], rest)], 1)
    return ids_TN.gather(1, _first(z_TV.gather(1, ids_TN), ids_TN, k, any_equals))


def _first(z_TN: Tensor, ids_TN: Tensor, k: int, any_equals: bool) -> Tensor:
    return z_TN.topk(k, -1).indices if any_equals else largest(z_TN, ids_TN, k)


def largest(z_TN: Tensor, ids_TN: Tensor, k: int) -> Tensor:
    """`[T, k]`, int64: where the first k of each row are. `ids_TN` broadcast to `z_TN`, differ, are below 2^31."""
    ids_TN = ids_TN.expand(z_TN.shape)
    if z_TN.dtype == torch.float64:  # no integer is wide enough for value and id
        by_id = ids_TN.argsort(-1)
        order = z_TN.gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return by_id.gather(-1, order)
    return _keys(z_TN, ids_TN).topk(k, -1).indices


def _keys(z_TN: Tensor, ids_TN: Tensor) -> Tensor:
    """int64 that compare as (value, -id): the bits of a float order as integers once those of negatives are turned."""
    bits = z_TN.float().add(0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (bits.long() << 32) - ids_TN

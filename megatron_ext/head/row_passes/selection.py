"""Passes over rows of logits for a top-k: the maxima of groups of columns, the largest columns among some groups, and
the columns equal to the k-th largest.

`kernels/selection.py` has the same functions in Triton, which read a row only where they must. Legend: T tokens, V
columns, N groups, K candidates: columns that include each row's k largest.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.head.call.chunk_sizes import blocks
from megatron_ext.numerics.tensors import on_host


def group_maxima(z_TV: Tensor, groups: int, width: int) -> Tensor:
    """Return the maximum of each of the first `groups` groups of `width` columns, NaN if any is NaN: `[T, N]`."""
    return z_TV[:, : groups * width].unflatten(1, (groups, width)).amax(-1)


def first_columns(z_TV: Tensor, groups_TN: Tensor | None, width: int, k: int, any_equals: bool) -> Tensor:
    """Return the columns of each row's k largest logits, falling, NaN first, of equals the lowest: `[T, k]`, int64.

    Args:
        groups_TN: int64, for each row the groups of `width` columns to choose from, besides the columns that are behind
            the last whole group; None: all columns.
        any_equals: any of equal logits may be among the k, in any order.
    """
    ids_TM = torch.arange(z_TV.shape[1], device=z_TV.device).expand(z_TV.shape)
    if groups_TN is not None:
        others_Tm = ids_TM[:, z_TV.shape[1] // width * width :]
        ids_TM = (groups_TN.unsqueeze(-1) * width + ids_TM[:1, :width]).flatten(1)
        ids_TM = torch.cat([ids_TM, others_Tm], 1)
        z_TV = z_TV.gather(1, ids_TM)
    return ids_TM.gather(1, z_TV.topk(k, -1).indices if any_equals else largest(z_TV, ids_TM, k))


def largest(z_TN: Tensor, ids_TN: Tensor, k: int) -> Tensor:
    """Return the indices of each row's k largest logits, the lower id first among equals: `[T, k]`, int64. `ids_TN`
    broadcast to `z_TN`, differ within a row, and are below 2^31."""
    ids_TN = ids_TN.expand(z_TN.shape)
    if z_TN.dtype == torch.float64:  # no integer is wide enough for value and id
        by_id = ids_TN.argsort(-1)
        order = z_TN.gather(-1, by_id).sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return by_id.gather(-1, order)
    return _keys(z_TN, ids_TN).topk(k, -1).indices


def _keys(z_TN: Tensor, ids_TN: Tensor) -> Tensor:
    """Return int64 keys that compare as (value, -id): a float's bits order as integers if negatives' are inverted."""
    bits = z_TN.float().add(0.0).view(torch.int32)  # -0.0 + 0.0 is 0.0
    bits = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).masked_fill(z_TN.isnan(), 0x7FFFFFFF)
    return (bits.long() << 32) - ids_TN


def equal_counts(z_TV: Tensor, z_TK: Tensor, k: int) -> Tensor:
    """Count the columns of each row that equal its k-th largest: `[T]`, int64; `z_TK`: candidates' logits, falling."""
    kth_T1 = z_TK[:, k - 1 : k]
    count_T = (z_TK == kth_T1).sum(1)
    if z_TK.shape[1] == z_TV.shape[1]:
        return count_T
    if not on_host(z_TV):
        return (z_TV == kth_T1).sum(1)
    for rows in (z_TK[:, -1] == kth_T1[:, 0]).nonzero()[:, 0].split(64):
        count_T[rows] = (z_TV[rows] == kth_T1[rows]).sum(1)
    return count_T


def add_at_equals(out_TV: Tensor, z_TV: Tensor, kth_T: Tensor, value_T: Tensor, besides_TK: Tensor) -> None:
    """Add a row's value in its columns whose logit equals its k-th logit, except in the columns `besides`.

    Args:
        out_TV: added to, any floating dtype.
        z_TV: logits, at least as many columns as `out`.
        kth_T: in the logits' dtype.
        value_T: in `out`'s dtype; a row whose value is 0 is not changed.
        besides_TK: int64, columns that have their gradient already; numbers outside [0, V) are ignored.
    """
    columns = out_TV.shape[1]
    tied = value_T.nonzero()[:, 0] if on_host(value_T) else None
    for at in blocks(out_TV) if tied is None else tied.split(64):
        value_u1 = value_T[at].unsqueeze(1)
        equal_uV = (z_TV[at, :columns] == kth_T[at].unsqueeze(1)) & (value_u1 != 0)
        own_uK = (besides_TK[at] >= 0) & (besides_TK[at] < columns)
        there_uV = F.pad(equal_uV, (0, 1))  # one column more for those that are outside
        there_uV.scatter_(1, besides_TK[at].where(own_uK, columns), False)
        out_TV[at] += value_u1.where(there_uV[:, :-1], 0.0)

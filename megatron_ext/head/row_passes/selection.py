"""Passes over rows of logits that a top-k takes: the maxima of groups of columns, and what equals the k-th largest.

`kernels/selection.py` has the same functions in Triton, which read a row only where they must. Legend: T tokens, V
columns, N groups, K candidates: columns of which each row's k largest are some.
"""

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.head.row_passes.row_blocks import blocks
from megatron_ext.numerics.readable_values import has_values


def group_maxima(z_TV: Tensor, groups: int, width: int) -> Tensor:
    """`[T, N]`: the largest of each of `groups` groups of `width` columns, NaN where one is NaN."""
    return z_TV[:, : groups * width].unflatten(1, (groups, width)).amax(-1)


def equal_counts(z_TV: Tensor, z_TK: Tensor, k: int) -> Tensor:
    """`[T]`, int64: how many columns of each row equal its k-th largest; `z_TK`: the logits of candidates, falling."""
    kth_T1 = z_TK[:, k - 1 : k]
    count_T = (z_TK == kth_T1).sum(1)
    if z_TK.shape[1] == z_TV.shape[1]:
        return count_T
    if not is_free_to_look(z_TV):
        return (z_TV == kth_T1).sum(1)
    for rows in (z_TK[:, -1] == kth_T1[:, 0]).nonzero()[:, 0].split(64):
        count_T[rows] = (z_TV[rows] == kth_T1[rows]).sum(1)
    return count_T


def add_at_equals(out_TV: Tensor, z_TV: Tensor, kth_T: Tensor, value_T: Tensor, besides_TK: Tensor) -> None:
    """Add a row's value at its columns that equal its k-th logit, `besides` aside.

    Args:
        out_TV: added to, any floating dtype.
        z_TV: at least as many columns.
        kth_T: in the logits' dtype.
        value_T: in `out`'s dtype; nothing is read of a row whose value is 0.
        besides_TK: int64, columns that have their part already; numbers that no column has are none.
    """
    columns = out_TV.shape[1]
    tied = value_T.nonzero()[:, 0] if is_free_to_look(value_T) else None
    for at in blocks(out_TV) if tied is None else tied.split(64):
        value_u1 = value_T[at].unsqueeze(1)
        equal_uV = (z_TV[at, :columns] == kth_T[at].unsqueeze(1)) & (value_u1 != 0)
        own_uK = (besides_TK[at] >= 0) & (besides_TK[at] < columns)
        there_uV = F.pad(equal_uV, (0, 1))  # one column more for what is not here
        there_uV.scatter_(1, besides_TK[at].where(own_uK, columns), False)
        out_TV[at] += value_u1.where(there_uV[:, :-1], 0.0)


def is_free_to_look(x: Tensor) -> bool:
    """Whether a branch may depend on values without waiting for a device."""
    return has_values(x) and not x.is_cuda

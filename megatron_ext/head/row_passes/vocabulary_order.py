"""The order of token ids by logit, the same on every device and dtype: larger logits first, equal ones by lowest id."""

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
    groups = z_TV.shape[1] // _GROUP
    found_TK = None
    if groups >= 2 * k:
        found_TK = largest_columns(passes_of(z_TV).group_maxima(z_TV, groups, _GROUP), k, any_equals)
    return passes_of(z_TV).first_columns(z_TV, found_TK, _GROUP, k, any_equals)

"""Checks of token ids, k, top-p and temperature; how they are raised: see `argument_checks.size_fault`."""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.validation.readable_values import check_plain, has_values, raise_if


def filters(top_k: Any, top_p: Any) -> bool:
    """Whether top-k or top-p is on.

    Raises:
        ValueError: top_k is neither None, -1 nor a positive int, or top_p is not in (0, 1].
    """
    if top_k is not None and (isinstance(top_k, bool) or not isinstance(top_k, int) or (top_k < 1 and top_k != -1)):
        raise ValueError(f"top_k is {top_k!r}: it must be an int of at least 1; None or -1 turns it off")
    if isinstance(top_p, bool) or not isinstance(top_p, (int, float)) or not 0 < top_p <= 1:
        raise ValueError(f"top_p is {top_p!r}: it must be a number in (0, 1]; 1.0 turns it off")
    return top_k not in (None, -1) or top_p < 1


def check_k(argument: str, k: Any, size: int, hint: str = "") -> None:
    """Raises ValueError unless k of the vocabulary's `size` ids can be taken."""
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= size:
        raise ValueError(f"{argument} is {k!r}: it must be an int from 1 to the vocabulary's size {size}{hint}")


def check_ids(indices: Tensor, size: int, hint: str = "") -> None:
    """Raises ValueError unless `indices` are `[..., K]` integers in `[0, size)`, as `check_labels` does."""
    check_plain("indices", indices)
    if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.dtype in (torch.bool, torch.complex64):
        kind = indices.dtype if isinstance(indices, Tensor) else type(indices).__name__
        raise ValueError(f"indices is {kind}: it must be a tensor of integer token ids; cast it with .long()")
    if indices.dim() == 0 or indices.shape[-1] == 0:
        raise ValueError(f"indices has shape {tuple(indices.shape)}: it must be [..., K] with K at least 1")
    if has_values(indices):
        ids = indices.long()  # a narrow integer would wrap the size
        raise_if(
            ((ids < 0) | (ids >= size)).any(),
            f"indices holds one outside [0, {size}): each must be a token id of the vocabulary; clamp those of tokens "
            f"that do not count and mask their results{hint}",
        )

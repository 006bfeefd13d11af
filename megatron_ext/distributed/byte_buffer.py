"""Tensors of any dtypes, laid one after the other into a buffer of bytes that is sent as one message."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

Form = tuple[tuple[int, ...], torch.dtype]
"""A tensor's shape and dtype."""

_ALIGNED = 16  # the size of the largest dtype: every tensor starts at a multiple of it


def room(forms: Iterable[Form]) -> int:
    """Count the bytes that tensors of these forms take together."""
    return sum(-(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED for shape, dtype in forms)


def views(buffer: Tensor, forms: Iterable[Form]) -> list[Tensor]:
    """Return the tensors in `buffer`, as views."""
    found, start = [], 0
    for shape, dtype in forms:
        found.append(buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape))
        start += room([(shape, dtype)])
    return found

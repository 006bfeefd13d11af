"""Tensors of any dtypes one behind the other in a buffer of bytes, which is one message for all of them."""

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor

Form = tuple[tuple[int, ...], torch.dtype]
"""A tensor's shape and dtype."""

_ALIGNED = 16  # the size of the largest dtype: every tensor starts where its dtype may


def room(forms: Iterable[Form]) -> int:
    """Bytes that such tensors take together."""
    return sum(-(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED for shape, dtype in forms)


def views(buffer: Tensor, forms: Iterable[Form]) -> list[Tensor]:
    """The tensors that lie in `buffer`."""
    found, start = [], 0
    for shape, dtype in forms:
        found.append(buffer[start : start + prod(shape) * dtype.itemsize].view(dtype).view(shape))
        start += room([(shape, dtype)])
    return found

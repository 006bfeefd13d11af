"""Tensors in one buffer of bytes, with a mark of which rank failed: what stages send each other is one message each.

A rank that fails in a pass goes on sending and receiving, with zeros for what it cannot compute and with its mark,
until the schedule ends; so no other rank waits for it in vain, and every rank that a mark has reached raises at the
end. The marks stay on the device until then.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

_ALIGNED = 16  # bytes: views of any dtype begin there

Form = tuple[tuple[int, ...], torch.dtype]


class Marks:
    """Which rank failed, as far as this one knows: its number in the job plus one, 0 for none. On `device`."""

    def __init__(self, device: torch.device):
        self.mark = torch.zeros(1, dtype=torch.int64, device=device)

    def fail(self, rank: int) -> None:
        self.mark.clamp_(min=rank + 1)

    def pack(self, *tensors: Tensor) -> Tensor:
        """A new buffer with the tensors and this rank's mark."""
        buffer = empty_parcel([(tuple(tensor.shape), tensor.dtype) for tensor in tensors], self.mark.device)
        forms: list[Form] = [*((tuple(tensor.shape), tensor.dtype) for tensor in tensors), ((1,), torch.int64)]
        for view, tensor in zip(_views(buffer, forms), (*tensors, self.mark), strict=True):
            view.copy_(tensor)
        return buffer

    def unpack(self, buffer: Tensor, forms: Sequence[Form]) -> list[Tensor]:
        """The tensors in a buffer that has arrived, as views of it; its mark is kept."""
        *tensors, mark = _views(buffer, [*forms, ((1,), torch.int64)])
        torch.maximum(self.mark, mark, out=self.mark)
        return tensors


def empty_parcel(forms: Sequence[Form], device: torch.device) -> Tensor:
    """A buffer for tensors of these shapes and dtypes, and the mark."""
    size = sum(_room(form) for form in forms) + _room(((1,), torch.int64))
    return torch.zeros(size, dtype=torch.uint8, device=device)


def _room(form: Form) -> int:
    shape, dtype = form
    return -(-prod(shape) * dtype.itemsize // _ALIGNED) * _ALIGNED


def _views(buffer: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    views, at = [], 0
    for form in forms:
        shape, dtype = form
        views.append(buffer[at : at + prod(shape) * dtype.itemsize].view(dtype).view(shape))
        at += _room(form)
    return views

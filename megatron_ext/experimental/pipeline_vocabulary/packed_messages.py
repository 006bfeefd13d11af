"""Several tensors packed into one message between stages, with a field that says which rank failed.

A rank that fails in a pass goes on sending and receiving, with zeros for results that it lacks and with its mark,
until the schedule ends; so no other rank waits for it in vain, and every rank that a mark has reached raises at the
end. The marks stay on the device until then.
"""

import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.byte_buffer import Form, room, views

_MARK: Form = ((1,), torch.int64)


class Marks:
    """The failed rank, as far as this rank knows: its global rank plus one, 0 for none, in a tensor on `device`."""

    def __init__(self, device: torch.device):
        self.mark = torch.zeros(1, dtype=torch.int64, device=device)
        self._error: Exception | None = None
        self._before = 0  # the mark when it was raised
        self._expected: list[tuple[Tensor, str]] = []

    def expect(self, found: Tensor, expected: Tensor, name: str) -> None:
        """Mark this rank if two tensors differ, which the device may find out later.

        Nothing is marked if another rank has failed before: then zeros came in place of the expected numbers.
        """
        if found.shape != expected.shape:
            raise ValueError(f"the {name} have shape {tuple(found.shape)}, {tuple(expected.shape)} was expected")
        differ = (found != expected).any()
        self._expected.append((differ, name))
        self.mark.copy_(torch.where(self.mark == 0, differ * (dist.get_rank() + 1), self.mark))

    def attempt(self, compute: Callable[[], Any], otherwise: Any = None) -> Any:
        """Return `compute()`; `otherwise` if it fails, or if a computation on this rank has failed before."""
        if not self.has_failed:
            try:
                return compute()
            except Exception as error:
                self.fail(error)
        return otherwise

    @property
    def has_failed(self) -> bool:
        """Return whether this rank has failed."""
        return self._error is not None

    def fail(self, error: Exception) -> None:
        """Mark this rank. Waits for the device."""
        traceback.clear_frames(error.__traceback__)
        self._error, self._before = error, int(self.mark)
        self.mark.clamp_(min=dist.get_rank() + 1)

    def raise_what_failed(self) -> None:
        """Raise this rank's own error, or a RuntimeError that names another rank. Waits for the device."""
        failed = self._before or int(self.mark)
        if self._error is not None and not self._before:
            raise self._error
        if failed == dist.get_rank() + 1:
            name = next(name for differ, name in self._expected if differ)
            raise ValueError(
                f"the {name} are not those that follow from the model's own, by roll_tensor: a vocabulary shared over "
                f"pipeline stages cannot be trained with others; train without sharing"
            )
        if failed:
            raise RuntimeError(
                f"rank {failed - 1} failed in this step and the other stages of its pipeline end with it; its own "
                f"error says why"
            ) from self._error  # its own error, if any, came of the zeros that were sent

    def pack(self, *tensors: Tensor) -> Tensor:
        """Make a new buffer with the tensors and this rank's mark."""
        forms = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        buffer = empty_parcel(forms, self.mark.device)
        for view, tensor in zip(views(buffer, [*forms, _MARK]), (*tensors, self.mark), strict=True):
            view.copy_(tensor)
        return buffer

    def unpack(self, buffer: Tensor, forms: Sequence[Form]) -> list[Tensor]:
        """Return the tensors in a buffer that has arrived, as views of it, and keep its mark."""
        *tensors, mark = views(buffer, [*forms, _MARK])
        torch.maximum(self.mark, mark, out=self.mark)
        return tensors


def empty_parcel(forms: Sequence[Form], device: torch.device) -> Tensor:
    """Make a buffer for tensors of these shapes and dtypes, and the mark."""
    return torch.zeros(room([*forms, _MARK]), dtype=torch.uint8, device=device)

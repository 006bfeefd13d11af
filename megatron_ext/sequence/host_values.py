"""Small tensors on another device than the work: moved there, or read on the host once and not once a layer."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


class HostMemo(Generic[T]):
    """`memo(tensor, *more)` is `read(tensor, *more)`, remembered while the tensor lives unchanged.

    All layers of a model get the same mask and the same document boundaries. Reading them costs a host synchronisation
    on a GPU, which is thus paid once per micro-batch. On the CPU nothing is remembered: there numpy may have changed
    what a tensor holds, without a new version. So may a collective, on a GPU too: what it gives must be a new tensor.
    """

    def __init__(self, read: Callable[..., T]):
        self._read = read
        self._seen = WeakTensorKeyDictionary()

    def __call__(self, tensor: Tensor, *more: object) -> T:
        if tensor.device.type == "cpu" or tensor.is_inference():  # which has no version
            return self._read(tensor, *more)
        state = (tensor._version, more)
        seen = self._seen.get(tensor)
        if seen is None or seen[0] != state:
            seen = self._seen[tensor] = (state, self._read(tensor, *more))
        return seen[1]


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`. The host does not wait for a copy to a GPU; from one it must, to see the values at all."""
    return x.to(device, non_blocking=device.type != "cpu")

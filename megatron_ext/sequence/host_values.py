"""Small tensors on another device than the work: copied to it, or read on the host once instead of once a layer."""

from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


class HostMemo(Generic[T]):
    """Memo of `read(tensor, *more)`, whose results are kept while the tensor lives and its version does not change.

    All layers of a model get the same mask and the same document boundaries. Reading these tensors from a GPU is a host
    synchronisation, which the memo makes once per micro-batch. Results for CPU tensors are not kept, as numpy can
    change them without a new version. So can a collective on a GPU: pass its result as a new tensor object.
    """

    def __init__(self, read: Callable[..., T]):
        self._read = read
        self._seen = WeakTensorKeyDictionary()

    def __call__(self, tensor: Tensor, *more: object) -> T:
        if tensor.device.type == "cpu" or tensor.is_inference():  # an inference tensor has no version
            return self._read(tensor, *more)
        state = (tensor._version, more)
        seen = self._seen.get(tensor)
        if seen is None or seen[0] != state:
            seen = self._seen[tensor] = (state, self._read(tensor, *more))
        return seen[1]


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """Return `x` on `device`. The host waits for a copy to the CPU, but not for a copy to a GPU."""
    return x.to(device, non_blocking=device.type != "cpu")

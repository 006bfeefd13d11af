"""Values of small tensors cached on the host, so that they are copied from the GPU once and not once a layer."""

from collections.abc import Callable
from typing import Generic, TypeVar

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

T = TypeVar("T")


class HostMemo(Generic[T]):
    """`memo(tensor, *more)` is `read(tensor, *more)`, remembered while the tensor lives unchanged.

    All layers of a model get the same mask and the same document boundaries. Reading them costs a host synchronisation
    on a GPU, which is thus paid once per micro-batch.
    """

    def __init__(self, read: Callable[..., T]):
        self._read = read
        self._seen = WeakTensorKeyDictionary()

    def __call__(self, tensor: Tensor, *more: object) -> T:
        if tensor.is_inference():  # has no version to tell whether it changed
            return self._read(tensor, *more)
        state = (tensor._version, more)
        seen = self._seen.get(tensor)
        if seen is None or seen[0] != state:
            seen = self._seen[tensor] = (state, self._read(tensor, *more))
        return seen[1]

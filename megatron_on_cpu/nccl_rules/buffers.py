"""Tensors as bytes, and reductions of the tensors that all ranks sent."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "premul_sum": torch.add,
    "product": torch.mul,
    "min": torch.fmin,  # NaN does not count
    "max": torch.fmax,
}


@contextmanager
def unobserved() -> Iterator[None]:
    """Hide the backend's own arithmetic from the user's program: no dispatch mode sees it, no gradient is recorded."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


class _Memory:
    """The memory of a tensor, for NumPy; after `Tensor.numpy()` the tensor's storage could not be resized any more."""

    def __init__(self, x: Tensor):
        self.kept = x
        array = {"shape": (size_bytes(x),), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 3}
        self.__array_interface__ = array


def content(x: Tensor) -> memoryview:
    """Return the bytes of `x` in the order of memory, as a view of this memory."""
    if x.numel() == 0:
        return memoryview(b"")
    import numpy as np

    with unobserved():
        return np.asarray(_Memory(x.detach())).data


def size_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def fill(x: Tensor, data: memoryview | bytes) -> None:
    """Overwrite the elements of `x`, seen by no version counter and no dispatch mode."""
    if x.numel():
        content(x)[:] = data


def values(data: memoryview | bytearray, dtype: torch.dtype) -> Tensor:
    """Return `data` as a tensor [elements], which shares its memory."""
    return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


def reduce(pieces: list[Tensor], op: str, factor: float = 1.0) -> Tensor:
    """Reduce tensors [N] by `op` in the order of ranks, in their own dtype; the bits are the same on every rank.

    As in NCCL, a sum of booleans is their maximum, an average divides before it adds (of integers after it), and
    "premul_sum" multiplies by `factor` before it adds. FP8 numbers are reduced in fp32, and rounded at each step.
    """
    dtype = pieces[0].dtype
    if op == "premul_sum":
        pieces = [x * torch.tensor(factor, dtype=dtype) for x in pieces]
    if dtype.itemsize == 1 and dtype.is_floating_point:
        return functools.reduce(lambda x, y: _OPERATORS[op](x.float(), y.float()).to(dtype), _averaged(pieces, op))
    if dtype is torch.bool:
        pieces, op = [x.to(torch.uint8) for x in pieces], "max" if op == "sum" else op
    total = functools.reduce(_OPERATORS[op], _averaged(pieces, op))
    if op == "avg" and not dtype.is_floating_point:
        total = torch.div(total, len(pieces), rounding_mode="trunc")
    return total.to(dtype)


def _averaged(pieces: list[Tensor], op: str) -> list[Tensor]:
    dtype = pieces[0].dtype
    if op != "avg" or not dtype.is_floating_point:
        return pieces
    return [(x.float() if dtype.itemsize == 1 else x).mul(1 / len(pieces)).to(dtype) for x in pieces]

"""Tensors as bytes, and reductions of what all ranks sent."""

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
    """The backend's own arithmetic, no part of the user's program: no mode sees it, no gradient is recorded."""
    with torch.no_grad(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


class _Memory:
    """The memory of a tensor, for NumPy. `Tensor.numpy()` would forbid its owner to resize it ever after."""

    def __init__(self, x: Tensor):
        self.kept = x
        array = {"shape": (size_bytes(x),), "typestr": "|u1", "data": (x.data_ptr(), False), "version": 3}
        self.__array_interface__ = array


def content(x: Tensor) -> memoryview:
    """The bytes of `x` in the order of memory, sharing it."""
    if x.numel() == 0:
        return memoryview(b"")
    import numpy as np

    with unobserved():
        return np.asarray(_Memory(x.detach())).data


def size_bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


def fill(x: Tensor, data: memoryview | bytes) -> None:
    """Overwrite the elements of `x`; no version counter and no mode sees it."""
    if x.numel():
        content(x)[:] = data


def values(data: memoryview | bytearray, dtype: torch.dtype) -> Tensor:
    """`data` as a tensor [elements]."""
    return torch.frombuffer(data, dtype=dtype) if len(data) else torch.empty(0, dtype=dtype)


def reduce(pieces: list[Tensor], op: str, factor: float = 1.0) -> Tensor:
    """The reduction `op` of tensors [N] in the order of ranks, in their own type; the bits are the same on every rank.

    As NCCL does it: a sum of booleans is their maximum, an average multiplies before it adds, but for integers, and
    "premul_sum" multiplies by `factor` before it adds. Numbers of 8 bits are rounded at each step.
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

"""Count the bytes of all tensors, real or fake, that a piece of code makes, and run the code as one rank of many."""

import importlib
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


class ByteCounter(TorchDispatchMode):
    """Counter of the bytes of all storages that appear while it is active, until they are freed.

    Attributes:
        peak_bytes, alive_bytes: the largest number of bytes at any moment, and the present number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = self.alive_bytes = 0
        self._known: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # a shortcut: half of all calls are of this operator
        kwargs = kwargs or {}
        for x in tensors_in((*args, *kwargs.values())):
            self._known.add(x.untyped_storage())  # made before the count began
        out = func(*args, **kwargs)
        self.ran(func, args, kwargs, out)
        for x in tensors_in((out,)):
            if (storage := x.untyped_storage()) not in self._known:
                self._known.add(storage)
                self.alive_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.alive_bytes)
                self.made(x)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return out

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator that ran; for subclasses that count more than bytes."""

    def made(self, x: torch.Tensor) -> None:
        """Count a tensor with a new storage; for subclasses that count more than bytes."""

    def _freed(self, nbytes: int) -> None:
        self.alive_bytes -= nbytes


def tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors among the values, and in lists and tuples among them."""
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from tensors_in(x)


@contextmanager
def one_rank_of(ranks: int) -> Iterator[dist.ProcessGroup | None]:
    """Make tensors fake, and this process rank 0 of a fake group of `ranks`; yield the group (None for one rank)."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"):  # torch before 2.11
        importlib.import_module("torch.distributed._tools.fake_collectives")
    if ranks == 1:
        with FakeTensorMode():
            yield None
        return
    with fake_world(ranks), FakeTensorMode():
        yield dist.group.WORLD


@contextmanager
def fake_world(ranks: int) -> Iterator[None]:
    """Make a default group of `ranks`, in which this process is rank 0 and nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()

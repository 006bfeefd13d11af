"""Exact costs of a piece of code, without running it at full speed or at all: FLOPs, peak bytes, collectives.

Works on real tensors and, at any size on any machine, on fake ones with the `fake` process group.
"""

import importlib
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, shape_wrapper

from megatron_ext.distributed.counting import count_collectives

aten = torch.ops.aten


def _addmm_flops(total, a, b, *_, **__) -> int:
    """Of shapes, as `shape_wrapper` calls it."""
    return 2 * a[0] * a[1] * b[1]


# torch knows matmuls by their functional names only, and takes addmm's `out_dtype` for a shape.
_FORMULAS = flop_registry | {aten.addmm_: shape_wrapper(_addmm_flops), aten.addmm: shape_wrapper(_addmm_flops)}


@dataclass
class Costs:
    """What `measure()` found. Bytes are beyond what was alive when it began."""

    flops: int = 0
    peak_bytes: int = 0
    alive_bytes: int = 0  # when it ended
    collectives: Counter[str] = field(default_factory=Counter)
    largest: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)  # (dtype, shape) of new tensors


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, list | tuple):
            yield from _tensors(x)


class _Meter(TorchDispatchMode):
    """FLOPs of all products, and bytes of all storages that appear while it is active, until they are freed."""

    def __init__(self, costs: Costs):
        super().__init__()
        self.costs, self.known = costs, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.prim.device.default and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # half of all calls ask for that
        kwargs = kwargs or {}
        for x in _tensors((*args, *kwargs.values())):
            self.known.add(x.untyped_storage())  # older than the measurement
        out = func(*args, **kwargs)
        if formula := _FORMULAS.get(func._overloadpacket):
            self.costs.flops += formula(*args, **kwargs, out_val=out)
        for x in _tensors((out,)):
            if (storage := x.untyped_storage()) not in self.known:
                self.known.add(storage)
                self.costs.alive_bytes += storage.nbytes()
                self.costs.peak_bytes = max(self.costs.peak_bytes, self.costs.alive_bytes)
                self.costs.largest[(str(x.dtype), tuple(x.shape))] += 1
                weakref.finalize(storage, self._freed, storage.nbytes())
        return out

    def _freed(self, nbytes: int) -> None:
        self.costs.alive_bytes -= nbytes


@contextmanager
def measure() -> Iterator[Costs]:
    """`with measure() as costs:` fills `costs` once the block is left (the peak grows as it runs)."""
    costs = Costs()
    with count_collectives() as counts, _Meter(costs):
        yield costs
    costs.collectives = counts.copy()


@contextmanager
def one_rank_of(ranks: int) -> Iterator[dist.ProcessGroup | None]:
    """Fake tensors, and this process as rank 0 of a fake group of `ranks`. Yields the group (None for one rank)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"):  # torch before 2.11
        importlib.import_module("torch.distributed._tools.fake_collectives")
    if ranks == 1:
        with FakeTensorMode():
            yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with FakeTensorMode():
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()

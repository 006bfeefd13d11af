"""Exact costs of a piece of code, without running it at full speed or at all: FLOPs, peak bytes, collectives.

Works on real tensors and, at any size on any machine, on fake ones with the `fake` process group.
"""

import importlib
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from megatron_ext.distributed.counting import count_collectives

aten = torch.ops.aten


def _addmm_flops(total, a, b, *_, **__) -> int:
    """Of shapes: what FlopCounterMode hands to a formula."""
    return 2 * a[0] * a[1] * b[1]


# FlopCounterMode knows matmuls by their functional names only, and takes addmm's `out_dtype` for a shape.
_FORMULAS = {aten.addmm_: _addmm_flops, aten.addmm: _addmm_flops}


@dataclass
class Costs:
    """What `measure()` found. Bytes are beyond what was alive when it began."""

    flops: int = 0
    peak_bytes: int = 0
    alive_bytes: int = 0  # when it ended
    collectives: Counter[str] = field(default_factory=Counter)
    largest: Counter[tuple[str, tuple[int, ...]]] = field(default_factory=Counter)  # (dtype, shape) of new tensors


class _Memory(TorchDispatchMode):
    """Bytes of all storages that appear while it is active, until they are freed."""

    def __init__(self, costs: Costs):
        super().__init__()
        self.costs, self.known = costs, weakref.WeakSet()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for x in tree_iter((args, kwargs)):
            if isinstance(x, torch.Tensor):
                self.known.add(x.untyped_storage())  # older than the measurement
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.known:
                storage = x.untyped_storage()
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
    flops = FlopCounterMode(display=False, custom_mapping=_FORMULAS)
    with flops, count_collectives() as counts, _Memory(costs):
        yield costs
    costs.flops, costs.collectives = flops.get_total_flops(), counts.copy()


@contextmanager
def one_rank_of(ranks: int, rank: int = 0) -> Iterator[dist.ProcessGroup | None]:
    """Fake tensors, and this process as `rank` of a fake group of `ranks`. Yields the group (None for one rank)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::_allgather_base_", "Meta"):  # torch before 2.11
        importlib.import_module("torch.distributed._tools.fake_collectives")
    if ranks == 1:
        with FakeTensorMode():
            yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        with FakeTensorMode():
            yield dist.group.WORLD
    finally:
        dist.destroy_process_group()

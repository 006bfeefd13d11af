"""Exact costs of a piece of code, without running it at full speed or at all: FLOPs, peak bytes, collectives.

The meter works on real tensors and, at any size on any machine, on fake tensors with the `fake` process group.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry, shape_wrapper

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.memory.byte_counter import ByteCounter, one_rank_of

__all__ = ["MIB", "Costs", "measure", "one_rank_of", "peak_mib"]

MIB = 2**20

aten = torch.ops.aten


def _addmm_flops(total, a, b, *_, **__) -> int:
    """Count the FLOPs of `addmm` from shapes, as `shape_wrapper` calls the function."""
    return 2 * a[0] * a[1] * b[1]


# torch's registry has matmuls by their functional names only, and takes addmm's `out_dtype` for a shape.
_FORMULAS = flop_registry | {aten.addmm_: shape_wrapper(_addmm_flops), aten.addmm: shape_wrapper(_addmm_flops)}


class Costs(ByteCounter):
    """Counter of bytes and of the FLOPs of all products; `measure()` adds the counts of collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self.collectives: Counter[str] = Counter()
        self.largest: Counter[tuple[str, tuple[int, ...]]] = Counter()  # (dtype, shape) of new tensors

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        if formula := _FORMULAS.get(func._overloadpacket):
            self.flops += formula(*args, **kwargs, out_val=out)

    def made(self, x: torch.Tensor) -> None:
        self.largest[(str(x.dtype), tuple(x.shape))] += 1


@contextmanager
def measure() -> Iterator[Costs]:
    """Yield costs that count while the block runs; the collectives are there after the block."""
    with count_collectives() as counts, Costs() as costs:
        yield costs
    costs.collectives = counts.copy()


def peak_mib(step: Callable[[], object]) -> float:
    """Return the peak MiB of all tensors that `step` makes."""
    with measure() as costs:
        step()
    return costs.peak_bytes / MIB

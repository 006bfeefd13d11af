"""Exact costs of a piece of code, without running it at full speed or at all: FLOPs, peak bytes, collectives.

Works on real tensors and, at any size on any machine, on fake ones with the `fake` process group.
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


# torch knows matmuls by their functional names only, and takes addmm's `out_dtype` for a shape.
_FORMULAS = flop_registry | {aten.addmm_: shape_wrapper(_addmm_flops), aten.addmm: shape_wrapper(_addmm_flops)}


class Costs(ByteCounter):
    """FLOPs of all products, beside the bytes, and the collectives, which `measure()` counts."""

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
    """`with measure() as costs:` fills `costs` once the block is left (the peak grows as it runs)."""
    with count_collectives() as counts, Costs() as costs:
        yield costs
    costs.collectives = counts.copy()


def peak_mib(step: Callable[[], object]) -> float:
    """Return the most MiB of all tensors that `step` makes, at any moment."""
    with measure() as costs:
        step()
    return costs.peak_bytes / MIB

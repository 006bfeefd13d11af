"""Time of a head's step on a known GPU, estimated from its launches as they are counted on fake tensors.

A launch takes the longer of two times: its FLOPs and bytes at the GPU's rates (products by whole waves of tiles), and
its joules at the card's limit of power. `benchmarks/plan.py` prints each launch.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call.gpu_properties import DEVICES, NAMES, Device, product_seconds
from megatron_ext.memory.byte_counter import ByteCounter, tensors_in

aten = torch.ops.aten
# The limit of an H100's or H200's power, and what an H200 takes while it computes nothing.
WATTS, AT_REST = 700.0, 110.0
# A byte costs what is published of HBM and the way through the caches, and a FLOP of a 16-bit product what fits the
# rows of benchmarks/results/nvidia-h200.csv by the fewest percent, on random numbers of size 1.
JOULES_PER_FLOP, JOULES_PER_BYTE = 0.85e-12, 50e-12
# No estimate is further from a row measured on an H200, of Megatron-Core's head and of ours.
PERCENT = 6
# Where a launch takes less in the mean, the host may take longer to start it, and its time is not known; the rows'
# shortest mean is 150 us. Where products are a smaller share of the time, no row was measured.
SHORT_LAUNCH, PRODUCTS_SHARE = 50e-6, 0.5

GPUS = {name.lower(): DEVICES[name] for name in ("H100", "H200")}
PRODUCTS = {aten.mm, aten.addmm, aten.addmm_}
PICKING = {aten.index, aten.index_select, aten.gather, aten.embedding}
PLACING = {aten.index_put_, aten._index_put_impl_, aten.index_add_, aten.scatter_, aten.scatter_add_}
WRITING_ONLY = {aten.copy_, aten.fill_, aten.zero_}
NO_LAUNCH = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.detach, aten.detach_}


def gpu_here() -> tuple[Device | None, str]:
    """The GPU that torch sees, if it is one of `GPUS`, and its name; nothing where there is none."""
    if not torch.cuda.is_available():
        return None, ""
    name = torch.cuda.get_device_name()
    return GPUS.get(NAMES.get(name, "").lower()), name


class LaunchCounter(ByteCounter):
    """Seconds of each launch on `device`, beside the bytes; what ranks send each other is not in them."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device
        self.launches: list[float] = []
        self.flops = 0

    @property
    def seconds(self) -> float | None:
        """The sum; None: it is not known, because launches are short or products a small part."""
        total = sum(self.launches)
        known = total >= SHORT_LAUNCH * len(self.launches) and self.flops / self.device.flops >= PRODUCTS_SHARE * total
        return total if known else None

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Counts an operator: it reads its inputs and writes its results once, or some elements of them."""
        read = [value for name, value in kwargs.items() if name != "out"]
        packet = func.overloadpacket
        given, results = [*tensors_in((*args, *read))], [*tensors_in((out,))]
        if func.namespace != "aten" or packet in NO_LAUNCH:
            return
        changes = func._schema.is_mutable
        if not changes and {x.untyped_storage()._cdata for x in results} <= {x.untyped_storage()._cdata for x in given}:
            return  # a view
        nbytes = _nbytes(given) + _nbytes(results)
        if packet in PICKING:
            nbytes = 3 * _nbytes(results)  # places are read, and elements read and written
        elif packet in PLACING:
            nbytes = 3 * _nbytes(tensors_in(args[2:]))
        elif packet in WRITING_ONLY:
            nbytes = _nbytes(given)
        flops, seconds = 0, nbytes / self.device.bytes_per_s
        if packet in PRODUCTS:
            (m, k), n = given[-2].shape, given[-1].shape[1]
            result_bytes = _nbytes(results) * (1 if packet is aten.mm else 2)
            flops, seconds = 2 * m * n * k, product_seconds(self.device, m, n, k, result_bytes)
        self._add(seconds, flops, nbytes)

    def kernel(self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any]) -> None:
        """Counts a Triton kernel: each tensor that it is given is read or written once."""
        nbytes = _nbytes(tensors_in(arguments.values()))
        self._add(nbytes / self.device.bytes_per_s, 0, nbytes)

    def _add(self, seconds: float, flops: int, nbytes: int) -> None:
        self.flops += flops
        self.launches.append(max(seconds, joules(flops, nbytes) / (WATTS - AT_REST)))


def joules(flops: int, nbytes: int) -> float:
    """Return the energy of a product or of traffic, without what the card takes at rest."""
    return JOULES_PER_FLOP * flops + JOULES_PER_BYTE * nbytes


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)

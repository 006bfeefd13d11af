"""Time of a head's step on a known GPU, estimated from its launches, which are counted on fake tensors.

A launch takes the longer of two times: that of its FLOPs and bytes at the GPU's rates (products by whole waves of
tiles), and that of its joules at the card's power limit. `benchmarks/plan.py` prints each launch.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call.gpu_properties import DEVICES, NAMES, Device, product_seconds
from megatron_ext.memory.byte_counter import ByteCounter, tensors_in

aten = torch.ops.aten
# The power limit of an H100 or H200, and the power of an idle H200, in watts.
WATTS, AT_REST = 700.0, 110.0
# Joules of a byte: published figures of HBM and the way through the caches. Joules of a FLOP of a 16-bit product: the
# best fit to the rows of benchmarks/results/nvidia-h200.csv, measured on random numbers of size 1.
JOULES_PER_FLOP, JOULES_PER_BYTE = 0.85e-12, 50e-12
# The largest error, in percent, of an estimate for a row measured on an H200, of Megatron-Core's head and of ours.
PERCENT = 6
# With a shorter mean launch the host may need longer to start launches than the GPU to run them, so that the time is
# unknown (the measured rows' shortest mean is 150 us). No row was measured with a smaller share of products.
SHORT_LAUNCH, PRODUCTS_SHARE = 50e-6, 0.5

GPUS = {name.lower(): DEVICES[name] for name in ("H100", "H200")}
PRODUCTS = {aten.mm, aten.addmm, aten.addmm_}
PICKING = {aten.index, aten.index_select, aten.gather, aten.embedding}
PLACING = {aten.index_put_, aten._index_put_impl_, aten.index_add_, aten.scatter_, aten.scatter_add_}
WRITING_ONLY = {aten.copy_, aten.fill_, aten.zero_}
NO_LAUNCH = {aten.empty, aten.empty_like, aten.new_empty, aten.empty_strided, aten.detach, aten.detach_}


def gpu_here() -> tuple[Device | None, str]:
    """Return torch's GPU, None unless it is one of `GPUS`, and its name, "" without a GPU."""
    if not torch.cuda.is_available():
        return None, ""
    name = torch.cuda.get_device_name()
    return GPUS.get(NAMES.get(name, "").lower()), name


class LaunchCounter(ByteCounter):
    """Counter of the seconds of each launch on `device`, beside the bytes; communication takes no time in it."""

    def __init__(self, device: Device):
        super().__init__()
        self.device = device
        self.launches: list[float] = []
        self.flops = 0

    @property
    def seconds(self) -> float | None:
        """Return the sum of all launches; None: unknown, as launches are short or products a small part of the time."""
        total = sum(self.launches)
        known = total >= SHORT_LAUNCH * len(self.launches) and self.flops / self.device.flops >= PRODUCTS_SHARE * total
        return total if known else None

    def ran(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Count an operator, which reads its inputs and writes its results once, or some elements of them."""
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
            nbytes = 3 * _nbytes(results)  # indices are read, elements are read and written
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
        """Count a Triton kernel, which reads or writes each of its tensors once."""
        nbytes = _nbytes(tensors_in(arguments.values()))
        self._add(nbytes / self.device.bytes_per_s, 0, nbytes)

    def _add(self, seconds: float, flops: int, nbytes: int) -> None:
        self.flops += flops
        self.launches.append(max(seconds, joules(flops, nbytes) / (WATTS - AT_REST)))


def joules(flops: int, nbytes: int) -> float:
    """Return the joules of a launch with these FLOPs and bytes, without those of the idle card."""
    return JOULES_PER_FLOP * flops + JOULES_PER_BYTE * nbytes


def _nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)

"""Table of GPUs (bandwidth, matrix FLOP/s, SMs) and estimated times of matrix products, from which chunk sizes follow.

Legend: M, N rows and columns of a product, K what it sums over.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Device(NamedTuple):
    """A GPU's figures. `flops`: dense, 16-bit operands; both rates are what large products and copies reach.

    `rated`: whether they are this GPU's. Of another the H200's stand there, from which sizes follow, and no times.
    """

    name: str
    multiprocessors: int
    bytes_per_s: float
    flops: float
    rated: bool = True


# The H200's rates are what PyTorch reaches on one, in a copy (bytes read and written) and in a product of 8192 x 8192 x
# 8192 in bf16 on random data. A step of the head alone takes what follows from them; one after the other, products come
# to the limit of the card's power and run at 660 to 730 TFLOP/s. The others' are their data sheets' (3.35 and 8
# TB/s; 989 and 2250 TFLOP/s), times what the H200 reaches of its own data sheet: 0.9 and 0.8. An H100 has the H200's
# processor.
DEVICES = {
    "H100": Device("H100", 132, 3.0e12, 790e12),
    "H200": Device("H200", 132, 4.3e12, 790e12),
    "B200": Device("B200", 148, 7.2e12, 1800e12),
}

# What the driver calls them. Cards with like names have other processors, memory or limits of power: H100 PCIe, H100
# NVL, H200 NVL, GH200, H20, GB200, B300.
NAMES = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA B200": "B200"}

# Rows and columns of the result that one multiprocessor makes at a time, in cuBLAS's kernels for large products.
TILE_M, TILE_N = 128, 256
# How full the waves were of the product that the rate was measured with: 32 x 64 tiles on 132 multiprocessors.
_MEASURED_FILL = 2048 / 132 / 16
_MEASURED_K, _MEASURED_RESULT_BYTES = 8192, 2


def device_of(like: Tensor) -> Device:
    """The table's entry for the GPU that `like` is on: by name, else one that is not rated, with the H200's rates and
    its own number of multiprocessors."""
    if not torch.cuda.is_available() or like.device.type != "cuda":
        return DEVICES["H200"]
    return _named(like.device.index or 0)


@functools.cache
def _named(index: int) -> Device:
    found = torch.cuda.get_device_properties(index)
    known = DEVICES["H200"]._replace(name=found.name, rated=False)
    if found.name in NAMES:
        known = DEVICES[NAMES[found.name]]
    return known._replace(multiprocessors=found.multi_processor_count)


def waves(device: Device, m: int, n: int) -> float:
    """Return how often the tiles of an `[M, N]` result fill the device."""
    return -(-m // TILE_M) * -(-n // TILE_N) / device.multiprocessors


def product_seconds(device: Device, m: int, n: int, k: int, result_bytes: int) -> float:
    """Estimate for `[M, K] @ [K, N]` with 16-bit operands, whose result takes `result_bytes` to write (and to read,
    where it is added to).

    Arithmetic runs in whole waves; the measured rate assumes waves as full as in the measurement. Operands are read at
    the same time, so the longer of the two times counts. A tile of the result is written after its sums are done.
    """
    nbytes = 2 * (m + n) * k + result_bytes
    if 0 in (m, n, k):
        return nbytes / device.bytes_per_s
    run = -(-waves(device, m, n) // 1)  # tiles at the edges, and waves that are not full, take as long as others
    made = max(m * n, run * device.multiprocessors * TILE_M * TILE_N * _MEASURED_FILL)
    arithmetic = 2 * k * made / device.flops
    return max(arithmetic + epilogue_seconds(device, m, n, k, result_bytes), nbytes / device.bytes_per_s)


def epilogue_seconds(device: Device, m: int, n: int, k: int, result_bytes: int) -> float:
    """Return the seconds that writing the result adds to a product's arithmetic: all of it, as if nothing hid it.

    The measured rate has 2 bytes for K = 8192 in it, and for a longer K as many more: none is taken to be faster.
    """
    return max(0.0, result_bytes - _MEASURED_RESULT_BYTES / _MEASURED_K * k * m * n) / device.bytes_per_s

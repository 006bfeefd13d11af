"""Table of GPUs (bandwidth, matrix FLOP/s, SMs) and estimated times of matrix products, from which chunk sizes follow.

Legend: M, N rows and columns of a product, K what it sums over.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor


class Device(NamedTuple):
    """A GPU's figures. `flops`: dense, 16-bit operands; both rates are those that large copies and products reach.

    `rated`: whether the rates are this GPU's own. If not, they are the H200's, good enough for sizes but not for times.
    """

    name: str
    multiprocessors: int
    bytes_per_s: float
    flops: float
    rated: bool = True


# The H200's rates were measured with PyTorch on one, in a copy (bytes read and written) and in a product of 8192 x 8192
# x 8192 in bf16 on random data. A single step of the head runs at these rates; products one after the other reach the
# limit of the card's power and run at 660 to 730 TFLOP/s. The rates of the others are their data sheets' (3.35 and 8
# TB/s; 989 and 2250 TFLOP/s), times the fractions that the H200 reaches of its data sheet: 0.9 and 0.8. An H100 has the
# H200's processor.
DEVICES = {
    "H100": Device("H100", 132, 3.0e12, 790e12),
    "H200": Device("H200", 132, 4.3e12, 790e12),
    "B200": Device("B200", 148, 7.2e12, 1800e12),
}

# The driver's names. Cards with similar names have other processors, memory or limits of power: H100 PCIe, H100 NVL,
# H200 NVL, GH200, H20, GB200, B300.
NAMES = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA B200": "B200"}

# Rows and columns of the result that one multiprocessor makes at a time, in cuBLAS's kernels for large products.
TILE_M, TILE_N = 128, 256
# Filled fraction of the waves in the product whose rate was measured: 64 x 32 tiles on 132 multiprocessors.
_MEASURED_FILL = 2048 / 132 / 16
_MEASURED_K, _MEASURED_RESULT_BYTES = 8192, 2


def device_of(like: Tensor) -> Device:
    """Return the table's entry for the GPU of `like`; for a GPU that is not in the table the H200's rates, not `rated`.
    The number of multiprocessors is the GPU's own. Without CUDA: the entry of the H200."""
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
    """Return the number of waves, a fraction, of the tiles of an `[M, N]` result."""
    return -(-m // TILE_M) * -(-n // TILE_N) / device.multiprocessors


def product_seconds(device: Device, m: int, n: int, k: int, result_bytes: int) -> float:
    """Estimate the seconds of `[M, K] @ [K, N]` with 16-bit operands, whose result takes `result_bytes` to write (and
    to read, if it is added to).

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
    """Return the seconds that writing the result adds to a product's arithmetic, as if nothing hid it.

    The measured rate includes 2 bytes an element of the result for K = 8192; in proportion to K they are not added.
    """
    return max(0.0, result_bytes - _MEASURED_RESULT_BYTES / _MEASURED_K * k * m * n) / device.bytes_per_s

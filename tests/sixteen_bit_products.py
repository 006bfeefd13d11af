"""Which products of 16-bit matrices torch is asked for."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ext import cpu_products

_PRODUCTS = {"mm", "addmm", "bmm", "baddbmm"}


class SixteenBitProducts(TorchDispatchMode):
    """`found` has their names in the order of the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__.rstrip("_")
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        if name in _PRODUCTS and all(x.dtype in cpu_products.QUESTIONS for x in tensors):
            self.found.append(name)
        return func(*args, **(kwargs or {}))

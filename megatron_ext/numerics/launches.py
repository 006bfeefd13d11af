"""The launch of a Triton kernel on the device of its tensors."""

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, grid: tuple[int, ...], first: Tensor, *others: Any, **constants: Any) -> None:
    """Run `kernel` on its arguments, on the device of the first one: Triton itself takes the current device, wherever
    tensors are. A grid without a program runs nothing."""
    if 0 not in grid:
        with torch.cuda.device_of(first):
            kernel[grid](first, *others, **constants)

"""Inputs that lie on another device than the work."""

import torch
from torch import Tensor


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on `device`. The host does not wait for a copy to a GPU; from one it must, to see the values at all."""
    return x.to(device, non_blocking=device.type != "cpu")

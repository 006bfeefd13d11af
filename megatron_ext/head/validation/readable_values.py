"""Whether the values of a tensor can be read (it is not fake or traced), and how to raise on wrong ones."""

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake


def has_values(x: Tensor) -> bool:
    """Whether `x` is a real tensor, neither a fake one nor one of a graph that is being compiled."""
    return not torch.compiler.is_compiling() and not is_fake(x) and x.device.type in ("cpu", "cuda")


def raise_if(wrong: Tensor, message: str) -> None:
    """ValueError if `wrong`, a bool tensor that has a value; on CUDA a device-side assertion without a host sync."""
    if wrong.is_cuda:
        torch._assert_async(~wrong, message)
    elif wrong:
        raise ValueError(message)

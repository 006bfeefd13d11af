"""Values of tensors: whether they can be read (the tensor is not fake or traced), and errors for wrong ones."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

# Of small calls a tenth of the time went into asking what these may be.
_PLAIN = (Tensor, torch.nn.Parameter)


def has_values(x: Tensor) -> bool:
    """Return whether `x` is a real tensor, neither a fake one nor one of a graph that is being compiled."""
    if torch.compiler.is_compiling() or not (x.is_cpu or x.is_cuda):
        return False
    wrapped = torch._C._are_functorch_transforms_active() or torch._is_functional_tensor(x)
    return not is_fake(x) if wrapped or type(x) not in _PLAIN else True


def on_host(x: Tensor) -> bool:
    """Return whether values of `x` can be read without waiting for a device: of a few numbers Python costs less then
    than operators."""
    return not x.is_cuda and has_values(x)


def check_plain(argument: str, x: Any) -> None:
    """Raises ValueError for a DTensor, and in a transform of torch.func, which our autograd functions do not know."""
    if torch.compiler.is_compiling():
        return
    distributed = sys.modules.get("torch.distributed.tensor")  # not imported: nobody has made a DTensor
    if distributed is not None and isinstance(x, distributed.DTensor):
        raise ValueError(
            f"{argument} is a DTensor: it must be a plain tensor; pass its local tensor, {argument}.to_local(), with "
            f"the process group of the mesh dim that shards it, or all of it, {argument}.full_tensor()"
        )
    if torch._C._are_functorch_transforms_active():
        raise ValueError(
            f"{argument} is in a transform of torch.func (grad, vmap, jvp, ...): it must be called outside; use "
            f"torch.autograd.grad or backward(), and pass a batch as leading dims"
        )


class OutsideVocabulary(ValueError):
    """A token id that does not exist, which one rank alone may have been given."""


def raise_unless(right: Tensor, message: str, error: type[ValueError] = ValueError) -> None:
    """An `error` unless `right`, a bool tensor with a value; on CUDA a device-side assertion without a host sync."""
    if right.is_cuda:
        torch._assert_async(right, message)
    elif not right:
        raise error(message)


def check_within(argument: str, ids: Tensor, size: int, fix: str = "", spared: int | None = None) -> bool:
    """Raises OutsideVocabulary unless each of the integers `ids` is in [0, size) or `spared`; `fix` ends its sentence.

    They are read on real CPU tensors; on CUDA it is a device-side assertion without a host sync, and while compiling or
    on fake tensors they are not looked at. Returns whether all were seen to be in [0, size).
    """
    if not has_values(ids):
        return False
    if not ids.is_cuda:
        if not ids.numel():
            return True
        lowest, highest = ids.aminmax()
        if lowest.item() >= 0 and highest.item() < size:
            return True
    wide = ids.long()  # a narrow integer would wrap the size
    right = (wide >= 0) & (wide < size)
    if spared is not None:
        right |= wide == spared
    if not ids.is_cuda and right.all():
        return False
    found = "one outside" if ids.is_cuda else f"{ids[~right][:1].tolist()}, outside"
    raise_unless(
        right.all(),
        f"{argument} holds {found} [0, {size}): each must be a token id of the vocabulary{fix}",
        OutsideVocabulary,
    )
    return False


def fault_within(argument: str, ids: Tensor, size: int, fix: str = "") -> ValueError | None:
    """Return the fault that `check_within` finds, for a rank that tells the others before all of them raise."""
    try:
        check_within(argument, ids, size, fix)
    except OutsideVocabulary as fault:
        return ValueError(str(fault))
    return None


def raise_if(wrong: Tensor, message: str, error: type[ValueError] = ValueError) -> None:
    """Raise `error` where `wrong`, a bool tensor with a value, is true: `raise_unless` with a launch more on CUDA."""
    raise_unless(~wrong, message, error)

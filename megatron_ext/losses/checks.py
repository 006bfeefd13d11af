"""Checks of the losses' arguments. Faults that every rank can see are raised before anything is communicated: arguments
that are missing or of another type, and labels of a shape that the loss cannot be of.

Those that only one rank may see (the shape of what it is given beside the labels, a count) come back as an exception
object from the functions named `..._fault`, and the head announces them in the exchange that it makes anyway.
"""

from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.checks import as_number
from megatron_ext.losses.reductions import below_0
from megatron_ext.numerics.tensors import has_values, raise_unless

_HOLDS: dict[str, Callable[[float], bool]] = {
    "a number": lambda x: x == x,
    "at least 0": lambda x: x >= 0,
    "above 0": lambda x: x > 0,
}


def first_fault(*faults: ValueError | None) -> ValueError | None:
    """The first that there is. All have run by then: a rank with both kinds of faults raises at once, as the others do,
    and waits for nobody.
    """
    return next(filter(None, faults), None)


def raise_if_any(fault: ValueError | None) -> None:
    """Raises `fault`, where nobody waits for this rank."""
    if fault is not None:
        raise fault


def check_rows(shape: torch.Size) -> None:
    """Raises ValueError unless tokens lie in rows."""
    if len(shape) != 2:
        raise ValueError(
            f"labels (log_probs) have shape {tuple(shape)}: the loss is one of rows: they must be 2-D; unflatten them"
        )


def check_tensor(name: str, x: Any, rule: str) -> None:
    """Raises ValueError unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is {type(x).__name__}: it must be {rule}")


def scalar_fault(name: str, x: Any) -> ValueError | None:
    """Return the fault of a tensor that has not one number; raises ValueError for what is neither number nor tensor."""
    if not isinstance(x, Tensor):
        check_number(name, x, "a number or a tensor", lambda _: True)
    elif x.numel() != 1:
        return ValueError(f"{name} has shape {tuple(x.shape)}: it must be one number for all rows; sum or average it")
    return None


def shape_fault(name: str, x: Any, shapes: Sequence[tuple[int, ...]], rule: str) -> ValueError | None:
    """Return the fault of a tensor that has none of `shapes`."""
    check_tensor(name, x, rule)
    return None if x.shape in shapes else ValueError(f"{name} is {tuple(x.shape)}: it must be {rule}")


def per_token_fault(shape: torch.Size, **tensors: Tensor | None) -> ValueError | None:
    """Return the fault of a given tensor that has another shape than the labels, or of a `mask` below 0."""
    rule = f"a tensor {tuple(shape)}, a number for each label"
    faults = [shape_fault(name, x, [shape], rule) for name, x in tensors.items() if x is not None]
    return first_fault(*faults, _weight_fault(tensors.get("mask")))


def _weight_fault(mask: Tensor | None) -> ValueError | None:
    """Return the fault of a mask with a weight below 0, or NaN; on CUDA a device-side assertion."""
    if mask is None or mask.dtype == torch.bool or not has_values(mask):
        return None
    return fault_unless(
        (mask >= 0).all(),
        "mask has a weight below 0, or NaN: it must be 0 where a token does not count, and else above 0; put a "
        "sign into what is weighed, as the advantages",
    )


def fault_unless(right: Tensor, message: str) -> ValueError | None:
    """Return the fault that `message` tells unless `right`, a bool with a value; on CUDA a device-side assertion."""
    try:
        raise_unless(right, message)
    except ValueError as fault:
        return fault
    return None


def check_per_token(shape: torch.Size, **tensors: Tensor | None) -> None:
    """Raises ValueError unless all that are given have the shape of the labels."""
    raise_if_any(per_token_fault(shape, **tensors))


def count_fault(name: str, count: Tensor | float | None) -> ValueError | None:
    """Return the fault of a number below 0, or of several numbers; a tensor's value is not looked at."""
    if count is None:
        return None
    return scalar_fault(name, count) or below_0(count, name)


def check_number(
    name: str, value: Any, rule: str, holds: Callable[[float], bool] | None = None, optional: bool = False
) -> None:
    """Raises ValueError unless `value` is a number that keeps the rule: for which `holds`, where it is given, is true.

    Where `optional`, it may be None.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or not (holds or _HOLDS[rule])(float(value)):
        fix = as_number(value)
        raise ValueError(f"{name} is {value!r}: it must be {rule}{', or None' * optional}{f'; {fix}' if fix else ''}")


def check_numbers(owner: Any, rule: str, *names: str, optional: bool = False) -> None:
    """`check_number` of each of these attributes of `owner`."""
    for name in names:
        check_number(name, getattr(owner, name), rule, optional=optional)

"""Checks of the losses' arguments. Faults that every rank can see are raised before anything is communicated: arguments
that are missing or of another type, and labels of a shape that the loss cannot take.

Faults that only one rank may see (the shape of another tensor, a count) are returned as exception objects by the
functions named `..._fault`, and the head announces them to all ranks in the exchange that it makes anyway.
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
    """Return the first fault that is not None. All checks have run by then: a rank with both kinds of faults has raised
    at once, as the others do, and waits for nobody.
    """
    return next(filter(None, faults), None)


def raise_if_any(fault: ValueError | None) -> None:
    """Raise `fault` unless it is None, where no other rank waits for this one."""
    if fault is not None:
        raise fault


def check_rows(shape: torch.Size) -> None:
    """Raise ValueError unless the labels' shape is 2-D, tokens in rows."""
    if len(shape) != 2:
        raise ValueError(
            f"labels (log_probs) have shape {tuple(shape)}: the loss is one of rows: they must be 2-D; unflatten them"
        )


def check_tensor(name: str, x: Any, rule: str) -> None:
    """Raise ValueError unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} is {type(x).__name__}: it must be {rule}")


def scalar_fault(name: str, x: Any) -> ValueError | None:
    """Return the fault of a tensor that has not one number; raise ValueError for neither a number nor a tensor."""
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
    """Return a ValueError with `message` unless `right`, a bool with a value; on CUDA a device-side assertion."""
    try:
        raise_unless(right, message)
    except ValueError as fault:
        return fault
    return None


def check_per_token(shape: torch.Size, **tensors: Tensor | None) -> None:
    """Raise ValueError unless all tensors given have the shape of the labels, and a `mask` has no weight below 0."""
    raise_if_any(per_token_fault(shape, **tensors))


def count_fault(name: str, count: Tensor | float | None) -> ValueError | None:
    """Return the fault of a number below 0, or of several numbers; a tensor's value is not looked at."""
    if count is None:
        return None
    return scalar_fault(name, count) or below_0(count, name)


def check_number(
    name: str, value: Any, rule: str, holds: Callable[[float], bool] | None = None, optional: bool = False
) -> None:
    """Raise ValueError unless `value` is a number for which `holds` is true (None: the check that `rule` names).

    If `optional`, `value` may be None.
    """
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or not (holds or _HOLDS[rule])(float(value)):
        fix = as_number(value)
        raise ValueError(f"{name} is {value!r}: it must be {rule}{', or None' * optional}{f'; {fix}' if fix else ''}")


def check_numbers(owner: Any, rule: str, *names: str, optional: bool = False) -> None:
    """Call `check_number` for each of these attributes of `owner`."""
    for name in names:
        check_number(name, getattr(owner, name), rule, optional=optional)

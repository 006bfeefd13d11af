"""An action that may fail on one rank, with the failure raised on all ranks, so that none hangs."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from megatron_ext.distributed.collectives import all_gather_object
from megatron_ext.distributed.groups import Group

T = TypeVar("T")


class FailedElsewhere(Exception):
    """Base of the errors that a rank raises because another one failed: one of the classes below."""


class ValueErrorElsewhere(FailedElsewhere, ValueError):
    pass


class OSErrorElsewhere(FailedElsewhere, OSError):
    pass


class RuntimeErrorElsewhere(FailedElsewhere, RuntimeError):
    pass


def agree(act: Callable[[], T]) -> list[T]:
    """Return the results of `act` on each rank of the world, in rank order. The results are pickled.

    Communicates: two collectives; the ranks are in step afterwards.

    Raises:
        ValueError, OSError: `act` raised it on this rank, or on another one; the error is then a `FailedElsewhere` too,
            and names that rank.
        RuntimeErrorElsewhere: `act` raised anything else on another rank.
    """
    fault: Exception | None = None
    result: T | None = None
    try:
        result = act()
    except Exception as error:
        fault = error
    failed = None if fault is None else (_kind(fault), f"{type(fault).__name__}: {fault}")
    found = all_gather_object((failed, result), world())
    if fault is not None:
        raise fault
    for rank, (other, _) in enumerate(found):
        if other is not None:
            kind, message = other
            raise kind(f"rank {rank} failed: {message}")
    return [result for _, result in found]


def world() -> Group:
    """All ranks; None in a process that stands alone."""
    return dist.group.WORLD if dist.is_initialized() else None


def _kind(fault: Exception) -> type[FailedElsewhere]:
    """Return the class of error that the other ranks raise."""
    kinds = {ValueError: ValueErrorElsewhere, OSError: OSErrorElsewhere}
    return next((kinds[kind] for kind in kinds if isinstance(fault, kind)), RuntimeErrorElsewhere)

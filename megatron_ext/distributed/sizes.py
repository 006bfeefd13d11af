"""Check of sizes that a caller gives."""

from typing import Any


def check_size(argument: str, value: Any, least: int = 0) -> None:
    """Raises ValueError unless `value` is a whole number (Python's, numpy's, torch's symbolic) of at least `least`."""
    if not isinstance(value, int) and not hasattr(value, "__index__"):  # the first is all that torch.compile asks
        raise ValueError(f"{argument} is {value!r}, a {type(value).__name__}: it must be a whole number; pass an int")
    if value < least:
        raise ValueError(f"{argument} is {value}: it must be at least {least}; pass the true one, over all ranks")

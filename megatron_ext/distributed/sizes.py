"""Check of sizes that a caller passes."""

from typing import Any


def check_size(argument: str, value: Any, least: int = 0) -> None:
    """Raise ValueError unless `value` is a whole number (Python's, numpy's, torch's symbolic) of at least `least`."""
    if not isinstance(value, int) and not hasattr(value, "__index__"):  # torch.compile needs the first test only
        raise ValueError(f"{argument} is {value!r}, a {type(value).__name__}: it must be a whole number; pass an int")
    if value < least:
        raise ValueError(f"{argument} is {value}: it must be at least {least}; pass the true one, over all ranks")

"""Waits of a rank for something outside the policy, during which the policy is not taken for hung."""

from collections.abc import Iterator
from contextlib import contextmanager

now: list[str] = []  # what this process waits for, innermost last


@contextmanager
def outside_wait(what: str) -> Iterator[None]:
    """Mark a wait for something outside the policy, so that the policy is not taken for hung.

    Examples are a reward server that a loss asks, and generators that join. `what` names it in reports on this rank.
    """
    now.append(what)
    try:
        yield
    finally:
        now.pop()

"""Waits of a rank for what is no rank of the policy, so that the policy is not taken for hung."""

from collections.abc import Iterator
from contextlib import contextmanager

now: list[str] = []  # what this process waits for, innermost last


@contextmanager
def outside_wait(what: str) -> Iterator[None]:
    """Let this rank stand still, and the others wait for it, without the policy being taken for hung.

    The context is for waits on what is no rank of the policy: a reward server that a loss asks, generators that join.
    """
    now.append(what)
    try:
        yield
    finally:
        now.pop()

"""The interface of the timer that NeMo-RL's callers pass as `timer=`."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Timer(Protocol):
    """Methods that are called of a timer: NeMo-RL's `nemo_rl.utils.timer.Timer` has them."""

    def time(self, label: str) -> AbstractContextManager[Any]:
        """A context whose duration is recorded under `label`."""


def timed(timer: Timer | None, label: str) -> AbstractContextManager[Any]:
    """The context in which `timer` measures `label`; without a timer an empty one."""
    return nullcontext() if timer is None else timer.time(label)

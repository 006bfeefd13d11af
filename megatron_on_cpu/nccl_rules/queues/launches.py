"""Launches of a rank on a communicator: collectives and messages in the form in which the queues run them."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Payloads = dict[int, memoryview]

_NOT_THE_CALLER = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]), "<frozen")
_LINES = 3  # of the caller, innermost first
MADE = "made"  # the channel on which a communicator's ranks meet to make it


@dataclass(eq=False)
class Part:
    """One collective, or one message, of a launch. Peers are ranks of the world, without this one unless it sends to
    itself.

    A part belongs to a channel of its communicator and has a number there: the n-th part of this rank on channel `mine`
    meets the n-th part of each peer on `theirs`. Collectives have the channel "all"; a message from rank 0 to rank 1
    has the channel "0>1 send" on rank 0 and "0>1 recv" on rank 1.
    """

    agree: str  # must be the same on all ranks of the part
    finish: Callable[[Payloads], None]  # called with what the peers have sent, once the part is complete
    sends: dict[int, Any]  # bytes for each peer, empty where the peer is only told that this rank has come
    expects: dict[int, int]  # bytes from each peer
    needs: frozenset[int]  # the peers that must have come before this part is complete
    mine: str = "all"
    theirs: str = "all"
    number: int = -1  # given at launch
    received: Payloads = field(default_factory=dict)
    unsent: int = 0
    lost: set[int] = field(default_factory=set)  # peers that ended before their message was sent

    @property
    def complete(self) -> bool:
        return self.unsent == 0 and self.needs <= self.received.keys()

    @property
    def name(self) -> str:
        """The part's name, which is the same on all of its ranks."""
        return f"{self.mine.split(' ')[0]} {self.number}"


@dataclass(eq=False)
class Launch:
    """Parts that one call launches at once; they run in no order among themselves, and complete together."""

    what: str  # "all_reduce of float32 [4, 8]"
    parts: list[Part]
    communicator: "Communicator"
    where: list[str]  # lines of the program, innermost first
    number: int = -1  # among all launches of this rank
    before: dict[int, list[tuple[str, str]]] = field(default_factory=dict)  # by peer: parts under way at launch
    started: bool = False
    done: bool = False
    waited_for: bool = False
    error: Exception | None = None

    def name(self, part: Part) -> str:
        """Return the name of `part`, the same on its ranks: the communicator, then "all 3", or "0>1 3" of a message."""
        return f"{self.communicator.name} {part.name}"

    def describe(self) -> str:
        return f"{self.what} at {' < '.join(self.where) or 'an unknown line'}"


class Communicator:
    """A queue of launches, which run one after the other in the order of their launch on every one of its ranks."""

    def __init__(self, name: str, ranks: list[int]):
        self.name, self.ranks = name, ranks
        self.queue: list[Launch] = []  # the first one runs
        self.made = False
        self.launched: Counter[str] = Counter()  # parts, by their channel `mine`
        self.started: Counter[str] = Counter()  # likewise
        self.finished: Counter[str] = Counter()  # parts, by their channel `theirs`

    def number(self, launch: Launch) -> None:
        for part in launch.parts:
            part.number = self.launched[part.mine]
            self.launched[part.mine] += 1


def lines_of_caller() -> list[str]:
    """Return the innermost lines of code outside torch and this package at which the program is, innermost first."""
    return lines_from(sys._getframe(1))


def lines_from(frame: Any) -> list[str]:
    """Return the lines as `lines_of_caller` does, for a thread whose innermost frame is `frame`."""
    lines: list[str] = []
    while frame is not None and len(lines) < _LINES:
        file = frame.f_code.co_filename
        if not file.startswith(_NOT_THE_CALLER):
            lines.append(f"{_short(file)}:{frame.f_lineno} in {frame.f_code.co_name}")
        frame = frame.f_back
    return lines


def _short(file: str) -> str:
    """Shorten a path to begin with its package, without the folder from which the package is imported."""
    for folder in sorted(filter(None, sys.path), key=len, reverse=True):
        if file.startswith(folder + "/"):
            return file[len(folder) + 1 :]
    return file

"""Memory that one stream uses while another writes it, or gets it anew from the allocator: what CUDA does not report.

torch's allocator gives memory that is freed on the host to the next tensor of the stream on which it was allocated, at
once. A kernel of another stream that still uses it then reads or overwrites the wrong numbers, unless the first stream
has waited for it, or `record_stream` was called. Messages keep their tensors until somebody waits for them, and not
longer.
"""

import weakref
from typing import Any, NamedTuple

from torch import Tensor

from tests.streams.recording import Log, Message, Stream, Submission, line_of_code

Place = Any  # a stream: its number, or the communicator whose own it is


class Use(NamedTuple):
    """Use of a part of a memory by a stream, in a submission."""

    place: Place
    at: int
    line: str
    begin: int  # bytes
    end: int
    writing: bool


class Memory:
    def __init__(self, place: Place, line: str):
        self.place, self.line = place, line
        self.uses: dict[tuple, Use] = {}  # the last one of each kind on each stream
        self.recorded: set[Place] = set()


class MemoryLog(Log):
    """A recording that collects `faults`, a sentence for each, with the lines of code."""

    def __init__(self, real: bool = False):
        super().__init__(real)
        self.faults: list[str] = []
        self._memories: dict[int, Memory] = {}
        self._finalizers: dict[int, Any] = {}
        self._known: dict[Place, dict[Place, int]] = {}  # the last submission of others that a stream has waited for
        self._at_end: dict[int, tuple[Place, dict[Place, int]]] = {}  # of a submission: its stream, what it knows
        self._not_waited: set[int] = set()

    def _place(self, one: Submission) -> Place:
        if one.message is None:
            return one.stream
        return (one.message.group, one.message.peer if one.message.to_one_rank else None)

    def _begin(self, at: int, after: tuple[int, ...]) -> Place:
        """A submission knows what its stream knew, and all that it waits for."""
        place = self._place(self.submissions[at])
        known = self._known.setdefault(place, {})
        for other in after:
            its_place, its_known = self._at_end[other]
            for stream, last in (*its_known.items(), (its_place, other)):
                known[stream] = max(known.get(stream, -1), last)
        known[place] = at
        self._at_end[at] = place, dict(known)
        return place

    def kernel(self, reads: list[Tensor], writes: list[Tensor], made: list[Tensor]) -> int:
        at = super().kernel(reads, writes, made)
        place = self._begin(at, ())
        self._use(at, place, reads, [*writes, *made])
        return at

    def message(self, message: Message, reads: list[Tensor], writes: list[Tensor]) -> int:
        for tensor in (*reads, *writes):
            self._memory(tensor)  # allocated on the stream that launches it
        at = super().message(message, reads, writes)
        self._not_waited.add(at)
        place = self._begin(at, self.submissions[at].after)
        self._use(at, place, reads, writes)
        return at

    def wait(self, stream: Stream, after: tuple[int, ...]) -> None:
        super().wait(stream, after)
        if after:
            self._begin(stream.last, after)

    def record_stream(self, tensor: Tensor, stream: Stream) -> None:
        self._memory(tensor).recorded.add(stream.number)

    def waited(self, at: int) -> None:
        self._not_waited.discard(at)

    def _memory(self, tensor: Tensor) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            self._memories[key] = Memory(self.current.number, line_of_code())
            self._finalizers[key] = weakref.ref(storage, lambda _: self._freed(key))
        return self._memories[key]

    def _use(self, at: int, place: Place, reads: list[Tensor], writes: list[Tensor]) -> None:
        line = self.submissions[at].line if self.submissions[at].message else line_of_code()
        for tensor, writing in [*((one, False) for one in reads), *((one, True) for one in writes)]:
            memory = self._memory(tensor)
            use = Use(place, at, line, *_span(tensor), writing)
            for earlier in memory.uses.values():
                meet = earlier.begin < use.end and use.begin < earlier.end and (writing or earlier.writing)
                if meet and not self._knows(place, earlier):
                    does, did = ("writes" if one.writing else "reads" for one in (use, earlier))
                    self.faults.append(
                        f"{line} {does} on {_name(place)} what {earlier.line} {did} on {_name(earlier.place)}, and "
                        f"does not wait for it"
                    )
            memory.uses[place, use.begin, use.end, writing] = use

    def _knows(self, place: Place, use: Use) -> bool:
        return use.place == place or self._known.get(place, {}).get(use.place, -1) >= use.at

    def _freed(self, key: int) -> None:
        memory = self._memories.pop(key)
        del self._finalizers[key]
        for use in memory.uses.values():
            waiting = [memory.place, *memory.recorded]
            if use.at not in self._not_waited and not any(self._knows(place, use) for place in waiting):
                self.faults.append(
                    f"{memory.line} allocates on {_name(memory.place)} what {use.line} uses on {_name(use.place)}; it "
                    f"is freed at {line_of_code()}, which neither waits for that nor calls record_stream"
                )


def _span(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage between its first and its last element."""
    if not tensor.numel():
        return 0, 0
    begin = tensor.storage_offset()
    end = begin + 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin * tensor.itemsize, end * tensor.itemsize


def _name(place: Place) -> str:
    return f"stream {place}" if isinstance(place, int) else f"the communicator of group {place[0][0]}"

"""Work that runs beside a stage's passes, in the order in which it is begun."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


def has_streams(device: torch.device) -> bool:
    return device.type == "cuda"


class SideStreamResult(NamedTuple):
    """Result of work beside the passes, and the event after which the result is there."""

    found: Any
    done: Any


class SideWork:
    """Work on a CUDA stream of its own; on a CPU, or if the stream is not `wanted`, on the stream of the passes.

    Tensors that the work reads must not be changed before the work is done.
    """

    def __init__(self, device: torch.device, wanted: bool = True):
        self._stream = torch.cuda.Stream(device) if wanted and has_streams(device) else None

    def now(self) -> Any:
        """Return an event of all work begun on the current stream so far, for `after` of `run`."""
        return None if self._stream is None else torch.cuda.current_stream().record_event()

    def run(self, work: Callable[[], Any], after: Any = None, reads: Iterable[Any] = ()) -> SideStreamResult:
        """Begin `work` after the work begun before, and after the event `after`, which `now` returned.

        `reads`: tensors that the work reads and that were made on another stream; other objects are ignored.
        """
        stream = self._stream
        if stream is None:
            return SideStreamResult(work(), None)
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            found = work()
            done = stream.record_event()
        _keep(reads, stream)  # the allocator may not give their memory away while this stream reads
        return SideStreamResult(found, done)

    def take(self, aside: SideStreamResult) -> Any:
        """Return the result of the work; the current stream waits for it."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_event(aside.done)
            _keep(tree_leaves(aside.found), torch.cuda.current_stream())
        return aside.found

    def close(self) -> None:
        """Let the current stream wait for all work that was begun."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)


def _keep(found: Iterable[Any], stream: Any) -> None:
    for tensor in found:
        if isinstance(tensor, Tensor):
            tensor.record_stream(stream)

"""Work that runs beside a stage's passes in submission order: on a CUDA stream, on the CPU in a thread."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves


class SideWork:
    """Begin with `start`, end with `close`. What the work reads must not be changed before it is done."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._thread = ThreadPoolExecutor(1, "vocabulary") if self._stream is None else None

    def start(self, work: Callable[[], Any], reads: list[Any]) -> Callable[[], Any]:
        """Begins `work`, after all that was begun on the current stream. The function returned waits for its result.

        `reads`: what it reads; what is no tensor does not matter.
        """
        if self._thread is not None:
            future: Future = self._thread.submit(work)
            return future.result
        stream, main = self._stream, torch.cuda.current_stream()
        assert stream is not None
        stream.wait_stream(main)
        with torch.cuda.stream(stream):
            found = work()
            done = stream.record_event()
        for tensor in reads:
            if isinstance(tensor, Tensor):
                tensor.record_stream(stream)

        def result() -> Any:
            torch.cuda.current_stream().wait_event(done)
            for tensor in tree_leaves(found):
                if isinstance(tensor, Tensor):
                    tensor.record_stream(torch.cuda.current_stream())
            return found

        return result

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown()

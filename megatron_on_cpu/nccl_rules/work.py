"""What a launch gives the program to wait for."""

import queue
import threading
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_on_cpu.nccl_rules.queues.engine import Engine
from megatron_on_cpu.nccl_rules.queues.launches import Launch


class NcclRulesWork(dist.Work):
    """A launch under way. `wait` blocks the host where on a GPU only the current stream would wait."""

    def __init__(self, engine: Engine, launch: Launch, outputs: Sequence[Tensor], timeout_s: float):
        super().__init__()
        self._engine, self._launch, self._outputs, self._timeout_s = engine, launch, list(outputs), timeout_s

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Raises CommunicationHang where waiting has no end."""
        given_s = timeout.total_seconds() if timeout else 0.0
        self._engine.wait(self._launch, given_s or self._timeout_s)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._launch.done

    def is_success(self) -> bool:
        return self._launch.done and self._launch.error is None

    def exception(self) -> Exception | None:
        return self._launch.error

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        """Of the outputs. Its callbacks run in a thread of their own, where they may wait for other operations."""
        future: torch.futures.Future[Any] = torch.futures.Future()

        def complete() -> None:
            if self._launch.error is not None:
                future.set_exception(self._launch.error)
            else:
                future.set_result(self._outputs)

        self._engine.when_done(self._launch, lambda: _in_another_thread(complete))
        return future


_to_complete: "queue.SimpleQueue[Any]" = queue.SimpleQueue()
_completing: list[threading.Thread] = []


def _in_another_thread(call: Any) -> None:
    if not _completing or not _completing[0].is_alive():
        _completing[:] = [threading.Thread(target=_complete, name="nccl-rules-futures", daemon=True)]
        _completing[0].start()
    _to_complete.put(call)


def _complete() -> None:
    while True:
        _to_complete.get()()

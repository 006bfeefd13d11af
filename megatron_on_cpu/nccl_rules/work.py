"""Works: a launch gives the program one to wait for."""

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
        """Future of the outputs, complete, as NCCL's is at launch. Callbacks run at once, in the thread that adds them.

        On a GPU they run before the outputs are there, on a stream that waits; here this call waits.
        """
        try:
            self.wait()
        except Exception as error:
            future: torch.futures.Future[Any] = torch.futures.Future()
            future.set_exception(error)
            return future
        return _complete_future(self._outputs)


class FinishedWork(dist.Work):
    """A collective that NCCL discards, with its outputs as they were."""

    def __init__(self, outputs: Sequence[Tensor]):
        super().__init__()
        self._outputs = list(outputs)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> Exception | None:
        return None

    def result(self) -> list[Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        return _complete_future(self._outputs)


def _complete_future(outputs: list[Tensor]) -> torch.futures.Future:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(outputs)
    return future

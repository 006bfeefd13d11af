"""The `Work` object of a launch, for which the program waits."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_on_cpu.nccl_rules.queues.engine import Engine
from megatron_on_cpu.nccl_rules.queues.launches import Communicator, Launch


class NcclRulesWork(dist.Work):
    """A launch under way. `wait` blocks the host where on a GPU only the current stream would wait."""

    def __init__(self, engine: Engine, launch: Launch, outputs: Sequence[Tensor], timeout_s: float):
        super().__init__()
        self._engine, self._launch, self._outputs, self._timeout_s = engine, launch, list(outputs), timeout_s

    @classmethod
    def finished(cls, engine: Engine, outputs: Sequence[Tensor]) -> "NcclRulesWork":
        """Make the work of a collective that NCCL discards, with its outputs as they were."""
        return cls(engine, Launch("", [], Communicator("", []), [], done=True), outputs, 0.0)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the launch is complete; raises as `Engine.wait`, for example CommunicationHang."""
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
        """Return a completed future of the outputs; callbacks run at once, in the thread that adds them.

        NCCL's future is complete at launch, and callbacks run on a stream that waits; here this call waits instead.
        """
        future: torch.futures.Future[Any] = torch.futures.Future()
        try:
            self.wait()
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(self._outputs)
        return future

"""A process group between jobs with no common torch.distributed world: a trainer and the generators it refits."""

import hashlib
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.store_server import serve_store


class JobsGroup:
    """Rank `rank` of `size` processes that meet at `host:port`, where rank 0 listens. NCCL on a GPU, gloo on the CPU.

    The default process group, where there is one, is not touched.

    Raises:
        RuntimeError: not all of them came within `timeout_s`.
    """

    def __init__(
        self, host: str, port: int, rank: int, size: int, device: torch.device | str = "cpu", timeout_s: float = 300
    ):
        timeout = timedelta(seconds=timeout_s)
        self.rank, self.size, self.device = rank, size, torch.device(device)
        if rank == 0:
            self._store = serve_store(host, port, size, timeout_s)
        else:
            self._store = dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
        store = dist.PrefixStore("jobs", self._store)
        self._compared = 0
        self._group: Any
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def differing(self, facts: str) -> list[int]:
        """The ranks that call this with other `facts` than rank 0, the same list on every rank, which all must call it.

        Through the store at which they met, so that ranks learn it before messages that may not fit each other.

        Raises:
            RuntimeError: a rank did not come within the group's `timeout_s`.
        """
        store = dist.PrefixStore(f"compared{self._compared}", self._store)
        self._compared += 1
        store.set(str(self.rank), hashlib.sha256(facts.encode()).hexdigest())
        found = store.multi_get([str(rank) for rank in range(self.size)])
        return [rank for rank, other in enumerate(found) if other != found[0]]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """`x` of rank `source`, on every rank. In place: `x` is the buffer (contiguous) on the others."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._group.broadcast([x], options).wait()
        return x

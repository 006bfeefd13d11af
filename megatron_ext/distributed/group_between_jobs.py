"""A process group between jobs with no common torch.distributed world: a trainer and the generators it refits."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.store_server import serve_store

_AGAIN = (
    "Make a new group: call init_collective() of the policy, and join_collective() or policy_weights_join() of every "
    "generator, once more"
)


class JobsGroup:
    """Rank `rank` of `size` processes that meet at `host:port`, where rank 0 listens. NCCL on a GPU, gloo on the CPU.

    The default process group, if there is one, is not touched. A call that fails leaves ranks at different points of
    their communication: the group refuses every later call.

    Raises:
        RuntimeError: not all ranks came within `timeout_s` seconds.
    """

    _broken = False

    def __init__(
        self, host: str, port: int, rank: int, size: int, device: torch.device | str = "cpu", timeout_s: float = 300
    ):
        timeout = timedelta(seconds=timeout_s)
        self.rank, self.size = rank, size
        self.device, self._timeout_s = torch.device(device), timeout_s
        if rank == 0:
            self._store = serve_store(host, port, size, timeout_s)
        else:
            self._store = dist.TCPStore(host, port, size, is_master=False, timeout=timeout)
        meeting = self._meeting()
        store = dist.PrefixStore(f"jobs{meeting}", self._store)
        self._comparisons = dist.PrefixStore(f"compared{meeting}", self._store)
        self._compared = 0
        self._group: Any
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(store, rank, size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _meeting(self) -> int:
        """Return the number of this meeting. A process that meets others at one port again, while its last group lives,
        gets the store with that group's keys. Meetings may have been of other sizes, or have failed: rank 0 opens and
        closes them, and the others join one that is not closed."""
        store = self._store
        if self.rank:
            meeting = store.add("meetings", 0)
            meeting += meeting == 0 or store.check([f"closed{meeting}"])
            store.wait([f"open{meeting}"])
            store.set(f"came{meeting} {self.rank}", "")
            return meeting
        meeting = store.add("meetings", 1)
        store.set(f"open{meeting}", "")
        try:
            if self.size > 1:
                store.wait([f"came{meeting} {rank}" for rank in range(1, self.size)])
        finally:
            store.set(f"closed{meeting}", "")
        return meeting

    def differing(self, facts: str) -> list[int]:
        """Return the ranks whose `facts` differ from rank 0's, the same list on every rank. All ranks must call this.

        The ranks compare through the store at which they met, before they send messages that may not fit each other.
        The store keeps only the keys of the last comparison.

        Raises:
            RuntimeError: on every rank, the late one too, if a rank did not come within the group's `timeout_s`.
        """
        with self._one_call():
            store, step = self._comparisons, self._compared
            keys = [f"{step} {rank}" for rank in range(self.size)]
            store.set(keys[self.rank], hashlib.sha256(facts.encode()).hexdigest())
            with suppress(dist.DistStoreError):  # not in time
                store.wait(keys)
            missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
            # The list that is stored first holds for all ranks: none goes on with ranks that have given up.
            missing = json.loads(store.compare_set(f"{step} missing", "", json.dumps(missing)))
            if missing:
                raise RuntimeError(
                    f"ranks {missing} of the {self.size} that meet for weights did not come within "
                    f"{self._timeout_s:.0f} s of another one: have the policy send when every generator receives. "
                    f"{_AGAIN}"
                )
            found = store.multi_get(keys)
            if step:  # all ranks are here, and so have read the keys before these
                store.delete_key(f"{step - 1} {self.rank}")
                if self.rank == 0:
                    store.delete_key(f"{step - 1} missing")
            self._compared += 1
        return [rank for rank, other in enumerate(found) if other != found[0]]

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        """Copy `x` of rank `source` to every rank. In place: `x` is the buffer (contiguous) on the others."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        with self._one_call():
            self._group.broadcast([x], options).wait()
        return x

    @contextmanager
    def _one_call(self) -> Iterator[None]:
        """Raise RuntimeError if an earlier call has failed; an error inside makes all later calls fail."""
        if self._broken:
            raise RuntimeError(f"a comparison or a broadcast of this group of {self.size} ranks has failed. {_AGAIN}")
        self._broken = True
        yield
        self._broken = False

"""The process group: its communicators, the grouping of calls into one launch, and messages between two ranks."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_on_cpu.nccl_rules.buffers import content, fill, size_bytes
from megatron_on_cpu.nccl_rules.checks import check_message
from megatron_on_cpu.nccl_rules.collectives import Collectives, Exchange, describe
from megatron_on_cpu.nccl_rules.queues.engine import Engine
from megatron_on_cpu.nccl_rules.queues.launches import Communicator, Part, Payloads
from megatron_on_cpu.nccl_rules.rules import NcclRules
from megatron_on_cpu.nccl_rules.work import NcclRulesWork

_ProcessGroup: Any = dist.ProcessGroup  # Any: the stubs declare overloads of each method, of which torch calls one
# Operators that do nothing, under c10d's names, so that dispatch modes see the calls; c10d's own need a C++ backend.
_OPERATORS = (
    "allreduce allreduce_coalesced reduce broadcast allgather allgather_base allgather_into_tensor_coalesced "
    "reduce_scatter reduce_scatter_base reduce_scatter_tensor_coalesced alltoall alltoall_base gather scatter barrier "
    "send recv"
)
_library = torch.library.Library("nccl_rules", "DEF")
for _operator in _OPERATORS.split():
    _library.define(f"{_operator}(Tensor[] tensors) -> ()")
    _library.impl(_operator, lambda tensors: None, "CompositeExplicitAutograd")


def show(name: str, tensors: Sequence[Tensor]) -> None:
    """Show the call of operator `name` to the dispatch modes, if there are any."""
    if torch._C._len_torch_dispatch_stack():
        getattr(torch.ops.nccl_rules, name)(list(tensors))


class NcclRulesGroup(Collectives, _ProcessGroup):
    """A process group for CPU tensors that behaves as an NCCL process group; `NcclRules` has the settings of the job.

    `ranks` are the ranks in the engine's world. Methods that are not overridden raise, as no other backend serves the
    group. `owns`: the engine ends with this group.
    """

    def __init__(self, engine: Engine, name: str, rank: int, ranks: Sequence[int], timeout: timedelta, owns: bool):
        _ProcessGroup.__init__(self, rank, len(ranks))
        self._engine, self._name, self._description = engine, name, ""
        self._rank, self._ranks, self._timeout_s = rank, list(ranks), timeout.total_seconds()
        self._grouped: list[tuple[Part, Exchange]] | None = None
        self._owns_engine = owns
        if engine.rules.eager:
            if not owns and not engine.splitting:
                engine.split("0", range(engine.size), name)
            self._communicator()

    @property
    def rules(self) -> NcclRules:
        return self._engine.rules

    # Properties of a group that torch reads.

    def getBackendName(self) -> str:
        return "nccl_rules"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return len(self._ranks)

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    group_name, group_desc = property(getGroupName), property(getGroupDesc)

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def split(self, child: str) -> str:
        """Take part in splitting the group `child` off this group, which all ranks of this group must do.

        Returns a name of the split, the same on all ranks.
        """
        return self._engine.split(self._name, self._ranks, child)

    @contextmanager
    def splitting(self) -> Iterator[None]:
        """Make groups, inside the context, from a split that is over, without another split."""
        self._engine.splitting = True
        try:
            yield
        finally:
            self._engine.splitting = False

    def shutdown(self) -> None:
        if self._owns_engine:
            self._engine.close()

    def abort(self) -> None:
        if self._owns_engine:
            self._engine.abort()

    # Launches.

    def _communicator(self) -> Communicator:
        return self._engine.communicator(self._name, self._ranks)

    def _communicator_of_pair(self, peer: int) -> Communicator:
        """Return the communicator for messages outside a batch: the pair's, with eager initialisation the group's."""
        if self._engine.rules.eager:
            return self._communicator()
        low, high = sorted((self._rank, peer))
        return self._engine.communicator(f"{self._name} {low}:{high}", sorted({self._ranks[low], self._ranks[high]}))

    def _buffered(self, n: int) -> bool:
        return n <= self._engine.rules.buffer_bytes

    def _run(self, name: str, *exchanges: Exchange) -> dist.Work | None:
        """Launch exchanges as one, without those that are empty: NCCL discards them, and ranks do not meet for them."""
        show(name, [x for exchange in exchanges for x in exchange.outputs])
        some = [exchange for exchange in exchanges if not exchange.empty]
        if some or self._grouped is not None:
            return self._launch([(self._part(exchange), exchange) for exchange in some])
        self._communicator()
        return NcclRulesWork.finished(self._engine, [x for exchange in exchanges for x in exchange.outputs])

    def _launch(
        self, parts: list[tuple[Part, Exchange]], communicator: Callable[[], Communicator] | None = None
    ) -> NcclRulesWork | None:
        """Make one launch of all parts on `communicator`; inside a batch, add them to the batch's launch instead."""
        if self._grouped is not None:
            self._grouped += parts
            return None
        what = " and ".join(dict.fromkeys(exchange.what for _, exchange in parts))
        launch = self._engine.launch((communicator or self._communicator)(), [part for part, _ in parts], what)
        return NcclRulesWork(self._engine, launch, [x for _, e in parts for x in e.outputs], self._timeout_s)

    def _part(self, exchange: Exchange) -> Part:
        """Return the exchange in ranks of the world; the piece that this rank sends to itself is not sent."""
        own = {self._rank: exchange.sends[self._rank]}
        meets = [r for r in (range(self._size) if exchange.meets is None else exchange.meets) if r != self._rank]
        needs = meets if exchange.needs is None else [r for r in exchange.needs if r != self._rank]

        def finish(received: Payloads) -> None:
            exchange.finish({r: received[self._ranks[r]] for r in meets if self._ranks[r] in received} | own)

        return Part(
            exchange.agree,
            finish,
            {self._ranks[r]: exchange.sends[r] for r in meets},
            {self._ranks[r]: exchange.expects[r] for r in meets},
            frozenset(self._ranks[r] for r in needs),
        )

    def _start_coalescing(self, device: Any = None) -> None:
        self._grouped = []

    def _end_coalescing(self, device: Any = None) -> dist.Work | None:
        grouped, self._grouped = self._grouped, None
        return self._launch(grouped) if grouped else NcclRulesWork.finished(self._engine, [])

    # Messages. Tags are ignored: messages between two ranks meet in the order in which they were launched.

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> NcclRulesWork | None:
        (x,) = tensors
        check_message("send", x)
        to, data = self._ranks[peer], content(x)
        needs = frozenset() if self._buffered(len(data)) else frozenset([to])
        way = f"{self._rank}>{peer}"
        part = Part("message", lambda received: None, {to: data}, {to: 0}, needs, f"{way} send", f"{way} recv")
        return self._message(f"send to rank {to}", part, x, peer)

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> NcclRulesWork | None:
        (x,) = tensors
        check_message("recv", x)
        source = self._ranks[peer]
        way, expects = f"{peer}>{self._rank}", {source: size_bytes(x)}

        def finish(received: Payloads) -> None:
            fill(x, received[source])

        part = Part("message", finish, {source: b""}, expects, frozenset([source]), f"{way} recv", f"{way} send")
        return self._message(f"recv from rank {source}", part, x, peer)

    def _message(self, what: str, part: Part, x: Tensor, peer: int) -> NcclRulesWork | None:
        show(what.split(" ")[0], [x])
        described = Exchange(describe(what, x), "", [x], [], [], lambda pieces: None)
        return self._launch([(part, described)], partial(self._communicator_of_pair, peer))

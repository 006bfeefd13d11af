"""The engine of a rank: it runs the queues of its communicators, and detects waits that cannot end."""

import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from functools import partial

import torch.distributed as dist

from megatron_on_cpu.nccl_rules.buffers import unobserved
from megatron_on_cpu.nccl_rules.queues import hangs
from megatron_on_cpu.nccl_rules.queues.launches import MADE, Communicator, Launch, Part, lines_of_caller
from megatron_on_cpu.nccl_rules.queues.order import LaunchOrder, LaunchOrderHazard
from megatron_on_cpu.nccl_rules.queues.threads import Threads
from megatron_on_cpu.nccl_rules.queues.transport import Header, Transport
from megatron_on_cpu.nccl_rules.rules import NcclRules

_PATIENCE_S = 0.5  # the first time without progress after which ranks are asked what they wait for; it doubles
_LEAST_OFTEN_S = 4.0  # up to this time
_REPLIES_S = 2.0  # the time that ranks have to answer
_STALL_S = 30.0  # the wait after which a rank warns, once, that others may wait for its program


class CommunicationHang(dist.DistBackendError):
    """Ranks wait for each other, or for a rank that has ended, and nothing can end their wait."""


class StallWarning(UserWarning):
    """A rank has waited for long, and no hang was found."""


class CommunicationMismatch(dist.DistBackendError):
    """Ranks launched different operations at the same place in the order of a communicator."""


_FAILURES = {kind.__name__: kind for kind in (CommunicationHang, CommunicationMismatch, LaunchOrderHazard)}


class Engine:
    """The communicators of one rank of a world, whose ranks meet by `store`; all ranks are numbers in this world."""

    def __init__(self, store: dist.Store, rank: int, size: int, rules: NcclRules):
        self.rank, self.size, self.rules, self.closed = rank, size, rules, False
        self.splitting = False  # whether the group that is made now has been split off already
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._communicators: dict[str, Communicator] = {}
        # Messages that have come: (communicator, channel, number) -> peer -> header and payload
        self._arrived: dict[tuple[str, str, int], dict[int, tuple[Header, memoryview]]] = {}
        self._threads = Threads()
        self._to_run: deque[Communicator] = deque()
        self._launches = 0
        self._progress = 0
        self._failure: Exception | None = None
        self._ended: set[int] = set()
        self._question = 0
        self._states: dict[int, hangs.State] = {}
        self._order = LaunchOrder(rules.order, rank)
        with self._lock:
            self._transport = Transport(store, rank, size, self._lock, self._receive, self._peer_ended)

    def communicator(self, name: str, ranks: Sequence[int]) -> Communicator:
        """Return the communicator of this name; if it is new, block until all of its ranks have come, as in NCCL."""
        with self._lock:
            found = self._communicators.setdefault(name, Communicator(name, list(ranks)))
        if not found.made:
            found.made = True
            self._meet(found, f"the making of communicator {name}")
        return found

    def split(self, parent: str, ranks: Sequence[int], child: str) -> str:
        """Block until all `ranks` of group `parent` have come to split off group `child`; return the split's name."""
        with self._lock:
            splits = self._communicators.setdefault(f"{parent} splits", Communicator(f"{parent} splits", list(ranks)))
        self._meet(splits, f"the split of group {child} off group {parent}, to which all of its ranks have to come,")
        return f"{parent} split {splits.launched[MADE]}"

    def _meet(self, communicator: Communicator, what: str) -> None:
        everyone = dict.fromkeys((r for r in communicator.ranks if r != self.rank), 0)
        sends = dict.fromkeys(everyone, b"")
        part = Part("communicator", lambda received: None, sends, everyone, frozenset(everyone), MADE, MADE)
        self.wait(self.launch(communicator, [part], what))

    def launch(self, communicator: Communicator, parts: list[Part], what: str) -> Launch:
        """Append a launch to the communicator's queue, and return it without waiting."""
        launch = Launch(what, parts, communicator, lines_of_caller())
        with self._lock:
            self._raise_failure()
            self._progress += 1
            self._threads.launches(threading.get_ident())
            launch.number, self._launches = self._launches, self._launches + 1
            communicator.number(launch)
            communicator.queue.append(launch)
            self._tell_failure(self._order.launched(launch))
            for part in parts:
                for peer, (header, _) in self._arrived.get((communicator.name, part.theirs, part.number), {}).items():
                    self._tell_failure(self._order.compare(peer, header, part.name))
            self._run(communicator)
        return launch

    def wait(self, launch: Launch, timeout_s: float = float("inf")) -> None:
        """Block until `launch` is complete.

        Raises:
            CommunicationHang: the launch can never complete.
            CommunicationMismatch: ranks launched different operations.
            LaunchOrderHazard: a rank found one, with the order "raise".
            torch.distributed.DistBackendError: the launch was not complete within `timeout_s` seconds.
        """
        start, patience = time.monotonic(), _PATIENCE_S
        deadline, stalled = start + timeout_s, start + _STALL_S
        with self._lock:
            thread = threading.get_ident()
            self._threads.waits[thread] = launch
            self._progress += 1
            try:
                while not launch.done:
                    self._raise_failure()
                    if time.monotonic() > deadline:
                        raise dist.DistBackendError(f"not complete within {timeout_s:.0f} s: {launch.describe()}")
                    before = self._progress
                    self._changed.wait(min(patience, max(deadline - time.monotonic(), 0.01)))
                    if self._progress == before and not launch.done:
                        patience = min(2 * patience, _LEAST_OFTEN_S)
                        states = self._look_for_hang()
                        if states is not None and time.monotonic() > stalled:
                            stalled = float("inf")
                            warnings.warn(hangs.stall(states, self.rank, launch.describe()), StallWarning, stacklevel=2)
            finally:
                self._threads.waits[thread] = None
                self._progress += 1
            if launch.error is not None:
                raise launch.error
            self._order.waited_for(launch)

    def close(self) -> None:
        """End, once all launches of this rank are complete."""
        try:
            for communicator in list(self._communicators.values()):
                if communicator.queue and self._failure is None:
                    self.wait(communicator.queue[-1])
        finally:
            self.closed = True
            self._transport.close()

    def abort(self) -> None:
        """End now, and tell the ranks that wait for this one."""
        self.closed = True
        self._transport.abort()

    # Running the launches. The methods from here on are called with the lock held.

    def _run(self, communicator: Communicator) -> None:
        """Run its queue as far as it goes, then those of calls made meanwhile: a message sent may call this again."""
        self._to_run.append(communicator)
        if len(self._to_run) > 1:
            return
        while self._to_run:
            self._run_queue(self._to_run[0])
            self._to_run.popleft()

    def _run_queue(self, communicator: Communicator) -> None:
        queue = communicator.queue
        while queue and self._failure is None:
            launch = queue[0]
            if not launch.started:
                self._start(launch)
            if not all(part.complete for part in launch.parts):
                return
            self._finish(launch)
            queue.pop(0)

    def _start(self, launch: Launch) -> None:
        launch.started = True
        self._progress += 1
        name = launch.communicator.name
        for part in launch.parts:
            launch.communicator.started[part.mine] += 1
            arrived = self._arrived.setdefault((name, part.theirs, part.number), {})
            for peer, payload in part.sends.items():
                header = {
                    "communicator": name,
                    "channel": part.mine,
                    "number": part.number,
                    "agree": part.agree,
                    "expects": part.expects[peer],
                    "needs": peer in part.needs,
                    "what": launch.describe(),
                    "before": launch.before.get(peer, []),
                    "news": self._order.news(peer),
                }
                if peer == self.rank:
                    self._receive(peer, header, memoryview(payload))
                    continue
                part.unsent += 1
                sent, lost = partial(self._sent, part, launch), partial(self._lost, part, launch, peer)
                self._transport.send(peer, header, payload, sent, lost)
            for peer, message in list(arrived.items()):
                self._take(launch, part, peer, *message)

    def _sent(self, part: Part, launch: Launch) -> None:
        part.unsent -= 1
        if part.unsent == 0:
            self._progress += 1
            self._run(launch.communicator)

    def _lost(self, part: Part, launch: Launch, peer: int) -> None:
        part.lost.add(peer)
        if peer in self._ended:
            self._settle(part, launch, peer)

    def _settle(self, part: Part, launch: Launch, peer: int) -> None:
        """Count a lost message to `peer`, which has ended, as sent if one of the two does not wait for the other."""
        header, _ = self._arrived.get((launch.communicator.name, part.theirs, part.number), {}).get(peer, ({}, b""))
        if peer not in part.needs or not header.get("needs", True):
            part.lost.discard(peer)
            self._sent(part, launch)

    def _take(self, launch: Launch, part: Part, peer: int, header: Header, payload: memoryview) -> None:
        if peer in part.received:
            return
        sent, expected = len(part.sends[peer]), part.expects[peer]
        if header["agree"] == part.agree and header["expects"] == sent and len(payload) == expected:
            part.received[peer] = payload
            return
        here, there = f"sends {sent} bytes, expects {expected}", f"sends {len(payload)}, expects {header['expects']}"
        self._tell_failure(
            CommunicationMismatch(
                f"rank {self.rank} and rank {peer} launched different operations as the same one of communicator "
                f"{launch.communicator.name}: {launch.describe()} ({here}), and {header['what']} ({there})"
            )
        )

    def _finish(self, launch: Launch) -> None:
        self._progress += 1
        communicator = launch.communicator
        with unobserved():
            for part in launch.parts:
                try:
                    part.finish(part.received)
                except Exception as error:
                    launch.error = error
                communicator.finished[part.theirs] += 1
                self._arrived.pop((communicator.name, part.theirs, part.number), None)
                part.received, part.sends = {}, {}
        launch.done = True
        self._changed.notify_all()

    # Messages from other ranks.

    def _receive(self, peer: int, header: Header, payload: memoryview) -> None:
        if "ask" in header:
            self._transport.send(peer, {"answer": header["ask"], "state": self._state()})
        elif "answer" in header:
            if header["answer"] == self._question:
                self._states[peer] = header["state"]
                self._changed.notify_all()
        elif "failure" in header:
            self._fail(_FAILURES[header["kind"]](header["failure"]))
        else:
            self._receive_part(peer, header, payload)

    def _receive_part(self, peer: int, header: Header, payload: memoryview) -> None:
        name, channel, number = header["communicator"], header["channel"], header["number"]
        communicator = self._communicators.get(name)
        self._tell_failure(self._order.heard(peer, header))
        if communicator is not None and number < communicator.finished[channel]:
            return  # a buffered send was complete before its receiver came
        self._progress += 1
        self._arrived.setdefault((name, channel, number), {})[peer] = (header, payload)
        for launch in communicator.queue if communicator is not None else ():
            for part in launch.parts:
                if part.theirs == channel and part.number == number:
                    self._tell_failure(self._order.compare(peer, header, part.name))
                    if launch.started:
                        self._take(launch, part, peer, header, payload)
        if communicator is not None:
            self._run(communicator)

    def _peer_ended(self, peer: int) -> None:
        self._ended.add(peer)
        self._progress += 1
        lost = [
            (part, launch)
            for communicator in self._communicators.values()
            for launch in communicator.queue
            for part in launch.parts
            if peer in part.lost
        ]
        for part, launch in lost:
            self._settle(part, launch, peer)
        self._changed.notify_all()

    # Failures and hangs.

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise type(self._failure)(*self._failure.args)

    def _fail(self, failure: Exception) -> None:
        """Let all launches, present and later ones, end with `failure`."""
        if self._failure is None:
            self._failure = failure
            for communicator in self._communicators.values():
                for launch in communicator.queue:
                    launch.error = failure
        self._changed.notify_all()

    def _tell_failure(self, failure: Exception | None) -> None:
        if failure is None:
            return
        for peer in range(self.size):
            if peer != self.rank:
                self._transport.send(peer, {"failure": str(failure), "kind": type(failure).__name__})
        self._fail(failure)

    def _look_for_hang(self) -> dict[int, hangs.State] | None:
        """Ask all ranks twice for their states: ranks that wait both times without progress wait at the same time.

        Returns the states if there is no hang.
        """
        first = self._ask()
        if first is None or hangs.report(first, self.rank) is None:
            return first
        second = self._ask()
        if second is None:
            return None
        told = hangs.report(second, self.rank)
        same = all(first[rank]["progress"] == second[rank]["progress"] for rank in hangs.stuck_ranks(second))
        if told is not None and same:
            self._tell_failure(CommunicationHang(told))
        return None

    def _ask(self) -> dict[int, hangs.State] | None:
        self._question += 1
        question = self._question
        self._states = {self.rank: self._state()}
        for peer in range(self.size):
            if peer in self._ended:
                self._states[peer] = hangs.ENDED
            elif peer != self.rank:
                self._transport.send(peer, {"ask": question})
        deadline = time.monotonic() + _REPLIES_S
        while len(self._states) < self.size and self._question == question and self._failure is None:
            if (left := deadline - time.monotonic()) < 0:
                return None
            self._changed.wait(left)
        return self._states if self._question == question and self._failure is None else None

    def _state(self) -> hangs.State:
        waits, running = self._threads.states()

        def place(launch: Launch | None) -> tuple[str, int] | None:
            if launch is None or launch.done:
                return None
            return launch.communicator.name, launch.communicator.queue.index(launch)

        return {
            "progress": self._progress,
            "ended": False,
            "threads": [place(launch) for launch in waits],
            "running": running,
            "communicators": {
                name: hangs.queue_state(found, self._arrived) for name, found in self._communicators.items()
            },
        }

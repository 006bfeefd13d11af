"""Messages between all ranks of a world: a TCP connection for each pair, and one thread of each rank that reads.

gloo's own messages would not suffice: they move when the receiver asks for them, while here a rank has to learn at any
time what another one waits for.
"""

import hmac
import json
import secrets
import selectors
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

_PREFIX = struct.Struct("<IQ")  # the numbers of bytes of the header and of the payload behind it
_ALIGNMENT = 16  # the payload starts at a multiple of these bytes, so that a tensor can share its memory

_CLOSE_S = 5.0

Header = dict[str, Any]
Receive = Callable[[int, Header, memoryview], None]
Gone = Callable[[int], None]


class Transport:
    """The connections of rank `rank` with all other ranks of a world of `size`, which meet by `store`.

    `lock` guards everything: `receive(peer, header, payload)` and `gone(peer)` are called with the lock held, and a
    thread that calls `send` has to hold it.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, lock: Any, receive: Receive, gone: Gone):
        self._lock, self._receive, self._gone = lock, receive, gone
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        for peer, connected in _meet(store, rank, size).items():
            self._connections[peer] = _Connection(peer, connected)
            self._selector.register(connected, selectors.EVENT_READ, self._connections[peer])
        self._wake, self._woken = socket.socketpair()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._closing, self._flushed = False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="nccl-rules", daemon=True)
        self._thread.start()

    def send(
        self,
        peer: int,
        header: Header,
        payload: Any = b"",
        sent: Callable[[], None] | None = None,
        lost: Callable[[], None] | None = None,
    ) -> None:
        """Send `header` and the bytes of `payload`.

        `sent()` is called once the bytes have left and may be changed, `lost()` instead if the peer has ended before.
        """
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-(len(text) + _PREFIX.size) % _ALIGNMENT)
        connection = self._connections.get(peer)
        if connection is None:
            if lost is not None:
                lost()
            return
        frame = memoryview(_PREFIX.pack(len(text), len(payload)) + text)
        connection.out.append((frame, None, None) if len(payload) else (frame, sent, lost))
        if len(payload):
            connection.out.append((memoryview(payload), sent, lost))
        if connection.writes_all:
            self._flush(connection)

    def close(self) -> None:
        """Send what is left, tell all peers that no more will come, and return, after 5 seconds at the latest."""
        self._closing = True
        self._wake.send(b"x")
        self._flushed.wait(_CLOSE_S)

    def abort(self) -> None:
        """End as if the process were killed: messages that are left are not sent, those that come are not read."""
        with self._lock:
            self._closing = True
            self._flushed.set()
            for connection in list(self._connections.values()):
                self._drop(connection)
        self._wake.send(b"x")

    def _flush(self, connection: "_Connection") -> None:
        try:
            done = connection.flush()
        except OSError:  # the peer no longer reads; what it has sent is still to be read
            done = True
            connection.drop_output()
        if done != connection.writes_all:
            connection.writes_all = done
            events = selectors.EVENT_READ if done else selectors.EVENT_READ | selectors.EVENT_WRITE
            self._selector.modify(connection.socket, events, connection)

    def _drop(self, connection: "_Connection") -> None:
        if self._connections.pop(connection.peer, None) is not None:
            connection.drop_output()
            self._selector.unregister(connection.socket)
            connection.socket.close()
            self._gone(connection.peer)

    def _run(self) -> None:
        while self._connections or not self._closing:
            for key, events in self._selector.select():
                connection = key.data
                if connection is None:
                    self._woken.recv(1)
                    continue
                with self._lock:
                    if events & selectors.EVENT_WRITE and connection.peer in self._connections:
                        self._flush(connection)
                    if events & selectors.EVENT_READ and connection.peer in self._connections:
                        self._read(connection)
            if self._closing and not self._flushed.is_set():
                self._say_goodbye()
        self._flushed.set()
        self._selector.close()

    def _say_goodbye(self) -> None:
        """Close this side once all is sent; this rank reads on until the peers close their sides."""
        with self._lock:
            if all(connection.writes_all for connection in self._connections.values()):
                for connection in self._connections.values():
                    with suppress(OSError):
                        connection.socket.shutdown(socket.SHUT_WR)
                self._flushed.set()

    def _read(self, connection: "_Connection") -> None:
        try:
            frame = connection.read()
        except (OSError, EOFError):
            self._drop(connection)
            return
        if frame is not None:
            self._receive(connection.peer, *frame)


class _Connection:
    """A socket that never blocks, with the output still to be sent and the part of the next frame that has come."""

    def __init__(self, peer: int, connected: socket.socket):
        self.peer, self.socket = peer, connected
        self.out: deque[tuple[memoryview, Callable[[], None] | None, Callable[[], None] | None]] = deque()
        self.writes_all = True
        self._header_bytes = -1  # not known yet
        self._wanted = memoryview(bytearray(_PREFIX.size))
        self._filled = 0
        connected.setblocking(False)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def flush(self) -> bool:
        """Send as much as the system takes now; tell whether that was all."""
        while self.out:
            data, sent, lost = self.out[0]
            try:
                n = self.socket.send(data)
            except BlockingIOError:
                return False
            if n < len(data):
                self.out[0] = (data[n:], sent, lost)
                continue
            self.out.popleft()
            if sent is not None:
                sent()
        return True

    def drop_output(self) -> None:
        """Drop the output that is left, and call the senders' `lost()`."""
        out, self.out = self.out, deque()
        for _, _, lost in out:
            if lost is not None:
                lost()

    def read(self) -> tuple[Header, memoryview] | None:
        """Read what has come; return a frame (header, payload) once it is whole, or None."""
        while True:
            while self._filled < len(self._wanted):
                try:
                    n = self.socket.recv_into(self._wanted[self._filled :])
                except BlockingIOError:
                    return None
                if n == 0:
                    raise EOFError
                self._filled += n
            frame, self._filled = self._wanted, 0
            if self._header_bytes < 0:
                self._header_bytes, payload_bytes = _PREFIX.unpack(frame)
                # The alignment of the payload counts from the prefix.
                self._wanted = memoryview(bytearray(_PREFIX.size + self._header_bytes + payload_bytes))
                self._filled = _PREFIX.size
                continue
            end = _PREFIX.size + self._header_bytes
            self._header_bytes, self._wanted = -1, memoryview(bytearray(_PREFIX.size))
            return json.loads(bytes(frame[_PREFIX.size : end])), frame[end:]


def _meet(store: dist.Store, rank: int, size: int) -> dict[int, socket.socket]:
    """Connect with every other rank, over the loopback interface if all ranks are on one host."""
    name = socket.gethostname()
    if rank == 0:
        store.set("key", secrets.token_hex(16))
    key = store.get("key")
    store.set(f"host of {rank}", name)
    local = all(store.get(f"host of {r}") == name.encode() for r in range(size))
    address = "127.0.0.1" if local else socket.gethostbyname(name)
    connections = {}
    with socket.create_server((address, 0), backlog=size) as listener:
        store.set(f"address of {rank}", f"{address} {listener.getsockname()[1]}")
        for peer in range(rank):
            host, port = store.get(f"address of {peer}").decode().split()
            connected = socket.create_connection((host, int(port)))
            connected.sendall(key + b"%8d" % rank)
            connections[peer] = connected
        while len(connections) < size - 1:
            connected, _ = listener.accept()
            said = connected.recv(len(key) + 8, socket.MSG_WAITALL)
            if len(said) == len(key) + 8 and hmac.compare_digest(said[: len(key)], key):
                connections[int(said[len(key) :])] = connected
            else:  # not a rank of this job
                connected.close()
    return connections

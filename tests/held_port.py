"""A port at which ranks meet, which the system gives to no other program before."""

import socket
import sys

import torch.distributed as dist


def hold_port() -> tuple[int, socket.socket]:
    """Return a free port of this host, and a socket that holds it; close the socket once a program listens there.

    On Linux a program may listen at a port where a socket is bound that allows it and does not listen itself, and a
    program that asks for any free port gets another one. Other systems do not let two sockets share an address, so the
    socket is closed there.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    port = held.getsockname()[1]
    if sys.platform != "linux":
        held.close()
    return port, held


def shared_port() -> int:
    """Return a free port, the same on all ranks, at which rank 0 may listen; nothing holds the port."""
    port, held = hold_port()
    held.close()
    found = [port]
    dist.broadcast_object_list(found)
    return found[0]

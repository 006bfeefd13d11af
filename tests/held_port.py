"""A port for ranks to meet at, which no other program is given before they have met."""

import socket
import sys

import torch.distributed as dist


def hold_port() -> tuple[int, socket.socket]:
    """A free port of this host, and what holds it: close that once somebody listens there.

    On Linux one may listen where a socket is bound that allows it and does not listen itself, and who asks for any free
    port gets another one. Other systems do not let two sockets share an address: there nothing holds the port.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("", 0))
    port = held.getsockname()[1]
    if sys.platform != "linux":
        held.close()
    return port, held


def shared_port() -> int:
    """A free port that all ranks know, which nothing holds: for one that these ranks' rank 0 listens at."""
    port, held = hold_port()
    held.close()
    found = [port]
    dist.broadcast_object_list(found)
    return found[0]

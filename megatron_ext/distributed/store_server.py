"""Store of torch.distributed at which ranks meet, which listens at one address of its host and not at all of them."""

import socket
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist


def serve_store(host: str, port: int = 0, ranks: int | None = None, timeout_s: float = 300) -> dist.TCPStore:
    """Make a store for `ranks` processes (None: any number) that listens at `host`, an address of this machine.

    Its `port` is the one given, or for 0 a free one. If `host` is an address that this machine does not know itself, as
    behind an address translation, or if this process serves the port already, torch listens by itself, at all
    addresses.
    """
    listener = None
    with suppress(OSError):
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
        port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        ranks,
        is_master=True,
        timeout=timedelta(seconds=timeout_s),
        wait_for_workers=ranks is not None,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def loopback_interface() -> str | None:
    """Return the name of the loopback interface; None: it is not known."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)  # Linux, macOS

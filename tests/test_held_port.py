import socket

import pytest
import torch.distributed as dist

from tests.held_port import hold_port


def test_ranks_may_meet_at_a_held_port_and_no_other_program():
    port, held = hold_port()
    with held:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("", port))
        store = dist.TCPStore("localhost", port, 1, is_master=True)
        store.set("met", "yes")
        assert store.get("met") == b"yes"

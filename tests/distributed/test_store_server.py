"""A store listens at the address that it is asked to, and serves ranks as torch's own does."""

import os
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.group_between_jobs import JobsGroup
from megatron_ext.distributed.store_server import loopback_interface, serve_store


def listening():
    found = psutil.Process().net_connections("inet")
    return {(c.laddr.ip, c.laddr.port) for c in found if c.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_it_listens_at_one_address(host):
    before = listening()
    store = serve_store(host)
    [(ip, port)] = listening() - before
    assert (ip in ("127.0.0.1", "::1"), port) == (True, store.port)
    other = dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=60))
    other.set("met", "yes")
    assert store.get("met") == b"yes"


def test_where_it_cannot_listen_there_torch_does_by_itself(monkeypatch):
    def fails(*_, **__):
        raise OSError("cannot assign requested address")

    monkeypatch.setattr("socket.create_server", fails)
    before = listening()
    store = serve_store("127.0.0.1")
    assert {port for _, port in listening() - before} == {store.port}
    store.set("met", "yes")
    assert store.get("met") == b"yes"


def test_jobs_meet_where_the_first_one_listens():
    before = listening()
    port = serve_store("127.0.0.1").port  # is free again once the store is gone
    group = JobsGroup("127.0.0.1", port, 0, 1)
    assert {ip for ip, _ in listening() - before} == {"127.0.0.1"}
    assert group.broadcast(torch.ones(2)).tolist() == [1, 1]
    again = JobsGroup("127.0.0.1", port, 0, 1)  # another group at the same place
    assert again.broadcast(torch.ones(1)).tolist() == [1]


def test_the_loopback_interface():
    assert loopback_interface() in (os.listdir("/sys/class/net") if os.path.isdir("/sys/class/net") else ["lo0"])

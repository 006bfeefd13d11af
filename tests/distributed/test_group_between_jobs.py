"""Comparisons between jobs before they send, and the store where they meet: its address, and that it keeps nothing."""

import os
from datetime import timedelta

import psutil
import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.group_between_jobs import JobsGroup
from megatron_ext.distributed.store_server import loopback_interface, serve_store
from tests.held_port import shared_port
from tests.ranks import ranks


@ranks(2)
def test_the_store_keeps_the_keys_of_one_comparison():
    group = JobsGroup("127.0.0.1", shared_port(), dist.get_rank(), 2)
    keys = []
    for _ in range(3):
        assert group.differing("the same") == []
        assert group.differing(f"rank {dist.get_rank()}") == [1]
        dist.barrier()
        keys.append(group._store.num_keys())
        dist.barrier()
    assert keys == keys[:1] * 3


@ranks(2)
def test_late_rank_and_waiting_ranks_get_the_same_error():
    """Late ranks once found what the others had left, and went on to a broadcast that nobody joined."""
    port, rank = shared_port(), dist.get_rank()
    group = JobsGroup("127.0.0.1", port, rank, 2)
    group._store.set_timeout(timedelta(seconds=1))
    if rank == 1:
        dist.barrier()
    with pytest.raises(RuntimeError, match=r"ranks \[1\] of the 2 .* did not come .* Make a new group: call init_coll"):
        group.differing("the same")
    if rank == 0:
        dist.barrier()
    for call in (lambda: group.differing("the same"), lambda: group.broadcast(torch.ones(1))):
        with pytest.raises(RuntimeError, match="this group of 2 ranks has failed. Make a new group"):
            call()
    again = JobsGroup("127.0.0.1", port, rank, 2)  # while the last one lives
    assert again.differing("the same") == []
    assert again.broadcast(torch.full((2,), float(rank))).tolist() == [0.0, 0.0]


@pytest.mark.slow
@ranks(2)
def test_meetings_at_one_port_may_be_of_other_sizes_and_may_fail():
    port, rank = shared_port(), dist.get_rank()
    groups = [JobsGroup("127.0.0.1", port, rank, 2)]  # they live while others meet there
    for alone in (2, 1):
        if rank == 0 and alone == 2:
            with pytest.raises((RuntimeError, dist.DistStoreError)):
                JobsGroup("127.0.0.1", port, 0, alone, timeout_s=1)
        elif rank == 0:
            groups.append(JobsGroup("127.0.0.1", port, 0, alone))
        dist.barrier()
        groups.append(JobsGroup("127.0.0.1", port, rank, 2, timeout_s=10))
        assert groups[-1].differing("the same") == []
        assert groups[-1].broadcast(torch.full((2,), float(rank))).tolist() == [0.0, 0.0]
        dist.barrier()


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

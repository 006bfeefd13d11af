"""Programs that pass on gloo and hang on NCCL: told in seconds, with who waits for whom and where."""

import time

import pytest
import torch
import torch.distributed as dist

from megatron_on_cpu.nccl_rules import CommunicationHang, CommunicationMismatch, NcclRules
from tests.ranks import ranks

pytestmark = pytest.mark.slow

LAZY, EAGER = NcclRules(), NcclRules(eager=True)


def exchange_receiving_first():
    peer = 1 - dist.get_rank()
    x, y = torch.full((4,), float(dist.get_rank())), torch.empty(4)
    receive = dist.irecv(y, peer)
    send = dist.isend(x, peer)
    receive.wait()
    send.wait()
    assert y.tolist() == [peer] * 4


@ranks(2, rules="gloo")
def test_receive_before_send_passes_on_gloo():
    exchange_receiving_first()


@pytest.mark.essential
@ranks(2, rules=LAZY)
def test_receive_before_send_hangs():
    start = time.monotonic()
    with pytest.raises(CommunicationHang) as told:
        exchange_receiving_first()
    assert time.monotonic() - start < 30
    text = str(told.value)
    assert text.count("test_hangs.py:") >= 6, text
    for rank in (0, 1):
        assert f"runs  recv from rank {1 - rank} of float32 [4]" in text
        assert f"next  send to rank {1 - rank} of float32 [4]" in text
    assert "communicator 0 0:1" in text


@ranks(2, rules=EAGER)
def test_receive_before_send_hangs_on_the_groups_communicator():
    with pytest.raises(CommunicationHang, match="communicator 0 "):
        exchange_receiving_first()


def ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    y = torch.empty(2)
    send = dist.isend(torch.full((2,), float(rank)), (rank + 1) % size)
    receive = dist.irecv(y, (rank - 1) % size)
    receive.wait()
    send.wait()
    assert y.tolist() == [(rank - 1) % size] * 2


@ranks(3, rules="gloo")
def test_ring_of_messages_passes_on_gloo():
    ring()


@ranks(3, rules=LAZY)
def test_ring_of_messages_hangs_where_communicators_are_made():
    """Each rank makes the communicator with its successor, and waits for it there."""
    with pytest.raises(CommunicationHang, match="the making of communicator 0 1:2"):
        ring()


@ranks(2, rules=LAZY)
def test_a_rank_that_has_ended_is_named():
    if dist.get_rank() == 0:
        with pytest.raises(CommunicationHang, match="rank 1 ended"):
            dist.all_reduce(torch.ones(2))
    else:
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@ranks(2, rules=LAZY)
def test_different_operations_are_told_on_both_ranks():
    x = torch.ones(3)
    with pytest.raises(CommunicationMismatch, match="all_reduce.*broadcast|broadcast.*all_reduce"):
        dist.all_reduce(x) if dist.get_rank() else dist.broadcast(x, 0)


@pytest.mark.essential
@ranks(2, rules=LAZY)
def test_different_sizes_are_told_on_both_ranks():
    with pytest.raises(CommunicationMismatch, match=r"12 bytes|16 bytes|sends 12|sends 16"):
        dist.all_reduce(torch.ones(3 + dist.get_rank()))

"""One queue for each communicator, in launch order: which communicator a call runs on, and what waits for what."""

import pytest
import torch
import torch.distributed as dist

from megatron_on_cpu.nccl_rules import CommunicationHang, NcclRules
from tests.ranks import ranks

pytestmark = pytest.mark.slow

LAZY, EAGER = NcclRules(), NcclRules(eager=True)


def everyone_has_met():
    """The communicators of the group and of all pairs are made."""
    dist.barrier()
    for low in range(dist.get_world_size()):
        for high in range(low + 1, dist.get_world_size()):
            if dist.get_rank() == low:
                dist.send(torch.zeros(1), high)
            elif dist.get_rank() == high:
                dist.recv(torch.zeros(1), low)


def receive_across_a_collective():
    """Rank 0 receives first, rank 1 sends last; between them both join a collective."""
    x = torch.full((2,), float(dist.get_rank()))
    if dist.get_rank() == 0:
        received = torch.empty(2)
        work = dist.irecv(received, 1)
        dist.all_reduce(x)
        work.wait()
        assert received.tolist() == [1, 1]
    else:
        dist.all_reduce(x)
        dist.send(torch.ones(2), 0)
    assert x.tolist() == [1, 1]


@ranks(2, rules=LAZY)
def test_a_pair_of_ranks_has_a_communicator_of_its_own():
    everyone_has_met()
    receive_across_a_collective()


@ranks(2, rules=EAGER)
def test_messages_run_among_collectives_of_eager_groups():
    everyone_has_met()
    with pytest.raises(CommunicationHang, match=r"next  all_reduce \(sum\)"):
        receive_across_a_collective()


@ranks(2, rules=LAZY)
def test_first_message_blocks_the_host_until_the_peer_sends():
    """So the collective after it is never launched."""
    with pytest.raises(CommunicationHang, match="the making of communicator 0 0:1"):
        receive_across_a_collective()


def batch_across_a_collective():
    received = torch.empty(2)
    if dist.get_rank() == 0:
        works = dist.batch_isend_irecv([dist.P2POp(dist.irecv, received, 1)])
        dist.all_reduce(torch.ones(2))
        works[0].wait()
        assert received.tolist() == [5, 5]
    else:
        dist.all_reduce(torch.ones(2))
        dist.batch_isend_irecv([dist.P2POp(dist.isend, torch.full((2,), 5.0), 0)])[0].wait()


@pytest.mark.parametrize("program", [receive_across_a_collective, batch_across_a_collective])
@ranks(2, rules="gloo")
def test_passes_on_gloo(program):
    everyone_has_met()
    program()


@ranks(2, rules=LAZY)
def test_a_batch_runs_on_the_groups_communicator():
    everyone_has_met()
    with pytest.raises(CommunicationHang, match="recv from rank 1"):
        batch_across_a_collective()


@ranks(3, rules=LAZY)
def test_a_batch_has_no_order():
    """Every rank sends to all, receives from all, in an order of its own; it is one launch, and gives one work."""
    rank, size = dist.get_rank(), dist.get_world_size()
    received = torch.full((size, 2), -1.0)
    peers = [(rank + i) % size for i in range(size)]
    calls = [dist.P2POp(dist.irecv, received[peer], peer) for peer in peers if peer != rank]
    calls += [dist.P2POp(dist.isend, torch.tensor([rank, peer]).float(), peer) for peer in peers if peer != rank]
    works = dist.batch_isend_irecv(calls[rank:] + calls[:rank])
    assert len(works) == 1
    works[0].wait()
    assert all(received[peer].tolist() == [peer, rank] for peer in peers if peer != rank)
    with dist.distributed_c10d._coalescing_manager(device=torch.device("cpu"), async_ops=True) as sent:
        x = torch.full((2,), float(rank))
        dist.isend(x, (rank + 1) % size)
        dist.irecv(received[0], (rank - 1) % size)
    sent.wait()
    assert received[0].tolist() == [(rank - 1) % size] * 2


@ranks(3, rules=LAZY)
def test_the_first_batch_of_a_group_needs_all_of_its_ranks():
    rank, x = dist.get_rank(), torch.zeros(2)
    with pytest.raises(CommunicationHang, match=r"the making of communicator 0 at[^\n]*batch_of_two"):
        batch_of_two(rank, x)


def batch_of_two(rank, x):
    if rank < 2:
        call = dist.isend if rank == 0 else dist.irecv
        dist.batch_isend_irecv([dist.P2POp(call, x, 1 - rank)])[0].wait()
    dist.send(x, 2) if rank == 0 else dist.recv(x, 0)


def send_first(n):
    rank = dist.get_rank()
    x, y = torch.full((n,), float(rank)), torch.empty(n)
    dist.send(x, 1 - rank)
    dist.recv(y, 1 - rank)
    assert y.tolist() == [1 - rank] * n


@ranks(2, rules=LAZY)
def test_without_buffers_a_send_waits_for_its_receiver():
    with pytest.raises(CommunicationHang, match="runs  send to rank"):
        send_first(4)


@ranks(2, rules=NcclRules(buffer_bytes=16))
def test_buffers_hold_what_fits():
    send_first(4)
    with pytest.raises(CommunicationHang, match="runs  send to rank"):
        send_first(5)


def leave_after(collective, first, result, n):
    """The root of a broadcast, and who sends to a reduction, go on and wait for others by a message."""
    x = torch.full((n,), float(1 + dist.get_rank()))
    if dist.get_rank() == first:
        collective(x, 0)
        dist.send(torch.ones(1), 1 - first)
    else:
        dist.recv(torch.ones(1), first)
        collective(x, 0)
        assert x.tolist() == [result] * n


@pytest.mark.parametrize(
    "name,first,result,runs",
    [("broadcast", 0, 1, "broadcast from rank 0"), ("reduce", 1, 3, r"reduce to rank 0 \(sum\)")],
)
@ranks(2, rules=NcclRules(buffer_bytes=16))
def test_buffers_of_collectives(name, first, result, runs):
    everyone_has_met()
    leave_after(getattr(dist, name), first, result, 4)
    with pytest.raises(CommunicationHang, match=f"runs  {runs}"):
        leave_after(getattr(dist, name), first, result, 5)


@ranks(2, rules=LAZY)
def test_launches_go_on_while_the_program_does_not():
    """Launched work runs to its end although nobody waits for it: the peer needs it."""
    dist.barrier()
    x = torch.full((2,), float(1 + dist.get_rank()))
    works = [dist.all_reduce(x, async_op=True) for _ in range(3)]
    if dist.get_rank() == 0:
        works[-1].wait()
        dist.recv(torch.empty(1), 1)
    else:
        dist.send(torch.ones(1), 0)
    works[0].wait()
    works[2].wait()
    assert all(work.is_completed() for work in works)
    assert x.tolist() == [12, 12]


@ranks(2, rules=LAZY)
def test_large_messages_do_not_fit_a_socket():
    n = 3_000_000
    x = torch.arange(n, dtype=torch.float32) + dist.get_rank()
    dist.all_reduce(x)
    assert torch.equal(x, 2 * torch.arange(n, dtype=torch.float32) + 1)
    y = torch.empty_like(x)
    peer = 1 - dist.get_rank()
    x += dist.get_rank()
    dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, y, peer)])[0].wait()
    assert torch.equal(y, x - dist.get_rank() + peer)

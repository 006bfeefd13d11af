"""Programs that pass on gloo and hang on NCCL: told in seconds, with who waits for whom and where."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from megatron_on_cpu.nccl_rules import CommunicationHang, CommunicationMismatch, NcclRules, StallWarning
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


@pytest.mark.parametrize("n", [4, 1_000_000])
@ranks(2, rules=LAZY)
def test_rank_that_ends_with_work_outstanding_is_named(n):
    """An exception ends a program so: what it has launched has reached its peer, whose own share finds nobody."""
    x = torch.ones(n)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.all_reduce(x, async_op=True)
        dist.group.WORLD.abort()
    else:
        time.sleep(0.5)
        with pytest.raises(CommunicationHang, match="rank 1 ended while others wait for it"):
            dist.all_reduce(x)


@ranks(2, rules=NcclRules(buffer_bytes=16))
def test_sender_may_end_once_its_message_is_in_a_buffer():
    x = torch.zeros(4)
    dist.barrier()
    if dist.get_rank() == 1:
        dist.isend(torch.ones(4), 0)
        dist.destroy_process_group()
    else:
        time.sleep(0.5)
        dist.recv(x, 1)
        assert x.tolist() == [1, 1, 1, 1]


@ranks(2, rules=LAZY)
def test_group_is_destroyed_when_its_work_is_done():
    x = torch.ones(3)
    dist.all_reduce(x, async_op=True)
    if dist.get_rank() == 0:
        time.sleep(0.3)
    dist.destroy_process_group()
    assert x.tolist() == [2, 2, 2]


@ranks(2, rules=LAZY)
def test_idle_threads_of_a_pool_launch_nothing():
    """The pool's thread has launched something before, and has no work now."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(dist.barrier).result()
        with pytest.raises(CommunicationHang, match="wait for each other in a circle"):
            exchange_receiving_first()


@ranks(2, rules=LAZY)
def test_thread_that_runs_may_launch():
    """The main thread waits, and another one launches what its peer needs after a while."""
    dist.barrier()
    rank, x = dist.get_rank(), torch.zeros(2)

    def later():
        dist.barrier()
        end = time.monotonic() + 4
        while time.monotonic() < end:
            time.sleep(0.05)
        dist.send(torch.ones(2), 1 - rank)

    with ThreadPoolExecutor(2) as pool:
        if rank == 0:
            sent = pool.submit(later)
            sent.result()
        else:
            dist.barrier()
            dist.recv(x, 0)
            assert x.tolist() == [1, 1]


def group_of_two(**options):
    if dist.get_rank() < 2:
        dist.new_group([0, 1], **options)
    dist.barrier()


@pytest.mark.parametrize("options", [{}, {"use_local_synchronization": True}])
@ranks(3, rules=EAGER)
def test_all_ranks_come_to_an_eager_new_group(options):
    """NCCL splits it off the default group; `use_local_synchronization` keeps the third rank away."""
    with pytest.raises(CommunicationHang, match="to which all of its ranks have to come"):
        group_of_two(**options)


@ranks(3, rules=LAZY)
def test_members_alone_come_to_a_lazy_new_group():
    group_of_two(use_local_synchronization=True)


@ranks(2, rules=EAGER)
def test_long_wait_for_a_program_that_runs_is_warned_of():
    """Right on GPUs, where `recv` returns at once: the peer waits for a signal over the store."""
    from megatron_on_cpu.nccl_rules.queues import engine

    dist.barrier()
    engine._STALL_S, store, x = 0.5, dist.distributed_c10d._get_default_store(), torch.zeros(2)
    if dist.get_rank() == 0:
        with pytest.warns(StallWarning, match="rank 1 runs at [^\n]*test_hangs.py:[0-9]* in wait_for_a_signal"):
            dist.recv(x, 1)
        assert x.tolist() == [1, 1]
    else:
        with pytest.raises(RuntimeError, match=r"(?i)timeout"):
            wait_for_a_signal(store)
        dist.send(torch.ones(2), 0)


def wait_for_a_signal(store):
    store.wait(["signal"], timedelta(seconds=4))


@ranks(2, rules=LAZY)
def test_wait_ends_with_its_time():
    dist.barrier()
    if dist.get_rank() == 0:
        work = dist.all_reduce(torch.ones(2), async_op=True)
        with pytest.raises(dist.DistBackendError, match="not complete within 1 s"):
            work.wait(timedelta(seconds=1))
        work.wait()
    else:
        time.sleep(1.5)
        dist.all_reduce(torch.ones(2))

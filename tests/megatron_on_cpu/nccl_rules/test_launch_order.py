"""Two communicators launched in different orders on two ranks: a hazard on GPUs, told even where nothing hangs here."""

import warnings

import pytest
import torch
import torch.distributed as dist

from megatron_on_cpu.nccl_rules import LaunchOrderHazard, LaunchOrderWarning, NcclRules
from megatron_on_cpu.nccl_rules.queues.launches import Communicator, Launch, Part
from megatron_on_cpu.nccl_rules.queues.order import LaunchOrder
from tests.megatron_on_cpu.nccl_rules.test_queues import everyone_has_met
from tests.ranks import ranks

pytestmark = pytest.mark.slow


def two_groups():
    groups = dist.new_group(), dist.new_group()
    for group in groups:
        dist.barrier(group)
    return groups


def launch_in_different_orders():
    """Nothing waits for anything else, as long as each communicator has a queue of its own."""
    first, second = two_groups()
    works = []
    for group in (first, second) if dist.get_rank() == 0 else (second, first):
        works.append(dist.all_reduce(torch.ones(2), group=group, async_op=True))
    dist.barrier()
    dist.barrier()


@ranks(2, rules=NcclRules(order="raise"))
def test_different_orders_are_told():
    with pytest.raises(LaunchOrderHazard) as told:
        launch_in_different_orders()
    assert str(told.value).count("test_launch_order.py:") >= 4
    assert "rank 0 launched" in str(told.value)
    assert "rank 1 launched" in str(told.value)


@ranks(2, rules=NcclRules())
def test_different_orders_are_a_warning_by_default():
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        launch_in_different_orders()
        gathered = torch.tensor([sum(issubclass(w.category, LaunchOrderWarning) for w in told)])
    dist.all_reduce(gathered)
    assert gathered.item() >= 1


@ranks(2, rules=NcclRules(order="ignore"))
def test_different_orders_can_be_ignored():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch_in_different_orders()


@ranks(2, rules=NcclRules(order="raise"))
def test_the_same_order_everywhere_is_no_hazard():
    groups = two_groups()
    works = [dist.all_reduce(torch.ones(2), group=group, async_op=True) for _ in range(3) for group in groups]
    for work in reversed(works):
        work.wait()


@ranks(2, rules=NcclRules(order="raise"))
def test_what_was_waited_for_is_no_hazard():
    """Both ranks launch each of the two communicators first at some time, but never with the other one under way."""
    groups = two_groups()
    for group in (*groups, *groups[::-1]):
        dist.all_reduce(torch.ones(2), group=group)


def three_in_a_circle(*, wait=False):
    """Each rank launches on the communicator with the next rank, then on that with the one before; a pair has one."""
    rank = dist.get_rank()
    groups = [dist.new_group([0, 1]), dist.new_group([1, 2]), dist.new_group([0, 2])]
    mine = [groups[rank], groups[rank - 1]]
    for group in groups:
        if group in mine:
            dist.barrier(group)
    works = []
    for group in mine:
        works.append(dist.all_reduce(torch.ones(2), group=group, async_op=True))
        if wait and rank == 1:
            works.pop().wait()
    for work in works:
        work.wait()
    dist.barrier()
    dist.barrier()


@ranks(3, rules=NcclRules(order="raise"))
def test_a_circle_of_three_communicators_is_told():
    with pytest.raises(LaunchOrderHazard, match="goes round") as told:
        three_in_a_circle()
    for rank in range(3):
        assert f"rank {rank} launched all_reduce" in str(told.value)
    assert str(told.value).count("test_launch_order.py:") >= 6


@ranks(3, rules=NcclRules(order="raise", eager=True))
def test_circle_of_three_eager_communicators_is_told():
    with pytest.raises(LaunchOrderHazard, match="goes round"):
        three_in_a_circle()


@ranks(3, rules=NcclRules(order="raise"))
def test_a_circle_with_a_wait_in_it_is_no_hazard():
    three_in_a_circle(wait=True)


@ranks(3, rules=NcclRules(order="raise"))
def test_a_ring_of_messages_is_no_hazard():
    rank = dist.get_rank()
    everyone_has_met()
    works = [
        dist.isend(torch.full((1,), rank), (rank + 1) % 3),
        dist.irecv(found := torch.ones(1).long(), (rank - 1) % 3),
    ]
    for work in works:
        work.wait()
    assert found.item() == (rank - 1) % 3
    dist.barrier()
    dist.barrier()


def launched(orders):
    """Returns what each rank tells the rank before it, and the circles that are found, where rank i launches
    `orders[i]`, asynchronous collectives of communicators by name; the ranks of a communicator are those that launch
    one of its collectives."""
    of = {name: [r for r, names in enumerate(orders) if name in names] for names in orders for name in names}
    ranks = [LaunchOrder("raise", r) for r in range(len(orders))]
    for rank, names in enumerate(orders):
        made = {name: Communicator(name, of[name]) for name in names}
        for number, name in enumerate(names):
            peers = dict.fromkeys((r for r in of[name] if r != rank), 0)
            launch = Launch(name, [Part("sum", print, peers, peers, frozenset(peers))], made[name], [], number)
            made[name].number(launch)
            ranks[rank].launched(launch)
    told = [ranks[r].news(r - 1) for r in range(len(ranks))]
    found = [ranks[r - 1].heard(r, {"news": told[r]}) for r in range(len(ranks))]
    found += [ranks[r - 1].heard(r, {"news": ranks[r].news(r - 1)}) for _ in ranks for r in range(len(ranks))]
    return told, [str(one) for one in found if one is not None]


def test_a_launch_tells_one_step_however_many_are_under_way():
    """Steps from earlier launches to the last one were told already."""
    told, found = launched(["abcdefgh", "abcdefgh", "abcdefgh"])
    assert [len(news) for news in told] == [7, 7, 7]
    assert not found


@pytest.mark.parametrize("orders", [("AaB", "BbC", "CcA"), ("AAaB", "BBbC", "CCcA")])
def test_a_circle_passes_what_lies_between(orders):
    """Small letters are communicators of one rank."""
    _, found = launched(orders)
    assert found
    assert all("goes round" in one for one in found)


def test_what_lies_between_makes_no_circle_of_three():
    """Two communicators in different orders, which is told otherwise, and a third one in between."""
    assert not launched(["AaB", "BA", "a"])[1]


def a_message_and_a_collective():
    if dist.get_rank() == 0:
        message = dist.isend(torch.ones(1), 1)
        dist.all_reduce(torch.ones(1))
        message.wait()
    else:
        dist.all_reduce(torch.ones(1))
        dist.recv(torch.ones(1), 0)
    dist.barrier()


@ranks(2, rules=NcclRules(order="raise"))
def test_a_message_and_a_collective():
    everyone_has_met()
    with pytest.raises(LaunchOrderHazard, match="all_reduce"):
        a_message_and_a_collective()


@ranks(2, rules="gloo")
def test_passes_on_gloo():
    launch_in_different_orders()


@pytest.mark.parametrize("rules", [{"order": "shout"}, {"buffer_bytes": -1}])
def test_rules_that_are_none(rules):
    with pytest.raises(ValueError, match=next(iter(rules))):
        NcclRules(**rules)

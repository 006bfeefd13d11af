"""Total variation and acceptance rates of the drafts of multi-token prediction, in one pass with their loss."""

import math

import pytest
import torch
import torch.distributed as dist

from benchmarks.meter import measure
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.head import AcceptanceRate, CrossEntropy, LmHead, Teacher, TotalVariation
from tests.fuzz import heads
from tests.head.test_read import check_read
from tests.marks import slow
from tests.ranks import ranks

D, V = 6, 20


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@ranks(1, 2, 4)
@pytest.mark.parametrize("cases", [16, *slow(64)])
def test_with_the_loss_of_all_predictions(cases):
    """Each target has one draft or several, of which some count."""
    for number in range(cases):
        check_read(heads.read, number, ["loss", "total variation"])


def test_the_target_is_projected_once():
    x, target, weight = (drawn(*n, seed=0).requires_grad_() for n in ((16, 3, D), (16, D), (V, D)))
    labels = torch.zeros(16, 3, dtype=torch.int64)
    head = LmHead(weight)
    with measure() as found:
        loss, distance = head.read(x, CrossEntropy(labels), TotalVariation(Teacher(head, target)))
        (loss + distance).sum().backward()
    assert found.flops == (8 * 3 + 4) * 16 * V * D
    assert target.grad is None


@ranks(2)
def test_collectives():
    weight = drawn(V // 2, D, seed=dist.get_rank()).requires_grad_()
    head = LmHead(weight, dist.group.WORLD)
    x = drawn(8, 2, D, seed=3).requires_grad_()
    with count_collectives() as sent:
        head.read(x, CrossEntropy(torch.zeros(8, 2, dtype=torch.int64)), TotalVariation(Teacher(head, x[:, 0])))
    assert sent.total() == 3, "one of a chunk, one before the first, and that of all read-outs"


def test_a_draft_that_is_its_target_and_one_that_is_nowhere_near():
    z = torch.tensor([[0.0, 0.0, 50.0]], dtype=torch.float64)
    head = LmHead(torch.eye(3, dtype=torch.float64))
    x = z.clone().requires_grad_()
    same, apart = (head.read(x, TotalVariation(Teacher(head, t))) for t in (z, z.roll(1, 1)))
    rate = head.read(x, AcceptanceRate(Teacher(head, z.roll(1, 1))))
    assert same.item() == 0
    assert torch.autograd.grad(same.sum(), x)[0].abs().max() == 0
    torch.testing.assert_close(apart, torch.ones_like(apart))
    torch.testing.assert_close(rate.log(), z.new_tensor([math.log(3) - 50]))

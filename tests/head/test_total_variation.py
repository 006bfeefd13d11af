"""Total variation and acceptance rates of the drafts of multi-token prediction, in one pass with their loss."""

import math
from functools import partial

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
        check_read(partial(heads.read, several=0.8), number, ["loss", "total variation"])


@ranks(1, 2)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
@pytest.mark.parametrize("predictions", [2, 7])
def test_chunks_begin_among_the_drafts_of_a_target(predictions, layout):
    size, rank = dist.get_world_size(), dist.get_rank()
    own = slice(4 // size * rank, 4 // size * (rank + 1)) if layout == "sequence" else slice(None)
    whole, *upstream = drawn(V, D, seed=2), *drawn(2, 4, predictions, seed=3)
    drafts, target, labels = drawn(4, predictions, D, seed=0), drawn(4, D, seed=1), torch.arange(4 * predictions) % V
    x, w = drafts[own].clone().requires_grad_(), whole.chunk(size)[rank].clone().requires_grad_()
    head = LmHead(w, dist.group.WORLD, layout, chunk_tokens=5)
    read_outs = CrossEntropy(labels.view(4, predictions)), TotalVariation(Teacher(head, target[own]))
    found = head.read(x, *read_outs)
    leaves = [drafts.requires_grad_(), whole.requires_grad_()]
    p, q = (drafts @ whole.t()).softmax(-1), (target @ whole.detach().t()).softmax(-1).unsqueeze(1)
    loss = -p.log().flatten(0, 1)[torch.arange(4 * predictions), labels].view(4, predictions)
    true = loss, (p - q).abs().sum(-1) / 2
    torch.testing.assert_close(found, true)
    dx, dw = torch.autograd.grad(true, leaves, upstream)
    torch.testing.assert_close(torch.autograd.grad(found, [x, w], upstream), (dx[own], dw.chunk(size)[rank]))


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

"""Total variation and acceptance rates of the drafts of multi-token prediction, in one pass with their loss."""

import math

import pytest
import torch
import torch.distributed as dist

from benchmarks.meter import measure
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import VocabShard
from megatron_ext.head import AcceptanceRate, CrossEntropy, LmHead, Teacher, TotalVariation
from tests.ranks import ranks

S, B, D, V = 4, 3, 6, 20


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@ranks(1, 2, 4)
@pytest.mark.parametrize("predictions", [1, 2, 7])
def test_with_the_loss_of_all_predictions(predictions):
    """The target's product is made once for all of them; its hidden states get no gradient."""
    group, world, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    drafts, target, weight = drawn(S, B, predictions, D, seed=0), drawn(S, B, D, seed=1), drawn(V, D, seed=2)
    labels = torch.randint(V, (S, B, predictions), generator=torch.Generator().manual_seed(3))
    labels[-1, :, -1] = -100
    upstream, shard = drawn(2, S, B, predictions, seed=4), VocabShard.split(V, group)
    leaves = [drafts.clone().requires_grad_(), weight.clone().requires_grad_()]
    p, q = (leaves[0] @ leaves[1].t() / 0.7).softmax(-1), (target @ weight.t() / 0.7).softmax(-1).unsqueeze(-2)
    wanted = (p - q).abs().sum(-1) / 2
    loss = -p.log().gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).where(labels >= 0, 0.0)
    counts = drawn(S, B, predictions, seed=5) > -0.7
    for layout in ("replicated", "sequence"):
        for only in (None, counts):
            chosen = torch.ones_like(counts) if only is None else only
            total = (torch.stack([loss, wanted]) * upstream * chosen).sum()
            dx, dw = torch.autograd.grad(total, leaves, retain_graph=True)
            rows = slice(S // world * rank, S // world * (rank + 1)) if layout == "sequence" else slice(None)
            x = drafts[rows].clone().requires_grad_()
            w = weight[shard.start : shard.stop].clone().requires_grad_()
            head = LmHead(w, group, layout, vocab=shard, temperature=0.7, chunk_tokens=5)
            found = head.read(x, CrossEntropy(labels), TotalVariation(Teacher(head, target[rows])), counts=only)
            (torch.stack(found) * upstream).sum().backward()
            torch.testing.assert_close(found[0], loss.where(chosen, 0.0))
            torch.testing.assert_close(found[1], wanted.where(chosen, 0.0))
            torch.testing.assert_close(x.grad, dx[rows])
            torch.testing.assert_close(w.grad, dw[shard.start : shard.stop])


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

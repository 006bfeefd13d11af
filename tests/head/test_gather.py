"""Chosen and largest logits of a sharded vocabulary, and their log-probabilities, from logits and hidden states."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext import VocabShard, linear_cross_entropy, reference, vocab_parallel_cross_entropy
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import group_size
from megatron_ext.head import (
    gather_log_probs,
    gather_logits,
    linear_gather_log_probs,
    linear_sampled_log_probs,
    linear_topk_log_probs,
    sampled_log_probs,
    token_log_probs,
    vocab_parallel_log_softmax,
    vocab_parallel_softmax,
    vocab_topk,
)
from tests.head.problems import Problem, error
from tests.head.test_logits import logits_of
from tests.ranks import ranks

SIZES = {"plain": {}, "padded": {"size": 37}, "empty shard": {"size": 9}}


def grads_of(value, leaves, upstream):
    return torch.autograd.grad(value, leaves, upstream.to(value.dtype))


@ranks(1, 2, 4)
@pytest.mark.parametrize("options", SIZES)
def test_dense(options):
    group, problem = dist.group.WORLD, Problem(options=SIZES[options])
    whole, mine, shard = logits_of(problem, group)  # a padding column holds what it likes
    whole.requires_grad_()
    upstream = torch.randn(whole.shape)
    for ours, plain in ((vocab_parallel_log_softmax, torch.log_softmax), (vocab_parallel_softmax, torch.softmax)):
        with count_collectives() as counts:
            value = ours(mine, group, shard)
        assert counts.total() == (group_size(group) > 1)
        want = plain(reference.counted(whole, problem.size), -1)
        torch.testing.assert_close(value, want[..., shard.start : shard.stop])
        upstream = upstream.masked_fill(want == -torch.inf, 0)  # -inf * 0 in plain autograd
        (grad,) = grads_of(value, mine, upstream[..., shard.start : shard.stop])
        (want_grad,) = torch.autograd.grad(want, whole, upstream.double())
        torch.testing.assert_close(grad, want_grad[..., shard.start : shard.stop])


@ranks(1, 2, 4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_among_equals_the_lowest_id_is_first(dtype):
    """Few values, both zeros, -inf columns, whole rows of them; k from 1 to all, more than a shard holds."""
    group = dist.group.WORLD
    z = torch.randint(-2, 3, (16, 40)).to(dtype)
    z[z == 2] = -torch.inf
    z[:8][torch.rand(8, 40) < 0.5] *= -1  # zeros of either sign, inf among the values
    z[3] = -torch.inf
    shard = VocabShard.equal(40 // group_size(group), group)
    mine = z[:, shard.start : shard.stop]
    order = z.double().argsort(dim=-1, descending=True, stable=True)
    for k in (1, 7, 23, 40):
        values, ids = vocab_topk(mine, k, group, chunk_tokens=5)
        assert torch.equal(ids, order[:, :k])
        assert torch.equal(values.to(dtype), z.gather(-1, ids))


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_less_exact_than_log_softmax(dtype):
    """Of logits near 1000, and of a sure distribution; the gradient in one rounding to the logits' dtype."""
    group = dist.group.WORLD
    whole = (4 * torch.randn(64, 400) + 1000 * (torch.arange(64) % 2).unsqueeze(1)).to(dtype)
    ids, upstream = torch.randint(400, (64, 5)), torch.randn(64, 5)
    found = []
    for z in (whole.double(), whole.float()):
        z.requires_grad_()
        log_p = z.log_softmax(-1).gather(-1, ids)
        found.append((log_p, *torch.autograd.grad(log_p, z, upstream.to(z.dtype))))
    shard = VocabShard.equal(400 // group_size(group), group)
    own = slice(shard.start, shard.stop)
    mine = whole[:, own].clone().requires_grad_()
    value = gather_log_probs(mine, ids, group)
    (truth, truth_grad), (plain, plain_grad) = found
    assert error(value, truth) <= error(plain, truth)
    grad = grads_of(value, mine, upstream)[0]
    plain_grad = plain_grad.to(dtype)
    assert error(grad, truth_grad[:, own]) <= 1.05 * error(plain_grad[:, own], truth_grad[:, own])
    assert error(token_log_probs(mine, ids[:, 0], group), truth[:, 0]) <= error(plain[:, 0], truth[:, 0])


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda z, w: vocab_topk(z, 0), "k is 0: it must be an int from 1 to the vocabulary's size 10"),
        (lambda z, w: vocab_topk(z, 11), "k is 11: it must be an int from 1"),
        (lambda z, w: vocab_topk(z, 2.0), "k is 2.0"),
        (lambda z, w: linear_topk_log_probs(z, w, True), "k is True"),
        (lambda z, w: gather_logits(z, torch.full((4, 2), 10)), r"indices holds \[10\], outside \[0, 10\)"),
        (lambda z, w: gather_log_probs(z, torch.full((4, 2), -100)), r"indices holds \[-100\], outside"),
        (lambda z, w: gather_log_probs(z, torch.zeros(4, 2)), "indices is torch.float32"),
        (lambda z, w: gather_log_probs(z, torch.zeros(4, 0).long()), "with K at least 1"),
        (
            lambda z, w: gather_log_probs(z, torch.zeros(3, 2).long()),
            r"indices\[..., 0\] has leading dims \(3,\) on cpu, logits \(4,\)",
        ),
        (lambda z, w: linear_gather_log_probs(z, w, torch.zeros(3, 2).long()), r"hidden has shape \(4, 10\)"),
        (lambda z, w: linear_gather_log_probs(z, w[:, :3], torch.zeros(4, 2).long()), "weight has shape"),
        (lambda z, w: vocab_topk(z.long(), 2), "logits is torch.int64"),
        (lambda z, w: vocab_topk(z, 2, chunk_tokens=0), "chunk_tokens is 0"),
        (lambda z, w: gather_log_probs(z, torch.zeros(4, 2).long(), temperature=0), "temperature is 0"),
    ],
)
def test_bad_input(call, message):
    with pytest.raises(ValueError, match=message):
        call(torch.zeros(4, 10), torch.zeros(10, 10))


@ranks(2, 4)
def test_a_fault_of_one_rank_is_raised_on_all():
    group, rank = dist.group.WORLD, dist.get_rank()
    size = 10 * group_size(group)
    ids = torch.zeros(4, 2).long()
    wrong = VocabShard(10, 19, size) if rank == 1 else VocabShard(10 * rank, 10 * rank + 10, size)
    message = "with 9 columns" if rank == 1 else "another rank of tp_group refused its arguments"
    z, x, w = torch.zeros(4, 10), torch.zeros(4, 3), torch.zeros(10, 3)
    for call in (
        lambda: vocab_topk(z, 3, group, wrong),
        lambda: gather_logits(z, ids, group, wrong),
        lambda: vocab_parallel_softmax(z, group, wrong),
        lambda: vocab_parallel_cross_entropy(z, ids[:, 0], group, wrong),
        lambda: sampled_log_probs(z, ids[:, 0], 3, 0.5, 1.0, group, wrong),
        lambda: sampled_log_probs(z, ids[:, 0], None, 0.5, 1.0, group, wrong),
        lambda: linear_gather_log_probs(x, w, ids, group, vocab=wrong),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    # in the sequence layout a slice of one rank alone may be wrong
    own = torch.zeros(2 if rank == 1 else 4, 3)
    ids = torch.zeros(4 * group_size(group), 2).long()
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 3\)" if rank == 1 else "another rank"):
        linear_gather_log_probs(own, w, ids, group, "sequence")


@ranks(2)
def test_what_only_one_rank_finds_too_large():
    """Without a `vocab` each rank takes the others' shards to be as wide as its own: here for 20 ids, and for 18."""
    group, rank = dist.group.WORLD, dist.get_rank()
    z, w, x = torch.zeros(4, 10 - rank), torch.zeros(10 - rank, 3), torch.zeros(4, 3)
    ids, labels, half = torch.full((4, 2), 19), torch.full((4,), 19), torch.zeros(2, 3)
    for call, said in (
        (lambda: gather_logits(z, ids, group), r"indices holds \[19\], outside \[0, 18\)"),
        (lambda: gather_log_probs(z, ids, group), r"indices holds \[19\], outside \[0, 18\)"),
        (lambda: vocab_topk(z, 19, group), "k is 19: it must be an int from 1 to .* 18"),
        (lambda: sampled_log_probs(z, labels, 19, 0.9, 1.0, group), r"19"),
        (lambda: sampled_log_probs(z, labels, 3, 0.9, 1.0, group), r"labels holds \[19\], outside \[0, 18\)"),
        (lambda: sampled_log_probs(z, labels, None, 0.9, 1.0, group), r"labels holds \[19\], outside \[0, 18\)"),
        (lambda: token_log_probs(z, labels, group), r"labels holds \[19\], outside \[0, 18\)"),
        (lambda: vocab_parallel_cross_entropy(z, labels, group), r"labels holds \[19\], outside \[0, 18\)"),
        (lambda: linear_cross_entropy(x, w, labels, group), r"labels holds \[19\], outside \[0, 18\)"),
        (lambda: linear_cross_entropy(half, w, labels, group, "sequence"), r"labels holds \[19\], outside \[0, 18\)"),
        (lambda: linear_gather_log_probs(x, w, ids, group), r"indices holds \[19\], outside \[0, 18\)"),
        (lambda: linear_gather_log_probs(half, w, ids, group, "sequence"), r"indices holds \[19\], outside \[0, 18\)"),
        (lambda: linear_topk_log_probs(x, w, 19, group), "k is 19"),
        (lambda: linear_sampled_log_probs(x, w, labels, 19, 0.9, 1.0, group), r"labels holds \[19\], outside"),
        (lambda: linear_sampled_log_probs(x, w, labels, None, 0.9, 1.0, group), r"labels holds \[19\], outside"),
        (lambda: linear_sampled_log_probs(x, w, labels, None, 1.0, 1.0, group), r"labels holds \[19\], outside"),
    ):
        with pytest.raises(ValueError, match=said if rank else "another rank of tp_group refused"):
            call()
    with pytest.raises(ValueError, match=r"labels holds \[20\], outside"):  # what all find is sent too
        token_log_probs(z[:, :9], labels + 1, group)
    torch.testing.assert_close(vocab_topk(z[:, :9], 2, group)[0], torch.zeros(4, 2))  # all ranks are still in step


@ranks(2)
def test_a_shard_that_is_masked_whole_has_no_gradient():
    """Its maximum is -inf; what stands for it must not make infinity times 0 of the others' logits."""
    rank, group = dist.get_rank(), dist.group.WORLD
    whole = torch.full((3, 8), -100.0)
    whole[:, :4] = -torch.inf
    mine = whole[:, 4 * rank : 4 * rank + 4].clone().requires_grad_()
    ids = torch.tensor([[5, 6], [7, 4], [5, 5]])
    leaf = whole.clone().requires_grad_()
    true = leaf.log_softmax(-1).gather(1, ids)
    for found, want in (
        (gather_log_probs(mine, ids, group), true),
        (token_log_probs(mine, ids[:, 0], group), true[:, 0]),
    ):
        (want_grad,) = torch.autograd.grad(want.sum(), leaf, retain_graph=True)
        (grad,) = torch.autograd.grad(found.sum(), mine)
        torch.testing.assert_close(grad, want_grad[:, 4 * rank : 4 * rank + 4])

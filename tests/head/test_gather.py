"""Chosen and largest logits of a sharded vocabulary, and their log-probabilities, from logits and hidden states."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ext import VocabShard, reference
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
from tests.head.functions import OF_HIDDEN, OF_MADE_LOGITS, of_labels
from tests.head.problems import Problem
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
    for ours, plain in (
        (vocab_parallel_log_softmax, torch.log_softmax),
        (vocab_parallel_softmax, torch.softmax),
    ):
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
@pytest.mark.parametrize(
    "columns, numbers", [(40, (1, 7, 23, 40)), (132, (1,)), (900, (5, 300)), (4160, (32,)), (16384, (3,))]
)
def test_among_equals_the_lowest_id_is_first(columns, numbers, dtype):
    """Few values, both zeros, -inf columns, whole rows of them, falling and rising rows; k from 1 to all, more than a
    shard holds; of many columns, which are found by groups."""
    group = dist.group.WORLD
    z = torch.randint(-2, 3, (16, columns)).to(dtype)
    z[z == 2] = -torch.inf
    z[:8][torch.rand(8, columns) < 0.5] *= -1  # zeros of either sign, inf among the values
    z[3], z[4, :-2], z[5] = -torch.inf, -torch.inf, 0
    z[10:] = torch.randn(6, columns).to(dtype)
    z[14], z[15] = z[14].sort().values, z[15].sort(descending=True).values
    shard = VocabShard.equal(columns // group_size(group), group)
    mine = z[:, shard.start : shard.stop]
    order = z.double().argsort(dim=-1, descending=True, stable=True)
    for k in numbers:
        values, ids = vocab_topk(mine, k, group, chunk_tokens=5)
        assert torch.equal(ids, order[:, :k])
        assert torch.equal(values.to(dtype), z.gather(-1, ids))


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
    x, w = torch.zeros(4, 3), torch.zeros(10, 3)
    softmax = {"softmax": lambda x, w, labels, **of: vocab_parallel_softmax(x @ w.t(), **of)}
    for call in (OF_HIDDEN | OF_MADE_LOGITS | softmax).values():
        with pytest.raises(ValueError, match=message):
            call(x, w, ids[:, 0], tp_group=group, vocab=wrong)
    # in the sequence layout a slice of one rank alone may be wrong
    own = torch.zeros(2 if rank == 1 else 4, 3)
    ids = torch.zeros(4 * group_size(group), 2).long()
    with pytest.raises(ValueError, match=r"hidden has shape \(2, 3\)" if rank == 1 else "another rank"):
        linear_gather_log_probs(own, w, ids, group, "sequence")


@ranks(2)
def test_what_only_one_rank_finds_too_large():
    """Each rank without a `vocab` takes the others' shards to be as wide as its own: here for 20 ids, and for 18."""
    group, rank = dist.group.WORLD, dist.get_rank()
    z, w, x = torch.zeros(4, 10 - rank), torch.zeros(10 - rank, 3), torch.zeros(4, 3)
    labels, half = torch.full((4,), 19), torch.zeros(2, 3)
    calls = [
        (partial(call, states, w, labels, hidden_layout=layout), rf"{name} holds \[19\], outside \[0, 18\)")
        for layout, states in (("replicated", x), ("sequence", half))
        for call, name in of_labels(OF_HIDDEN).values()
    ]
    for call, name in of_labels(OF_MADE_LOGITS).values():
        calls.append((partial(call, x, w, labels), rf"{name} holds \[19\], outside \[0, 18\)"))
    calls += [
        (partial(vocab_topk, z, 19), "k is 19: it must be an int from 1 to .* 18"),
        (partial(linear_topk_log_probs, x, w, 19), "k is 19"),
        (partial(sampled_log_probs, z, labels, 19, 0.9), "19"),
        (partial(linear_sampled_log_probs, x, w, labels, 19, 0.9), r"labels holds \[19\], outside"),
        (partial(linear_sampled_log_probs, x, w, labels), r"labels holds \[19\], outside"),
    ]
    for call, said in calls:
        with pytest.raises(ValueError, match=said if rank else "another rank of tp_group refused"):
            call(tp_group=group)
    with pytest.raises(ValueError, match=r"labels holds \[20\], outside"):  # what all find is sent too
        token_log_probs(z[:, :9], labels + 1, group)
    torch.testing.assert_close(vocab_topk(z[:, :9], 2, group)[0], torch.zeros(4, 2))  # all ranks are still in step


@ranks(2)
def test_a_shard_that_is_masked_whole_has_no_gradient():
    """The number that stands for the shard's maximum of -inf must not make infinity times 0 of the others' logits."""
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

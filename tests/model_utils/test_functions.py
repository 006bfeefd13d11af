"""The autograd functions by NeMo-RL's names, on logits sharded over the vocabulary, against one process."""

import types

import numpy
import pytest
import torch
from torch import Tensor

from megatron_ext import model_utils, reference
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.model_utils import (
    ChunkedDistributedEntropy,
    ChunkedDistributedGatherLogprob,
    ChunkedDistributedLogprob,
    ChunkedDistributedLogprobWithSampling,
    DistributedCrossEntropy,
    DistributedLogprob,
    DistributedLogprobWithSampling,
    TrainingSamplingParams,
    _compute_distributed_log_softmax,
    _compute_distributed_softmax,
    distributed_vocab_topk,
    from_parallel_logits_to_logprobs,
)
from tests.model_utils.sharded import Grid, gradient, grids, problem, same, sampled
from tests.ranks import ranks

CHUNKS = (None, 1, 3)


def sharded() -> Grid:
    """All ranks share the vocabulary."""
    return next(g for g in grids() if g.cp == 1)


def check(call, truth, logits: Tensor, forward: int = 1, dense: bool = False) -> None:
    """`call` on this rank's columns is `truth` on all: values, gradient, collectives. `dense`: of the logits' shape."""
    grid = sharded()
    leaf, mine = logits.clone().requires_grad_(), grid.columns(logits).clone().requires_grad_()
    wanted = truth(leaf)
    with count_collectives() as sent:
        found = call(mine, grid)
    assert sent.total() <= forward * int(grid.tp > 1), sent
    same(found.detach(), (grid.columns(wanted) if dense else wanted).detach())
    weights = torch.randn_like(wanted)
    expected = gradient(wanted, leaf, weights)
    with count_collectives() as sent:
        (grad,) = torch.autograd.grad(found, mine, grid.columns(weights) if dense else weights)
    assert sent.total() == (int(grid.tp > 1) if dense else 0)
    same(grad, grid.columns(expected))


@ranks(1, 2, 4)
def test_log_softmax_and_softmax():
    logits, _ = problem()
    check(
        lambda z, grid: _compute_distributed_log_softmax(z, grid.tp_group), lambda z: z.log_softmax(-1), logits, 1, True
    )
    check(lambda z, grid: _compute_distributed_softmax(z, grid.tp_group), lambda z: z.softmax(-1), logits, 1, True)


@ranks(1, 2, 4)
def test_log_probs():
    logits, target = problem()
    target[0, 2] = -100

    def truth(z):
        return reference.log_probs(z, target)

    check(lambda z, g: DistributedLogprob.apply(z, target, *g.vocab(24).values(), g.tp_group), truth, logits)
    for chunk_size in CHUNKS:
        check(
            lambda z, g, chunk_size=chunk_size: ChunkedDistributedLogprob.apply(
                z, target, *g.vocab(24).values(), chunk_size, g.tp_group
            ),
            truth,
            logits,
        )


@ranks(1, 2, 4)
@pytest.mark.parametrize("top_k, top_p", [(5, 1.0), (-1, 0.6), (None, 1.0), (5, 0.6), (24, 0.9), (1, 1.0)])
def test_sampled_log_probs(top_k, top_p):
    """7 positions of 3 sequences: they do not divide by the ranks, and need not."""
    logits, target = problem(batch=3)
    target[:, ::2] = logits.argmax(-1)[:, ::2]

    def truth(z):
        return sampled(z, target, top_k, top_p)

    alone = top_p < 1 and top_k in (None, -1)
    check(
        lambda z, g: DistributedLogprobWithSampling.apply(z, target, g.tp_group, top_k, top_p),
        truth,
        logits,
        forward=2 if alone else 1,
    )
    for chunk_size in CHUNKS[1:]:
        check(
            lambda z, g, chunk_size=chunk_size: ChunkedDistributedLogprobWithSampling.apply(
                z, target, g.tp_group, top_k, top_p, chunk_size
            ),
            truth,
            logits,
            forward=2 * -(-7 // chunk_size) if alone else 1,
        )


@ranks(1, 2, 4)
def test_all_equals_are_kept():
    """A sampler may draw any of them: none may become -inf. Top-p keeps all that equal the last it needs."""
    logits, target = torch.zeros(1, 6, 24, dtype=torch.float64), torch.tensor([[0, 1, 2, 3, 4, 23]])
    logits[..., 4] = -1
    one_of_23 = -torch.tensor(23.0).double().log()
    wanted = one_of_23.expand(1, 6).masked_fill(target == 4, -torch.inf)
    grid = sharded()
    for top_k, top_p in ((3, 1.0), (None, 2.5 / 24), (5, 0.3)):
        found = DistributedLogprobWithSampling.apply(grid.columns(logits), target, grid.tp_group, top_k, top_p)
        same(found, wanted)


@ranks(1, 2, 4)
def test_entropy_has_nemo_rls_sign():
    logits, _ = problem()
    logits[..., 3] = -torch.inf
    for chunk_size in CHUNKS:
        check(
            lambda z, g, chunk_size=chunk_size: ChunkedDistributedEntropy.apply(z, chunk_size, g.tp_group),
            lambda z: -reference.entropy(z),
            logits,
        )


@ranks(1, 2, 4)
def test_soft_cross_entropy():
    logits, _ = problem()
    teacher, _ = problem(seed=5)
    check(
        lambda z, g: DistributedCrossEntropy.apply(z, g.columns(teacher), g.tp_group),
        lambda z: -(teacher.softmax(-1) * z.log_softmax(-1)).sum(-1),
        logits,
    )


@ranks(1, 2, 4)
def test_gathered_log_probs():
    logits, _ = problem()
    indices = torch.randint(24, (2, 7, 5))  # some of them twice
    for chunk_size in CHUNKS:
        check(
            lambda z, g, chunk_size=chunk_size: ChunkedDistributedGatherLogprob.apply(
                z, indices, *g.vocab(24).values(), chunk_size, g.tp_group
            ),
            lambda z: z.log_softmax(-1).gather(-1, indices),
            logits,
        )


@ranks(1, 2, 4)
@pytest.mark.parametrize("asked, k", [(1, 1), (5, 5), (24, 24), (100, 24)])
def test_top_k(asked, k):
    """More than a rank's columns, too; more than the vocabulary gives all of it, as in NeMo-RL."""
    logits, _ = problem()
    logits[0, 0] = 0.0
    grid = sharded()
    for chunk_size in CHUNKS:
        with count_collectives() as sent:
            values, ids = distributed_vocab_topk(
                grid.columns(logits), asked, grid.tp_group, **grid.vocab(24), chunk_size=chunk_size
            )
        assert sent.total() == int(grid.tp > 1)
        same(values, logits.topk(k).values)
        assert ids.dtype == torch.int64
        assert torch.equal(logits.gather(-1, ids), values)
        assert ids[0, 0].tolist() == list(range(k)), "among equals the lowest ids"


@ranks(1, 2)
def test_inference_keeps_nothing():
    logits, target = problem()
    grid = sharded()
    z, vocab = grid.columns(logits).clone().requires_grad_(), grid.vocab(24).values()
    for found in (
        DistributedLogprob.apply(z, target, *vocab, grid.tp_group, True),
        ChunkedDistributedLogprob.apply(z, target, *vocab, 2, grid.tp_group, True),
        DistributedLogprobWithSampling.apply(z, target, grid.tp_group, 4, 0.9, True),
        ChunkedDistributedLogprobWithSampling.apply(z, target, grid.tp_group, 4, 0.9, 2, True),
        DistributedCrossEntropy.apply(z, z, grid.tp_group, True),
        ChunkedDistributedGatherLogprob.apply(z, target[..., None], *vocab, 2, grid.tp_group, True),
        ChunkedDistributedEntropy.apply(z, 2, grid.tp_group, True),
    ):
        assert not found.requires_grad
        assert torch.is_grad_enabled()


@ranks(1, 2)
def test_wrong_sampling_and_labels_are_errors_on_every_rank():
    logits, target = problem()
    grid = sharded()
    z, vocab = grid.columns(logits), grid.vocab(24).values()
    for wrong, said in (
        ({"top_k": -2}, "top_k is -2"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": 1.1}, "top_p is 1.1"),
        ({"top_k": 2.5}, "top_k is 2.5"),
    ):
        params = TrainingSamplingParams(**wrong)
        with count_collectives() as sent, pytest.raises(ValueError, match=said):
            from_parallel_logits_to_logprobs(z, target, *vocab, grid.tp_group, sampling_params=params)
        assert not sent
    for labels in (target.float(), target > 3, target.tolist()):
        with pytest.raises(ValueError, match="labels is .*: it must be a tensor of integer token ids"):
            DistributedLogprob.apply(z, labels, *vocab, grid.tp_group, False)
    with pytest.raises(ValueError, match=r"must be \[batch, sequence, vocabulary shard\]"):
        distributed_vocab_topk(z[0], 2, grid.tp_group, **grid.vocab(24))
    for k in (0, 2.5):
        with pytest.raises(ValueError, match=f"k is {k}"):
            distributed_vocab_topk(z, k, grid.tp_group, **grid.vocab(24))


def test_numbers_of_numpy():
    """They are what a config file or an array gives."""
    logits, ids = torch.randn(1, 6, 10), torch.randint(10, (1, 6))
    weight, hidden = torch.randn(10, 4), torch.randn(6, 1, 4)
    starts = torch.tensor([0, 2, 6])

    def results(integer, real):
        sampling = types.SimpleNamespace(top_k=integer(4), top_p=real(0.75), temperature=real(0.5))
        rest = {"chunk_size": integer(2), "sampling_params": sampling}
        pack = {"cu_seqlens_padded": starts, "unpacked_seqlen": integer(5)}
        yield model_utils.from_parallel_logits_to_logprobs(logits, ids, 0, 10, None, **rest)
        yield model_utils.from_parallel_logits_to_logprobs_packed_sequences(
            logits, ids, vocab_start_index=0, vocab_end_index=10, group=None, **pack, **rest
        )
        for more in ({}, pack):
            yield model_utils.from_parallel_hidden_states_to_logprobs(
                hidden, weight, None, None, ids, 0, 10, None, **more, **rest
            )
        yield model_utils.DistributedLogprobWithSampling.apply(logits, ids, None, integer(4), real(0.75))
        yield model_utils.distributed_vocab_topk(
            logits, integer(3), None, vocab_start_index=0, vocab_end_index=integer(10), chunk_size=integer(2)
        )[0]

    for found, want in zip(results(numpy.int64, numpy.float32), results(int, float), strict=True):
        torch.testing.assert_close(found, want, rtol=0, atol=0)

"""The autograd functions by NeMo-RL's names: ties, inference, what is refused.

Their values, gradients and collectives are those of `tests.fuzz.sharded_vocabulary`.
"""

import types

import numpy
import pytest
import torch

from megatron_ext import model_utils
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
    distributed_vocab_topk,
    from_parallel_logits_to_logprobs,
)
from tests.model_utils.sharded import problem, same, vocabulary_grid
from tests.ranks import ranks


@ranks(1, 2, 4)
def test_all_equals_are_kept():
    """A sampler may draw any of them: none may become -inf. Top-p keeps all that equal the last it needs."""
    logits, target = torch.zeros(1, 6, 24, dtype=torch.float64), torch.tensor([[0, 1, 2, 3, 4, 23]])
    logits[..., 4] = -1
    one_of_23 = -torch.tensor(23.0).double().log()
    wanted = one_of_23.expand(1, 6).masked_fill(target == 4, -torch.inf)
    grid = vocabulary_grid()
    for top_k, top_p in ((3, 1.0), (None, 2.5 / 24), (5, 0.3)):
        found = DistributedLogprobWithSampling.apply(grid.columns(logits), target, grid.tp_group, top_k, top_p)
        same(found, wanted)


@ranks(1, 2)
def test_inference_keeps_nothing():
    logits, target = problem()
    grid = vocabulary_grid()
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
    grid = vocabulary_grid()
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

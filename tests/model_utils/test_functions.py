"""NeMo-RL's functions of a sharded vocabulary: ties, dtypes, sums, inference, what is refused.

Their values, gradients and collectives are those of `tests.fuzz.sharded_vocabulary` and `tests.fuzz.mappings`.
"""

import types

import numpy
import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from megatron_ext import model_utils
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import group_size
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


@ranks(1, 2, 4)
def test_arguments_and_dtypes():
    grid, (logits, _) = vocabulary_grid(), problem()
    mine, ids = grid.columns(logits), torch.tensor([[23, 0, -1, 11, 0]])
    with pytest.raises(ValueError, match="temperature is 0"):
        model_utils.vocab_parallel_log_softmax(mine, 0, tp_group=grid.tp_group)
    with pytest.raises(ValueError, match=r"column_indices is \(1, 5\): it must be \[K\]"):
        model_utils.vocab_parallel_gather_columns(mine, ids, tp_group=grid.tp_group)
    assert model_utils.vocab_parallel_full_log_softmax(logits.bfloat16(), 0.7).dtype == torch.float32


@ranks(2, 4)
def test_the_likeliest_token_of_a_dtensor():
    logits, _ = problem()
    logits[0, 0, 3:] = logits.max() + 1  # among equals the lowest id
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    sharded = distribute_tensor(logits, mesh, [Shard(-1)])
    found = model_utils.vocab_parallel_argmax(sharded, tp_group=mesh.get_group("tp"))
    assert found[0, 0] == 3
    assert torch.equal(found, logits.argmax(-1))


@ranks(1, 2)
def test_what_stands_at_the_next_position():
    ids = torch.arange(6).view(1, 6)
    assert model_utils.cp_shift_next(ids, fill=-1).tolist() == [[1, 2, 3, 4, 5, -1]]
    assert not model_utils.cp_shift_next(ids > 9, None, fill=False).any()
    with pytest.raises(ValueError, match=r"x is \(2, 0\)"):
        model_utils.cp_shift_next(torch.zeros(2, 0), fill=0)
    assert model_utils.cp_load_balanced_to_contiguous(ids) is ids


@ranks(1, 2, 4)
def test_sums():
    """Gradients of each rank's term are the sum's: what follows a sum is computed on all ranks."""
    group, size, rank = dist.group.WORLD, group_size(dist.group.WORLD), dist.get_rank()
    x = torch.tensor([1.0 + rank, 2.0], requires_grad=True)
    total = model_utils.group_all_reduce_sum_with_grad(x, group)
    assert total.tolist() == [size * (size + 1) / 2, 2.0 * size]
    (grad,) = torch.autograd.grad(total.square().sum(), x)
    assert grad.tolist() == (2 * total).tolist()
    assert x.tolist() == [1.0 + rank, 2.0]
    constant = model_utils.group_all_reduce_sum(x, group)
    assert torch.equal(constant, total.detach())
    assert not constant.requires_grad
    scalar = model_utils._AllReduceSum.apply(x.sum(), group)
    assert scalar.item() == total.sum().item()
    assert model_utils.group_all_reduce_sum_with_grad(x, None) is x

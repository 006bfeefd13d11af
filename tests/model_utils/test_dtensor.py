"""DTensor logits, as a Hugging Face model under tensor and context parallelism gives them, against one process."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.head.row_passes import passes as row_passes
from megatron_ext.model_utils import (
    TrainingSamplingParams,
    dtensor_from_parallel_logits_to_logprobs,
    get_logprobs_from_vocab_parallel_logits,
    get_next_token_logprobs_from_logits,
)
from tests.model_utils.sharded import gradient, next_log_probs, problem, same
from tests.ranks import ranks

WHOLE = [Shard(-1)]
PARTS = [Shard(1), Shard(-1)]


def mesh_of(cp: int):
    """Ranks that share the vocabulary lie next to each other."""
    return init_device_mesh("cpu", (cp, dist.get_world_size() // cp), mesh_dim_names=("cp", "tp"))


@ranks(1, 2, 4)
@pytest.mark.parametrize("vocabulary", [24, 21], ids=["even", "uneven"])
def test_sharded_over_the_vocabulary(vocabulary):
    logits, tokens = problem(vocabulary=vocabulary)
    sharded = distribute_tensor(logits, mesh_of(1)["tp"], WHOLE).requires_grad_()
    leaf = logits.clone().requires_grad_()
    wanted = next_log_probs(leaf, tokens)
    weights = torch.randn_like(wanted)
    with count_collectives() as sent:
        found = get_logprobs_from_vocab_parallel_logits(sharded, tokens)
    assert sent.total() == int(dist.get_world_size() > 1)
    same(found.detach(), wanted.detach())
    found.backward(weights)
    same(sharded.grad.full_tensor(), gradient(wanted, leaf, weights))  # before 2.13 torch may have joined it
    softer = get_next_token_logprobs_from_logits(
        tokens, sharded, sampling_params=TrainingSamplingParams(temperature=0.7)
    )
    same(softer.detach(), wanted.detach())
    with torch.no_grad():
        assert not get_logprobs_from_vocab_parallel_logits(sharded, tokens).requires_grad


@ranks(2, 4)
def test_sharded_over_the_sequence_too():
    """Tokens lie in the order that torch's context_parallel gives; every rank computes the same loss of the whole."""
    logits, tokens = problem(length=8)
    mesh = mesh_of(2)
    seq_index = torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])
    target = distribute_tensor(tokens[:, seq_index], mesh["cp"], [Shard(1)])
    sharded = distribute_tensor(logits[:, seq_index], mesh, PARTS).requires_grad_()
    leaf = logits.clone().requires_grad_()
    wanted = next_log_probs(leaf, tokens)
    weights = torch.randn_like(wanted)
    with count_collectives() as forward:
        found = get_logprobs_from_vocab_parallel_logits(sharded, target, seq_index=seq_index, chunk_size=3)
    same(found.detach(), wanted.detach())
    with count_collectives() as backward:
        found.backward(weights)
    assert (forward.total(), backward.total()) == (2 + int(mesh["tp"].size() > 1), 0), (forward, backward)
    expected = distribute_tensor(gradient(wanted, leaf, weights)[:, seq_index], mesh, PARTS)
    same(sharded.grad.to_local(), expected.to_local())


@ranks(2)
def test_the_local_part_with_its_columns():
    logits, tokens = problem()
    mesh = mesh_of(1)["tp"]
    rank, group = dist.get_rank(), mesh.get_group()
    mine = logits.chunk(2, -1)[rank].clone().requires_grad_()
    args = (mine, tokens, 12 * rank, 12 * (rank + 1), group)
    same(dtensor_from_parallel_logits_to_logprobs(*args, chunk_size=2).detach(), next_log_probs(logits, tokens))
    assert not dtensor_from_parallel_logits_to_logprobs(*args, inference_only=True).requires_grad
    replicated = distribute_tensor(tokens, mesh, [Replicate()])
    found = dtensor_from_parallel_logits_to_logprobs(mine, replicated, *args[2:])
    same(found.detach(), next_log_probs(logits, tokens))


@ranks(2)
def test_the_chunk_size_is_honoured():
    """NeMo-RL drops the chunk size on this path."""
    logits, tokens = problem(length=8)
    sharded = distribute_tensor(logits, mesh_of(1)["tp"], WHOLE)
    for chunk_size, wanted in ((1, 8), (3, 3), (8, 1)):
        passes_of_all = type(row_passes.PYTORCH)
        with patch.object(passes_of_all, "row_statistics", wraps=row_passes.PYTORCH.row_statistics) as passes:
            get_logprobs_from_vocab_parallel_logits(sharded, tokens, chunk_size=chunk_size)
        assert passes.call_count == wanted


@ranks(2, 4)
def test_an_id_that_only_one_context_parallel_rank_holds():
    logits, tokens = problem(length=8)
    mesh, order = mesh_of(2), torch.tensor([0, 1, 6, 7, 2, 3, 4, 5])
    sharded = distribute_tensor(logits[:, order], mesh, PARTS)
    for bad in (-2, 24):
        wrong = tokens.clone()
        wrong[1, 7] = bad
        target = distribute_tensor(wrong[:, order], mesh["cp"], [Shard(1)])
        said = r"labels holds \[-?\d+\], outside \[0, 24\)|another rank of cp_group refused"
        with pytest.raises(ValueError, match=said):
            get_logprobs_from_vocab_parallel_logits(sharded, target, seq_index=order)


@ranks(2)
def test_what_does_not_fit_is_an_error_on_every_rank():
    logits, tokens = problem(length=8)
    tp, cp = mesh_of(1), mesh_of(2)
    order = torch.arange(8)
    sharded, in_rows = (distribute_tensor(logits, tp["tp"], [Shard(dim)]) for dim in (-1, 1))
    in_parts = distribute_tensor(logits, cp, PARTS)
    target, copied = (distribute_tensor(tokens, cp["cp"], [placed]) for placed in (Shard(1), Replicate()))
    unnamed = DTensor.from_local(logits, init_device_mesh("cpu", (2,)), WHOLE)
    for args, said in (
        ((sharded, tokens, order), 'belongs to a .* dim "cp"'),
        ((unnamed, tokens), 'a dim "tp" must shard their vocabulary'),
        ((in_rows, tokens), 'a dim "tp" must shard their vocabulary'),
        ((in_parts, target), "seq_index is None"),
        ((in_parts, target, order[1:]), r"seq_index must be \[8\]"),
        ((in_parts, target, order.clamp(min=1)), "seq_index is .* each position from 0 to 7 once"),
        ((in_parts, tokens), "target has 8 positions"),
        ((in_parts, copied, order), "target must be Shard"),
    ):
        with count_collectives() as sent, pytest.raises(ValueError, match=said):
            get_logprobs_from_vocab_parallel_logits(*args)
        assert not sent

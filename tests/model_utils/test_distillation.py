"""Top-k distillation: the student at the teacher's likeliest tokens, at every arrangement of ranks.

Of random problems, and of ids that stand for no token: `tests.fuzz.model_utils`.
"""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from megatron_ext import reference
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.model_utils import (
    distributed_vocab_topk,
    gather_logits_at_global_indices,
    get_distillation_topk_logprobs_from_logits,
)
from tests.model_utils.sharded import grids, grids_with_context, problem, same
from tests.ranks import ranks

K = 4


def teacher():
    logits, _ = problem(seed=9)
    return logits.topk(K)


def of_grid(grid, logits, values, ids, zero_outside_topk, calculate_entropy, **more):
    groups = {"vocab_parallel_group": grid.tp_group, "context_parallel_group": grid.cp_group}
    return get_distillation_topk_logprobs_from_logits(
        logits, values, ids, zero_outside_topk, calculate_entropy, **groups, **more
    )


def truth(z, zero_outside_topk: bool):
    """Student and teacher `[B, S - 1, K]`, sums of p log p `[B, S - 1]`."""
    values, ids = teacher()
    student = z.log_softmax(-1).gather(-1, ids) if zero_outside_topk else z.gather(-1, ids).log_softmax(-1)
    return student[:, :-1], values.log_softmax(-1)[:, :-1], -reference.entropy(z)[:, :-1]


@ranks(1, 2)
def test_whole_logits_and_dtensors():
    logits, _ = problem()
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("tp",))
    for student in (logits, distribute_tensor(logits, mesh, [Shard(-1)])):
        for zero_outside_topk in (False, True):
            found = get_distillation_topk_logprobs_from_logits(student, *teacher(), zero_outside_topk, True)
            wanted = truth(logits, zero_outside_topk)
            same(found[0], wanted[0])
            same(found[1], wanted[1])
            assert (found[2] is None) is not zero_outside_topk


@ranks(2, 4)
@pytest.mark.parametrize("zero_outside_topk", [False, True])
def test_dtensors_bring_the_group_of_their_sequence(zero_outside_topk):
    logits, _ = problem(length=8)
    values, ids = problem(length=8, seed=9)[0].topk(K)
    grid = next(g for g in grids() if g.cp == 2)
    mesh = init_device_mesh("cpu", (2, grid.tp), mesh_dim_names=("cp", "tp"))
    leaf = logits.clone().requires_grad_()
    student = leaf.log_softmax(-1).gather(-1, ids) if zero_outside_topk else leaf.gather(-1, ids).log_softmax(-1)
    own, every = grid.weights(student[:, :-1].shape)
    (dz,) = torch.autograd.grad(student[:, :-1], leaf, every)
    mine = grid.columns(grid.part(logits)).contiguous()
    sharded = DTensor.from_local(mine, mesh, [Shard(1), Shard(-1)]).requires_grad_()
    found = get_distillation_topk_logprobs_from_logits(sharded, values, ids, zero_outside_topk, False)
    same(found[0].detach(), student[:, :-1].detach())
    same(found[1], values.log_softmax(-1)[:, :-1])
    found[0].backward(own)
    same(sharded.grad.to_local(), grid.columns(grid.part(dz)))
    # Where the sequence is whole on all ranks of "cp", there is nothing to join.
    whole = DTensor.from_local(grid.columns(logits).contiguous(), mesh, [Replicate(), Shard(-1)])
    found = get_distillation_topk_logprobs_from_logits(whole, values, ids, zero_outside_topk, False)
    same(found[0], student[:, :-1].detach())


@ranks(1, 2, 4)
def test_gathered_logits_in_chunks_without_a_warning():
    """torch warns where a collective has no backward."""
    logits, _ = problem()
    indices = torch.randint(24, (2, 7, K))
    for grid in grids():
        mine = grid.own(logits).clone().requires_grad_()
        groups = {"tp_group": grid.tp_group, "cp_group": grid.cp_group, **grid.vocab(24)}
        with warnings.catch_warnings(action="error"):
            found = gather_logits_at_global_indices(mine, indices, **groups, chunk_size=2)
            own, every = grid.weights(found.shape)
            found.backward(own)
        same(found.detach(), logits.gather(-1, indices))
        dz = torch.zeros_like(grid.padded(logits))
        dz[:, :7].scatter_add_(-1, indices, every)
        same(mine.grad, grid.columns(grid.part(dz)))


@ranks(2)
def test_without_a_group_the_logits_are_whole():
    logits, _ = problem()
    indices = torch.randint(24, (2, 7, K))
    with count_collectives() as sent:
        found = gather_logits_at_global_indices(logits, indices, vocab_start_index=0, vocab_end_index=24)
    same(found, logits.gather(-1, indices))
    assert not sent


def test_largest_id_of_unsigned_bytes_is_a_token():
    logits = torch.randn(1, 2, 256)
    indices = torch.tensor([[[255, 3], [0, 255]]], dtype=torch.uint8)
    found = gather_logits_at_global_indices(logits, indices, vocab_start_index=0, vocab_end_index=256)
    same(found, logits.gather(-1, indices.long()))


@ranks(2)
def test_what_does_not_fit_is_an_error_on_every_rank():
    logits, _ = problem()
    values, ids = teacher()
    grid = next(g for g in grids() if g.tp == 2)
    more = {"vocab_parallel_group": grid.tp_group}
    for args, said in (
        ((values[..., 1:], ids), "teacher_topk_logits has shape"),
        ((values.repeat(1, 2, 1), ids.repeat(1, 2, 1)), "teacher_topk_indices has 14 positions"),
        ((values[:1], ids[:1]), r"teacher_topk_indices is \(1, 7, 4\): it must be \[2, sequence, K\]"),
        ((values, ids.float()), "indices is torch.float32"),
    ):
        with count_collectives() as sent, pytest.raises(ValueError, match=said):
            get_distillation_topk_logprobs_from_logits(grid.columns(logits), *args, True, False, **more)
        assert not sent
    for shift in (-30, 24):
        with pytest.raises(ValueError, match=r"outside \[0, 24\)"):
            get_distillation_topk_logprobs_from_logits(grid.columns(logits), values, ids + shift, True, False, **more)
    vocab = {"vocab_start_index": 0, "vocab_end_index": 24}
    for call in (  # the whole vocabulary on every rank, with a group
        lambda: gather_logits_at_global_indices(logits, ids % 12, grid.tp_group, **grid.vocab(48)),
        lambda: distributed_vocab_topk(logits, 3, grid.tp_group, **grid.vocab(48)),
        lambda: gather_logits_at_global_indices(logits, ids, grid.tp_group, **vocab),
    ):
        with pytest.raises(ValueError, match="every rank of tp_group passed the same 24 columns|vocab|refused"):
            call()


@ranks(2, 4)
def test_ids_that_only_one_context_parallel_rank_holds():
    """Each holds a part of the sequence, and all see the same ids; one too large for all might be another's."""
    logits, _ = problem(length=8)
    for grid in grids_with_context():
        mine = grid.columns(grid.part(logits))
        for bad in (-2, 24):
            ids = torch.zeros(2, 8, K, dtype=torch.int64)
            ids[1, 7, 0] = bad  # of the first rank's part
            said = r"outside \[0, 24\)|another rank of cp_group refused"
            with pytest.raises(ValueError, match=said):
                gather_logits_at_global_indices(mine, ids, grid.tp_group, grid.cp_group, **grid.vocab(24))
            with pytest.raises(ValueError, match=said):
                of_grid(grid, mine, torch.zeros(2, 8, K), ids, True, True)


@ranks(2, 4)
def test_logits_that_are_too_short_on_one_context_parallel_rank():
    logits, _ = problem(length=8)
    ids = torch.zeros(2, 8, K, dtype=torch.int64)
    for grid in grids_with_context():
        mine = grid.columns(grid.part(logits))
        mine, said = (mine[:, :1], "has 8 positions") if grid.cp_rank == 1 else (mine, "another rank of cp_group")
        for with_entropy in (False, True):
            with pytest.raises(ValueError, match=said):
                of_grid(grid, mine, torch.zeros(2, 8, K), ids, True, with_entropy)

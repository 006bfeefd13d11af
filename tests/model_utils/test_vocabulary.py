"""The names that cross-tokenizer distillation calls, at every arrangement of ranks, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from megatron_ext import model_utils
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import group_size
from megatron_ext.sequence.zigzag import split_zigzag
from tests.model_utils.sharded import grids, problem, same
from tests.ranks import ranks


def vocabulary_grid():
    return next(grid for grid in grids() if grid.cp == 1)


@ranks(1, 2, 4)
@pytest.mark.parametrize("temperature", [1, 0.7])
def test_log_softmax(temperature):
    """Each rank's columns; and all of them, of which every rank computes the same loss."""
    grid, (logits, _) = vocabulary_grid(), problem()
    leaf, mine = logits.clone().requires_grad_(), grid.columns(logits).clone().requires_grad_()
    wanted = (leaf / temperature).log_softmax(-1)
    upstream = torch.randn_like(wanted)
    (dz,) = torch.autograd.grad(wanted, leaf, upstream)
    own = model_utils.vocab_parallel_log_softmax(mine, temperature, tp_group=grid.tp_group)
    same(own.detach(), grid.columns(wanted.detach()))
    same(torch.autograd.grad(own, mine, grid.columns(upstream))[0], grid.columns(dz))
    with count_collectives() as forward:
        whole = model_utils.vocab_parallel_full_log_softmax(mine, temperature, tp_group=grid.tp_group)
    same(whole.detach(), wanted.detach())
    with count_collectives() as backward:
        (grad,) = torch.autograd.grad(whole, mine, upstream)
    same(grad, grid.columns(dz))
    assert (forward.total(), backward.total()) == ((2, 1) if grid.tp > 1 else (0, 0))
    direct = model_utils._compute_distributed_log_softmax_with_grad(mine, grid.tp_group)
    same(direct.detach(), grid.columns(logits.log_softmax(-1)))
    alone = model_utils.vocab_parallel_full_log_softmax(logits.bfloat16(), temperature)
    assert alone.dtype == torch.float32
    with pytest.raises(ValueError, match="temperature is 0"):
        model_utils.vocab_parallel_log_softmax(mine, 0, tp_group=grid.tp_group)


@ranks(1, 2, 4)
def test_columns_and_the_likeliest_token():
    grid, (logits, _) = vocabulary_grid(), problem()
    logits[0, 0, 3:] = logits.max() + 1  # ties: the lowest id
    leaf, mine = logits.clone().requires_grad_(), grid.columns(logits).clone().requires_grad_()
    ids = torch.tensor([23, 0, -1, 11, 0])
    wanted = leaf[..., ids.clamp(min=0)].where(ids >= 0, 0.0)
    upstream = torch.randn_like(wanted)
    with count_collectives() as sent:
        found = model_utils.vocab_parallel_gather_columns(mine, ids, tp_group=grid.tp_group)
        (grad,) = torch.autograd.grad(found, mine, upstream)
    assert sent.total() == int(grid.tp > 1)
    same(found.detach(), wanted.detach())
    same(grad, grid.columns(torch.autograd.grad(wanted, leaf, upstream)[0]))
    likeliest = model_utils.vocab_parallel_argmax(mine, tp_group=grid.tp_group)
    assert torch.equal(likeliest, logits.argmax(-1))
    assert likeliest[0, 0] == 3
    if grid.tp > 1:
        mesh = init_device_mesh("cpu", (grid.tp,), mesh_dim_names=("tp",))
        sharded = distribute_tensor(logits, mesh, [Shard(-1)])
        assert torch.equal(model_utils.vocab_parallel_argmax(sharded, tp_group=mesh.get_group("tp")), likeliest)
    with pytest.raises(ValueError, match=r"column_indices is \(1, 5\): it must be \[K\]"):
        model_utils.vocab_parallel_gather_columns(mine, ids[None], tp_group=grid.tp_group)


@ranks(1, 2, 4)
def test_what_stands_at_the_next_position():
    group, rank = dist.group.WORLD, dist.get_rank()
    whole = torch.randn(2, 8, 3, dtype=torch.float64)
    leaf = whole.clone().requires_grad_()
    wanted = torch.cat([leaf[:, 1:], torch.full_like(whole[:, :1], 2.5)], 1)
    upstream = torch.randn_like(whole)
    (dx,) = torch.autograd.grad(wanted, leaf, upstream)
    part = whole.chunk(group_size(group), 1)[rank].clone().requires_grad_()
    found = model_utils.cp_shift_next(part, group, fill=2.5)
    same(found.detach(), wanted.detach().chunk(group_size(group), 1)[rank])
    (grad,) = torch.autograd.grad(found, part, upstream.chunk(group_size(group), 1)[rank])
    same(grad, dx.chunk(group_size(group), 1)[rank])
    ids = torch.arange(6).view(1, 6)
    assert model_utils.cp_shift_next(ids, fill=-1).tolist() == [[1, 2, 3, 4, 5, -1]]
    assert not model_utils.cp_shift_next(ids > 9, None, fill=False).any()
    with pytest.raises(ValueError, match=r"x is \(2, 0\)"):
        model_utils.cp_shift_next(torch.zeros(2, 0), fill=0)


@ranks(1, 2, 4)
def test_from_zigzag_to_contiguous_parts():
    group, size, rank = dist.group.WORLD, group_size(dist.group.WORLD), dist.get_rank()
    whole, upstream = torch.randn(2, 16, 3), torch.randn(2, 16, 3)
    mine = (split_zigzag(whole, size, rank, 1) if size > 1 else whole).clone().requires_grad_()
    found = model_utils.cp_load_balanced_to_contiguous(mine, cp_group=group)
    assert torch.equal(found, whole.chunk(size, 1)[rank])
    (grad,) = torch.autograd.grad(found, mine, upstream.chunk(size, 1)[rank])
    assert torch.equal(grad, split_zigzag(upstream, size, rank, 1) if size > 1 else upstream)
    assert model_utils.cp_load_balanced_to_contiguous(whole) is whole


@ranks(1, 2, 4)
def test_sums():
    """What follows a sum is computed on all ranks: the gradient of each rank's term is the sum's."""
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

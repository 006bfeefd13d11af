"""The names that cross-tokenizer distillation calls: dtypes, sums, what is refused.

Values, gradients and collectives are those of `tests.fuzz.sharded_vocabulary` and `tests.fuzz.mappings`.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from megatron_ext import model_utils
from megatron_ext.distributed.groups import group_size
from tests.model_utils.sharded import problem, vocabulary_grid
from tests.ranks import ranks


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

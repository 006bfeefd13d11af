"""First weights: Megatron's to the bit, on CPU and on the device."""

import copy

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.collectives import all_gather
from megatron_ext.tensor_parallel._layers.initialization import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    piece_of,
)
from megatron_ext.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from megatron_ext.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from tests.gpt import model_parallel
from tests.marks import slow
from tests.ranks import ranks
from tests.tensor_parallel.rng import no_tracker
from tests.tensor_parallel.sharded import Config, world

D, N = 16, 24


def layers(config, group, kinds=None, stride=1):
    """One of each kind; the initialisation looks at the shape of the full weight (fan in and fan out)."""
    column, row, embedding = kinds or (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding)
    common = {"config": config, "init_method": torch.nn.init.xavier_normal_, "tp_group": group}
    return [
        column(D, N, stride=stride, **common),
        row(D, N, bias=True, input_is_parallel=True, skip_bias_add=False, stride=stride, **common),
        embedding(N, D, **common),
    ]


def whole(layer, group):
    """The full weight, from the shards of all ranks."""
    weight, dim, stride = layer.weight.detach(), layer.weight.partition_dim, layer.weight.partition_stride
    if group is None or dist.get_world_size(group) == 1:
        return weight
    shards = all_gather(weight.unsqueeze(0), group)
    blocks = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([rank[i] for i in range(stride) for rank in blocks], dim)


def seed_tracker(rank, seed=11):
    model_parallel_cuda_manual_seed(seed, tp_rank=rank, ep_rank=0, etp_rank=rank, tp_size=dist.get_world_size())


@ranks(1, 2, 4)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["cpu", "device without tracker"])
def test_the_same_full_weight_at_every_size(where, dtype, stride):
    """Each rank also builds the layers for itself alone: that is TP 1."""
    config = Config(use_cpu_initialization=where == "cpu", params_dtype=dtype)

    def build(group):
        with no_tracker():
            torch.manual_seed(5)
            return [whole(layer, group) for layer in layers(config, group, stride=stride)]

    alone = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    try:
        for shared, single in zip(build(world()), build(alone[dist.get_rank()]), strict=True):
            assert shared.dtype == dtype
            assert torch.equal(shared, single)
            assert not torch.isnan(shared).any()
    finally:
        for group in alone:
            dist.destroy_process_group(group)


@ranks(2)
def test_weights_are_all_different_and_follow_the_seed():
    with no_tracker():
        drawn = []
        for seed in (1, 1, 2):
            seed_tracker(dist.get_rank(), seed)
            drawn.append([whole(layer, world()) for layer in layers(Config(use_cpu_initialization=False), world())])
    first, again, other = drawn
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert len(torch.cat([w.flatten() for w in first]).unique()) == sum(w.numel() for w in first)


@ranks(1, 2)
@pytest.mark.parametrize("is_expert", [False, True], ids=["dense", "expert"])
def test_the_tracker_of_megatron_where_only_that_was_seeded(is_expert):
    """Our layers in a program that seeds by Megatron's own function: each rank draws from its own stream."""
    size, rank = dist.get_world_size(), dist.get_rank()
    with model_parallel(tp=size, expert_tensor_parallel_size=size), no_tracker():
        from megatron.core.tensor_parallel import random as megatron_random

        if not megatron_random.__name__.startswith("megatron.core"):
            return
        megatron_random.model_parallel_cuda_manual_seed(3)
        options = {"config": Config(use_cpu_initialization=False), "init_method": torch.nn.init.normal_}
        layer = ColumnParallelLinear(D, N, is_expert=is_expert, **options)
        generator = torch.Generator().manual_seed(3 + (1024 if is_expert else 2718) + rank)
        assert torch.equal(layer.weight, torch.randn(N // size, D, generator=generator))


@ranks(1, 2, 4)
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("stride", [2, *slow(1)])
def test_megatrons_own_weights(stride, on_cpu):
    """To the bit; and random numbers go on alike, each rank's own and those of all."""
    with model_parallel(tp=dist.get_world_size()), no_tracker():
        from megatron.core.model_parallel_config import ModelParallelConfig
        from megatron.core.tensor_parallel import layers as stock
        from megatron.core.tensor_parallel import random as stock_random

        kinds = (stock.ColumnParallelLinear, stock.RowParallelLinear, stock.VocabParallelEmbedding)
        config = ModelParallelConfig(
            tensor_model_parallel_size=dist.get_world_size(), use_cpu_initialization=on_cpu, params_dtype=torch.bfloat16
        )
        built = []
        for classes in (None, kinds):
            torch.manual_seed(3)
            stock_random.model_parallel_cuda_manual_seed(3)
            built.append(layers(config, world(), classes, stride))
            with stock_random.get_cuda_rng_tracker().fork():
                own = torch.rand(5, device="cuda")
            built[-1] += [own, torch.rand(5, device="cuda"), torch.rand(5)]
        *ours, own_ours, shared_ours, next_ours = built[0]
        *theirs, own_theirs, shared_theirs, next_theirs = built[1]
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.weight, b.weight)
            marks = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
            assert [getattr(a.weight, m, None) for m in marks] == [getattr(b.weight, m, None) for m in marks]
        assert torch.equal(own_ours, own_theirs)
        assert torch.equal(shared_ours, shared_theirs)
        assert torch.equal(next_ours, next_theirs)


@ranks(1, 2)
def test_master_weight_for_tests():
    torch.manual_seed(5)
    layer = ColumnParallelLinear(
        *(D, N), config=Config(), init_method=torch.nn.init.normal_, keep_master_weight_for_test=True, tp_group=world()
    )
    assert torch.equal(layer.master_weight, whole(layer, world()))
    other = layers(Config(), world())[0]
    assert other.master_weight is None
    assert torch.equal(copy.deepcopy(layer).master_weight, layer.master_weight)


@ranks(1, 2)
def test_megatrons_functions():
    ranks_, rank = dist.get_world_size(), dist.get_rank()
    init = torch.nn.init.normal_
    for dim, shape in ((0, (N // ranks_, D)), (1, (N, D // ranks_))):
        weight = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
        torch.manual_seed(5)
        full = _initialize_affine_weight_cpu(
            *(weight, N, D, shape[dim], dim, init), return_master_weight=True, rank=rank, world_size=ranks_
        )
        assert full.dtype == torch.float32
        assert torch.equal(weight, piece_of(full, dim, 1, rank, ranks_).bfloat16())
        assert weight.tensor_model_parallel
        assert weight.partition_dim == dim
        again = torch.nn.Parameter(torch.empty(shape, dtype=torch.bfloat16))
        with no_tracker():
            seed_tracker(rank)
            _initialize_affine_weight_gpu(again, init, dim)
        assert again.tensor_model_parallel
        assert not torch.isnan(again).any()
        with pytest.raises(ValueError, match="per_partition_size is 5"):
            _initialize_affine_weight_cpu(weight, N, D, 5, dim, init, rank=rank, world_size=ranks_)


@ranks(1, 2)
def test_under_the_meta_device():
    """Nothing is drawn for weights without values."""
    with no_tracker():
        seed_tracker(dist.get_rank())
        before = get_cuda_rng_tracker().get_states()
        with torch.device("meta"):
            built = layers(Config(use_cpu_initialization=False), world())
        assert all(layer.weight.is_meta for layer in built)
        after = get_cuda_rng_tracker().get_states()
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)

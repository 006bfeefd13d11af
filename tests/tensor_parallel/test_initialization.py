"""First weights: Megatron's to the bit, on CPU and on the device."""

import copy

import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import layers as stock
from megatron.core.tensor_parallel import random as stock_random

from megatron_ext.distributed.collectives import all_gather
from megatron_ext.tensor_parallel import layers as ours
from megatron_ext.tensor_parallel._layers.initialization import (
    _initialize_affine_weight_cpu,
    _initialize_affine_weight_gpu,
    piece_of,
)
from megatron_ext.tensor_parallel.random import get_cuda_rng_tracker, model_parallel_cuda_manual_seed
from tests.gpt import grouped, model_parallel, tiny_config
from tests.marks import slow
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, alone, build, no_tracker, world

D, N = 16, 24


def layers(config, group, package=ours, stride=1):
    """One of each kind; the initialisation looks at the shape of the full weight (fan in and fan out)."""
    common = {"package": package, "config": config, "init_method": torch.nn.init.xavier_normal_, "tp_group": group}
    linear = [build(kind, D, N, stride=stride, **common) for kind in ("column", "row")]
    return [*linear, build("embedding", N, D, **common)]


def whole(layer, group):
    weight, dim, stride = layer.weight.detach(), layer.weight.partition_dim, layer.weight.partition_stride
    if group is None or dist.get_world_size(group) == 1:
        return weight
    shards = all_gather(weight.unsqueeze(0), group)
    blocks = [shard.chunk(stride, dim) for shard in shards]
    return torch.cat([rank[i] for i in range(stride) for rank in blocks], dim)


def seed_tracker(rank):
    model_parallel_cuda_manual_seed(11, tp_rank=rank, ep_rank=0, etp_rank=rank, tp_size=dist.get_world_size())


@ranks(1, 2, 4)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("where", ["cpu", "device without tracker"])
def test_the_same_full_weight_at_every_size(where, dtype, stride):
    """Each rank also builds the layers for itself alone: that is TP 1."""
    config = Config(use_cpu_initialization=where == "cpu", params_dtype=dtype)

    def weights(group):
        with no_tracker():
            torch.manual_seed(5)
            return [whole(layer, group) for layer in layers(config, group, stride=stride)]

    for shared, single in zip(weights(world()), weights(alone()), strict=True):
        assert shared.dtype == dtype
        assert torch.equal(shared, single)
        assert not torch.isnan(shared).any()


@ranks(1, 2)
@pytest.mark.parametrize("whose", ["ours", "Megatron's"])
@pytest.mark.parametrize("is_expert", [False, True], ids=["dense", "expert"])
def test_each_rank_draws_from_its_own_stream(is_expert, whose):
    size, rank = dist.get_world_size(), dist.get_rank()
    with model_parallel(tp=size, expert_tensor_parallel_size=size), no_tracker():
        seed = model_parallel_cuda_manual_seed if whose == "ours" else stock_random.model_parallel_cuda_manual_seed
        seed(3)
        layer = build("column", D, N, is_expert=is_expert, config=Config(use_cpu_initialization=False))
        generator = torch.Generator().manual_seed(3 + (1024 if is_expert else 2718) + rank)
        assert torch.equal(layer.weight, torch.randn(N // size, D, generator=generator))


@grouped(1, 2, 4)
@pytest.mark.parametrize("on_cpu", [True, False])
@pytest.mark.parametrize("stride", [2, *slow(1)])
def test_megatrons_own_weights(stride, on_cpu):
    """Weights are equal to the bit, and random numbers go on alike, each rank's own and those of all."""
    with no_tracker():
        config = tiny_config(use_cpu_initialization=on_cpu, params_dtype=torch.bfloat16)
        results = []
        for package in (ours, stock):
            torch.manual_seed(3)
            stock_random.model_parallel_cuda_manual_seed(3)
            weights = [layer.weight for layer in layers(config, world(), package, stride)]
            with stock_random.get_cuda_rng_tracker().fork():
                own = torch.rand(5, device="cuda")
            results.append((weights, [own, torch.rand(5, device="cuda"), torch.rand(5)]))
        (mine, mine_next), (theirs, theirs_next) = results
        for a, b in zip(mine + mine_next, theirs + theirs_next, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(mine, theirs, strict=True):
            marks = ("tensor_model_parallel", "partition_dim", "partition_stride", "allreduce")
            assert [getattr(a, m, None) for m in marks] == [getattr(b, m, None) for m in marks]


@ranks(1, 2)
def test_master_weight_for_tests():
    torch.manual_seed(5)
    layer = build("column", D, N, keep_master_weight_for_test=True, tp_group=world())
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

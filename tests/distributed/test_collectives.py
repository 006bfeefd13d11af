from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed import collectives
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import VocabShard, group_rank, group_size
from tests.ranks import ranks


def shards(world_size, shape, dtype=torch.float32):
    """Every rank's tensor: each rank draws all of them alike."""
    g = torch.Generator().manual_seed(1)
    return [torch.randint(-8, 8, shape, generator=g).to(dtype) for _ in range(world_size)]


def in_a_graph(compiling):
    return mock.patch("torch.compiler.is_compiling", return_value=compiling)


@ranks(1, 2, 4)
@pytest.mark.parametrize("compiling", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64], ids=str)
def test_equal_pieces(dtype, compiling):
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    xs = shards(size, (2 * size, 3, 4 * size), dtype)
    x = xs[rank].clone()
    total = torch.stack(xs).sum(0)
    with in_a_graph(compiling):
        assert torch.equal(collectives.all_reduce(x, group), total)
        assert torch.equal(collectives.all_reduce(x, group, "max"), torch.stack(xs).amax(0))
        for dim in (0, 1, -1):
            assert torch.equal(collectives.all_gather(x, group, dim), torch.cat(xs, dim))
        for dim in (0, -1):
            assert torch.equal(collectives.reduce_scatter(x, group, dim), total.chunk(size, dim)[rank])
        assert torch.equal(collectives.all_to_all(x, group), torch.cat([y.chunk(size)[rank] for y in xs]))
        assert torch.equal(x, xs[rank]), "a collective wrote its input"


@ranks(1, 2, 4)
@pytest.mark.parametrize("compiling", [False, True])
def test_uneven_pieces(compiling):
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    sizes = [3, 0, 5, 1][:size]
    start = sum(sizes[:rank])
    whole = torch.arange(2.0 * sum(sizes)).view(2, sum(sizes)).double()
    for dim, full in ((1, whole), (0, whole.t())):
        piece = full.narrow(dim, start, sizes[rank])
        with count_collectives() as counts, in_a_graph(compiling):
            assert torch.equal(collectives.all_gather(piece, group, dim, sizes), full)
            assert torch.equal(collectives.reduce_scatter(full, group, dim, sizes), piece * size)
        assert compiling or sum(counts.values()) == (2 if size > 1 else 0)


@ranks(2)
def test_non_contiguous_input_and_in_place():
    x = torch.arange(6.0).view(2, 3).t()
    assert torch.equal(collectives.all_reduce(x, dist.group.WORLD), 2 * x)
    own = torch.ones(3)
    assert collectives.all_reduce(own, dist.group.WORLD, in_place=True) is own
    assert torch.equal(own, torch.full((3,), 2.0))
    buffer = torch.full((3,), float(dist.get_rank() + 1))
    assert torch.equal(collectives.broadcast(buffer, dist.group.WORLD, source=1), torch.full((3,), 2.0))


@ranks(1, 2, 4)
def test_vocab_shards_cover_the_vocabulary():
    world = dist.group.WORLD
    equal, split = VocabShard.equal(5, world), VocabShard.split(11, world)
    assert equal == VocabShard(5 * group_rank(world), 5 * group_rank(world) + 5, 5 * group_size(world))
    mine = torch.zeros(11)
    mine[split.start : split.stop] = 1
    assert torch.equal(collectives.all_reduce(mine, world), torch.ones(11)), "every id has one owner"
    assert split.columns in (11 // group_size(world), 11 // group_size(world) + 1)

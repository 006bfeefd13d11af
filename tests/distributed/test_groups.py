"""Groups that are no ProcessGroup, but tell their size and this rank's place; and shards of a vocabulary."""

from types import SimpleNamespace

import numpy
import pytest
import torch

from megatron_ext.distributed.groups import VocabShard, check_group, group_rank, group_size, tensor_parallel_group
from megatron_ext.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron_ext.tensor_parallel.layers import ColumnParallelLinear, param_is_not_tensor_parallel_duplicate
from tests.tensor_parallel.sharded import Config


def place(rank, ranks):
    """A rank's place in a group of which nothing else is known."""
    return SimpleNamespace(rank=lambda: rank, size=lambda: ranks)


def test_a_group_that_tells_its_size_and_place_is_one():
    group = place(rank=2, ranks=4)
    assert check_group(group) is tensor_parallel_group(group) is group
    assert (group_size(group), group_rank(group)) == (4, 2)


def test_a_group_without_this_rank_or_without_a_size_is_refused():
    with pytest.raises(ValueError, match="tp_group does not hold this rank"):
        check_group(place(rank=-1, ranks=4))
    with pytest.raises(ValueError, match="tp_group is a int: it must be a torch.distributed.ProcessGroup"):
        check_group(3)
    with pytest.raises(ValueError, match="tp_group is a Tensor: it must be a torch.distributed.ProcessGroup"):
        check_group(torch.ones(2))  # which has a size and no rank


def test_layers_and_losses_take_one():
    alone = place(rank=0, ranks=1)
    logits, labels = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([4, 0, 2])
    expected = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
    torch.testing.assert_close(vocab_parallel_cross_entropy(logits, labels, tp_group=alone), expected)
    layer = ColumnParallelLinear(4, 6, config=Config(), init_method=torch.nn.init.ones_, tp_group=alone)
    assert layer(torch.ones(2, 4))[0].tolist() == [[4.0] * 6] * 2


def test_copies_of_a_group_are_told_apart_on_a_single_rank():
    second, first = (SimpleNamespace(rank=lambda rank=rank: rank) for rank in (1, 0))
    parameter = torch.empty(1)
    assert not param_is_not_tensor_parallel_duplicate(parameter, second, first)
    parameter.allreduce = False
    assert param_is_not_tensor_parallel_duplicate(parameter, second, first)


def test_columns_of_a_shard():
    shard = VocabShard(64, 128, 100)
    assert (shard.columns, shard.counted) == (64, 36)
    assert shard.owns(torch.tensor([63, 64, 99, 100, 127, -100])).tolist() == [False, True, True, False, False, False]
    assert VocabShard(128, 192, 100).counted == 0


@pytest.mark.parametrize(
    "arguments, said",
    [
        ((None, 2, 3), "vocab start is None, a NoneType: it must be a whole number; pass an int"),
        ((1.5, 2, 3), "vocab start is 1.5, a float: it must be a whole number"),
        ((0, "2", 3), "vocab stop is '2', a str: it must be a whole number"),
        ((0, 2, 2.5), "vocab size is 2.5, a float: it must be a whole number"),
        ((0, 2, 0), "vocab size is 0: it must be at least 1; pass the true one, over all ranks"),
        ((-1, 2, 3), "vocab start is -1: it must be at least 0"),
        ((2, 1, 3), "vocab start 2, stop 1: must satisfy 0 <= start <= stop; pass where"),
    ],
)
def test_numbers_of_a_shard(arguments, said):
    with pytest.raises(ValueError, match=said):
        VocabShard(*arguments)


@pytest.mark.parametrize("make", [VocabShard.equal, VocabShard.split, VocabShard.chunk])
def test_sizes_and_groups_that_are_none(make):
    argument = "columns" if make == VocabShard.equal else "vocab size"
    for size in (None, "3", 2.0):
        with pytest.raises(ValueError, match=f"{argument} is {size!r}, a {type(size).__name__}"):
            make(size, None)
    with pytest.raises(ValueError, match="group is a str: it must be a torch.distributed.ProcessGroup or None"):
        make(3, "tp")
    assert make(numpy.int64(3), None) == make(3, None) == VocabShard(0, 3, 3)


def test_a_shard_is_made_in_a_compiled_function():
    @torch.compile(backend="eager", fullgraph=True, dynamic=True)
    def counted(x):
        return x + VocabShard.equal(x.shape[0], None).counted

    for columns in (5, 7):
        assert torch.equal(counted(torch.zeros(columns)), torch.full((columns,), float(columns)))

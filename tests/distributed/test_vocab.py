"""A shard of a vocabulary, and what is none."""

import numpy
import pytest
import torch

from megatron_ext.distributed.groups import VocabShard


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

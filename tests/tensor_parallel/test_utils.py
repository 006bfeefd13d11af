import pytest
import torch
import torch.distributed as dist

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel import data, utils
from tests.ranks import ranks


@pytest.mark.parametrize("contiguous", [False, True])
def test_split_along_last_dim(contiguous):
    x = torch.arange(24.0).view(2, 12)
    pieces = utils.split_tensor_along_last_dim(x, 3, contiguous_split_chunks=contiguous)
    assert len(pieces) == 3
    for i, piece in enumerate(pieces):
        assert torch.equal(piece, x[:, 4 * i : 4 * i + 4])
        assert piece.is_contiguous() == contiguous
        assert (piece.data_ptr() == x[:, 4 * i :].data_ptr()) == (not contiguous), "a view unless asked"
    (whole,) = utils.split_tensor_along_last_dim(x, 1, contiguous_split_chunks=contiguous)
    assert torch.equal(whole, x)
    for bad in (5, 0):
        said = rf"shape \(2, 12\) and num_partitions is {bad}: the last dim must divide"
        with pytest.raises(ValueError, match=said):
            utils.split_tensor_along_last_dim(x, bad)


@ranks(1, 2, 4)
@pytest.mark.parametrize("shape", [(8, 3), (5, 3), (1,), (), (0, 4)], ids=str)
@pytest.mark.parametrize("new_buffer", [False, True])
def test_1d_chunks_make_a_round_trip(shape, new_buffer):
    group, size, rank = dist.group.WORLD, dist.get_world_size(), dist.get_rank()
    x = torch.randn(shape).t() if len(shape) == 2 else torch.randn(shape)
    kept = x.clone()
    with count_collectives() as counts:
        part = utils.split_tensor_into_1d_equal_chunks(x, new_buffer, tp_group=group)
    assert not counts
    chunk = -(-x.numel() // size)
    assert part.shape == (chunk,), "equal on all ranks"
    in_memory_of_x = part.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    assert not (new_buffer and in_memory_of_x and chunk)
    padded = torch.cat([x.reshape(-1), torch.zeros(chunk * size - x.numel())])
    assert torch.equal(part, padded[rank * chunk :][:chunk])

    with count_collectives() as counts:
        assert torch.equal(utils.gather_split_1d_tensor(part, tp_group=group), x.reshape(-1))
    assert sum(counts.values()) == (1 if size > 1 else 0)
    assert torch.equal(utils.gather_split_1d_tensor(part.clone(), tp_group=group), padded)
    assert torch.equal(x, kept)


@ranks(2)
def test_chunks_of_a_group():
    group = [dist.new_group([0]), dist.new_group([1])][dist.get_rank()]
    x = torch.arange(3.0)
    part = utils.split_tensor_into_1d_equal_chunks(x, tp_group=group)
    assert torch.equal(utils.gather_split_1d_tensor(part, tp_group=group), x)
    functions = utils.split_tensor_into_1d_equal_chunks, utils.gather_split_1d_tensor
    for function in (*functions, lambda x: data.broadcast_data(["x"], {"x": x}, torch.float32)):
        with pytest.raises(ValueError, match="tp_group is None"):
            function(x)


def test_divide():
    assert utils.divide(12, 4) == 3
    with pytest.raises(ValueError, match="numerator is 13: it must divide by the denominator 4; pad it to 16"):
        utils.divide(13, 4)


def test_vocab_utility():
    assert utils.VocabUtility.vocab_range_from_per_partition_vocab_size(16, 3, 4) == (48, 64)
    assert utils.VocabUtility.vocab_range_from_global_vocab_size(64, 1, 4) == (16, 32)
    with pytest.raises(ValueError, match="global_vocab_size 65 must divide by world_size 4; pad it to 68"):
        utils.VocabUtility.vocab_range_from_global_vocab_size(65, 0, 4)

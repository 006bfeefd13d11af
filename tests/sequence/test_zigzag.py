import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.zigzag import (
    gather_zigzag,
    merge_zigzag,
    split_zigzag,
    thd_partition_indices,
    zigzag_positions,
)
from tests.devices import GPU
from tests.ranks import ranks


def test_a_rank_holds_an_early_and_a_late_chunk():
    x = torch.arange(12)
    parts = [split_zigzag(x, 3, rank).tolist() for rank in range(3)]
    assert parts == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert zigzag_positions(12, 3, 1).tolist() == parts[1]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_merging_undoes_splitting_with_its_gradient(size, dim):
    x = torch.randn(16, 8, 24, requires_grad=True)
    weight = torch.randn_like(x)
    merged = merge_zigzag(torch.cat([split_zigzag(x, size, rank, dim) for rank in range(size)], dim), size, dim)
    torch.testing.assert_close(merged, x, rtol=0, atol=0)
    (merged * weight).sum().backward()
    torch.testing.assert_close(x.grad, weight, rtol=0, atol=0)


@pytest.mark.parametrize("lengths", [[8], [16, 8], [8, 0, 24, 8], []], ids=str)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_pack_is_split_document_by_document(lengths, size):
    cu_seqlens = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0).to(torch.int32)
    total = sum(lengths)
    documents = torch.arange(total).split(lengths)
    held = []
    for rank in range(size):
        index = thd_partition_indices(cu_seqlens, total, size, rank)
        assert index.dtype == torch.int32
        expected = [split_zigzag(document, size, rank) for document in documents]
        assert index.tolist() == torch.cat([torch.empty(0), *expected]).tolist()
        held += index.tolist()
    assert sorted(held) == list(range(total))


def test_lengths_that_cannot_be_split_are_refused():
    with pytest.raises(ValueError, match="length 10.*multiple of 2 \\* 2 = 4; pad it to 12"):
        split_zigzag(torch.zeros(3, 10), 2, 0, dim=1)
    with pytest.raises(ValueError, match="length 6.*pad it to 8"):
        merge_zigzag(torch.zeros(6), 4)
    with pytest.raises(ValueError, match="length 6"):
        zigzag_positions(6, 2, 0)


@pytest.mark.parametrize(
    "cu_seqlens, total",
    [([0, 8, 14], 14), ([0, 8, 16], 24), ([4, 8], 8), ([0, 16, 8], 8), ([0], 8)],
    ids=["no multiple", "another end", "another start", "falling", "no documents"],
)
def test_wrong_cu_seqlens_are_refused(cu_seqlens, total):
    with pytest.raises(ValueError, match=r"cu_seqlens is \[.*must go from 0 to"):
        thd_partition_indices(torch.tensor(cu_seqlens), total, 2, 0)


def test_cu_seqlens_of_another_kind_are_refused():
    for wrong in (torch.tensor([[0, 8]]), torch.tensor([0.0, 8.0]), torch.tensor([], dtype=torch.int32)):
        with pytest.raises(ValueError, match="integers \\[documents \\+ 1\\]"):
            thd_partition_indices(wrong, 8, 2, 0)


@pytest.mark.gpu
@pytest.mark.rehearsed
def test_places_of_packed_tokens_on_the_gpu():
    cu_seqlens = torch.tensor([0, 8], dtype=torch.int32, device=GPU)
    assert thd_partition_indices(cu_seqlens, 8, 2, 0).tolist() == [0, 1, 6, 7]


def test_indices_need_no_values():
    with FakeTensorMode():
        index = thd_partition_indices(torch.empty(4, dtype=torch.int32), 32, 2, 1)
        assert index.shape == (16,)
        assert index.dtype == torch.int32


@ranks(1, 2, 4)
def test_gathering_restores_the_sequence_and_its_gradient():
    group = dist.group.WORLD
    size, rank = dist.get_world_size(), dist.get_rank()
    whole = torch.randn(3, 8 * size, 2, dtype=torch.float64)
    weights = torch.randn(size, *whole.shape, dtype=torch.float64)
    part = split_zigzag(whole, size, rank, dim=1).requires_grad_()
    with count_collectives() as forward:
        gathered = gather_zigzag(part, group, dim=1)
    torch.testing.assert_close(gathered, whole, rtol=0, atol=0)
    with count_collectives() as backward:
        (grad,) = torch.autograd.grad((gathered.square() * weights[rank]).sum(), part, create_graph=True)
    expected = split_zigzag(2 * whole * weights.sum(0), size, rank, dim=1)
    torch.testing.assert_close(grad, expected)
    # Twice differentiable: the exchanges are each other's backward.
    (second,) = torch.autograd.grad(grad.sum(), part)
    torch.testing.assert_close(second, split_zigzag(2 * weights.sum(0), size, rank, dim=1))
    assert sum(forward.values()) == sum(backward.values()) == int(size > 1), (forward, backward)


@ranks(2)
def test_an_odd_part_is_refused_before_anything_is_sent():
    with count_collectives() as counts:
        with pytest.raises(ValueError, match="multiple of 2 \\* 2"):
            gather_zigzag(torch.zeros(3), dist.group.WORLD)
    assert not counts


@ranks(2)
def test_positions_behind_a_known_number_follow_in_the_whole():
    """Ranks that are known to have 4 positions have 6: the whole and its gradient are those of one gather."""
    parts, group = SequenceParts(dist.group.WORLD), dist.group.WORLD
    whole = torch.arange(24.0).view(2, 12)
    mine = split_zigzag(whole, 2, dist.get_rank(), 1).requires_grad_()
    found = parts.gather_or_refuse(mine, 1, None, 4)
    assert torch.equal(found, whole)
    weight = torch.linspace(1, 2, 24).view(2, 12)
    (found * weight).sum().backward()
    again = mine.detach().clone().requires_grad_()
    (gather_zigzag(again, group, 1) * weight).sum().backward()
    torch.testing.assert_close(mine.grad, again.grad)

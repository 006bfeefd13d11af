"""Tensors moved between ranks: whole again, with the gradient of every rank's use."""

import pytest
import torch

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.model_utils import (
    AllGatherCPTensor,
    _get_tokens_on_this_cp_rank,
    all_to_all_sq2vp,
    all_to_all_vp2sq,
    allgather_cp_sharded_tensor,
)
from tests.model_utils.sharded import grids, same
from tests.ranks import ranks


def test_a_rank_holds_an_early_and_a_late_chunk():
    tokens = torch.arange(8)[None]
    assert _get_tokens_on_this_cp_rank(tokens, 1, 2).tolist() == [[2, 3, 4, 5]]
    assert _get_tokens_on_this_cp_rank(tokens[0], 0, 2, seq_dim=0).tolist() == [0, 1, 6, 7]
    assert _get_tokens_on_this_cp_rank(tokens, 0, 1) is tokens
    with pytest.raises(ValueError, match="multiple of 2 \\* 3 = 6; pad it to 12"):
        _get_tokens_on_this_cp_rank(tokens, 0, 3)
    for rank, ranks_ in ((2, 2), (-1, 2), (0, 0)):
        with pytest.raises(ValueError, match=f"cp_rank is {rank} and cp_size {ranks_}"):
            _get_tokens_on_this_cp_rank(tokens, rank, ranks_)
    with pytest.raises(ValueError, match="seq_dim is 1 .* pass seq_dim=0"):
        _get_tokens_on_this_cp_rank(tokens[0], 0, 2)


@ranks(1, 2, 4)
@pytest.mark.parametrize("seq_dim", [0, 1])
def test_gathering_over_the_sequence(seq_dim):
    for grid in grids():
        x = torch.randn(16, 16, 3, dtype=torch.float64)
        part = grid.part(x, seq_dim).clone().requires_grad_()
        with count_collectives() as forward:
            whole = allgather_cp_sharded_tensor(part, grid.cp_group, seq_dim)
        same(whole.detach(), x)
        mine, every = grid.weights(x.shape)
        with count_collectives() as backward:
            (grad,) = torch.autograd.grad(whole, part, mine)
        same(grad, grid.part(every, seq_dim))
        assert forward.total() == backward.total() == int(grid.cp > 1)


@ranks(2)
def test_gradients_that_are_views():
    """The gradient of a sum is expanded, of a transposed use transposed: neither is contiguous."""
    grid = next(g for g in grids() if g.cp == 2)
    part = torch.randn(4, 6, requires_grad=True)
    AllGatherCPTensor.apply(part, grid.cp_group).sum().backward()
    assert torch.equal(part.grad, torch.full((4, 6), 2.0))
    (grad,) = torch.autograd.grad(AllGatherCPTensor.apply(part, grid.cp_group).t(), part, torch.ones(12, 4))
    assert torch.equal(grad, part.grad)


@ranks(1, 2, 4)
def test_from_vocabulary_to_tokens_and_back():
    for grid in grids():
        x = torch.randn(8, 12, dtype=torch.float64)
        mine = grid.columns(x).clone().requires_grad_()
        with count_collectives() as sent:
            tokens = all_to_all_vp2sq(mine, grid.tp_group)
        assert sent.total() == int(grid.tp > 1)
        same(tokens.detach(), x.chunk(grid.tp)[grid.tp_rank])
        back = all_to_all_sq2vp(tokens, grid.tp_group)
        same(back.detach(), mine.detach())
        weights = grid.columns(torch.arange(96, dtype=torch.float64).view(8, 12))
        (grad,) = torch.autograd.grad(back, mine, weights)
        same(grad, weights)


@ranks(1, 2)
def test_without_a_group_the_logits_are_whole():
    """Whole logits are what NeMo-RL means by no group, also where several ranks run and Megatron has no groups."""
    x = torch.randn(3, 5)
    with count_collectives() as sent:
        for move in (all_to_all_vp2sq, all_to_all_sq2vp):
            assert torch.equal(move(x, None), x)
            with pytest.raises(ValueError, match="must be 2-D"):
                move(x[0], None)
            with pytest.raises(ValueError, match="is list: it must be 2-D"):
                move([[1.0]], None)
    assert not sent


@ranks(2)
def test_what_cannot_be_shared_is_an_error_on_every_rank():
    grid = next(g for g in grids() if g.tp == 2)
    for call, said in (
        (lambda: all_to_all_vp2sq(torch.zeros(3, 4), grid.tp_group), r"shape \(3, 4\).* dim 0 .* divides by the 2"),
        (lambda: all_to_all_vp2sq(torch.zeros(1, 4, 4), grid.tp_group), "must be 2-D"),
        (lambda: all_to_all_sq2vp(torch.zeros(4, 3), grid.tp_group), r"shape \(4, 3\).* dim 1"),
    ):
        with count_collectives() as sent, pytest.raises(ValueError, match=said):
            call()
        assert not sent

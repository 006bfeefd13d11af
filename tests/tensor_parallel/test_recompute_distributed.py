"""checkpoint() that keeps this rank's part of its first argument: `distribute_saved_activations`."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F

from megatron_ext.distributed.counting import count_collectives
from megatron_ext.tensor_parallel.random import checkpoint
from tests.gpt import grouped, model_parallel
from tests.marks import slow
from tests.ranks import ranks
from tests.tensor_parallel.sharded import Config, alone, build, no_tracker, numbers, seeded, world
from tests.tensor_parallel.test_gpt_parity import FULL, check
from tests.tensor_parallel.test_recompute import assert_as_without, assert_equal, grads_of, saved_tensors


@grouped(1, 2, 4)
def test_distributed_activations_of_any_shape():
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    with seeded(7, tp_rank=rank, ep_rank=0, etp_rank=0):
        weight = torch.nn.Parameter(numbers(5, 5, seed=1))
        for shape in ((3, 5), (7, 1, 5), (5,), (0, 5), (4, 4, 5)):
            x, scale = numbers(*shape, seed=2).requires_grad_(), numbers(5, seed=4).requires_grad_()
            original = x.detach().clone()

            def function(x, scale):
                return F.dropout(torch.tanh(x @ weight), 0.3) * scale

            def run(recompute, x=x, scale=scale):
                return checkpoint(function, True, x, scale) if recompute else function(x, scale)

            assert_as_without(run, x, scale, weight)
            assert torch.equal(x, original), "the caller's tensor is the caller's"

            with count_collectives() as forward, saved_tensors() as saved:
                out = run(True)
            with count_collectives() as backward:
                out.sum().backward(retain_graph=True)
                out.sum().backward()
            assert not forward
            assert sum(backward.values()) == (2 if size > 1 else 0), backward
            assert saved[0].numel() == -(-x.numel() // size), "only this rank's part is kept"
            assert size == 1 or x.numel() == 0 or saved[0].untyped_storage().data_ptr() != x.data_ptr()


def test_what_cannot_be_distributed_is_refused():
    with pytest.raises(ValueError, match="first argument is missing"):
        checkpoint(lambda: None, True)
    with pytest.raises(ValueError, match="first argument is <class 'list'>"):
        checkpoint(lambda x: x, True, [torch.ones(2)])


@grouped(1, 2)
@pytest.mark.parametrize("leaf", [True, *slow(False)])
def test_a_distributed_argument_becomes_this_ranks_part_of_it(leaf):
    """The caller's tensor itself, so that the memory of the rest is free; its gradient has the shape of the whole.

    With one rank it becomes flat.
    """
    size = torch.distributed.get_world_size()
    given = numbers(3, 4, seed=1).requires_grad_()
    other = numbers(3, 4, seed=2).requires_grad_()
    expected = grads_of(lambda: (given if leaf else given.exp()).sin() * other, given, other)
    given.grad = other.grad = None
    x = given if leaf else given.exp()
    part = x.detach().flatten().chunk(size)[world().rank()].clone()
    out = checkpoint(lambda x, y: x.sin() * y, True, x, other)
    assert torch.equal(x.detach(), part)
    assert x.untyped_storage().nbytes() == part.nbytes
    out.sum().backward()
    assert_equal([out.detach(), given.grad, other.grad], expected)


@grouped(2)
def test_distributed_argument_with_another_use_stays_whole():
    whole = numbers(3, 4, seed=1).requires_grad_()
    view = whole[:2]
    twice = checkpoint(lambda x, y: x * y, True, whole, whole)
    same = checkpoint(lambda x: x, True, view)
    assert [t.shape for t in (whole, view, twice, same)] == [(3, 4), (2, 4), (3, 4), (2, 4)]
    (twice.sum() + same.sum()).backward()
    expected = 2 * whole.detach()
    expected[:2] += 1
    assert torch.equal(whole.grad, expected)


@ranks(2)
@pytest.mark.parametrize("kind", ["alone", "sequence", "explicit"])
def test_an_argument_is_shared_out_over_its_layers_group(kind):
    """Megatron's own groups say nothing of layers that were given others: gradients were silently of two tensors."""
    rank = world().rank()
    with model_parallel(tp=2) if kind != "explicit" else nullcontext(), no_tracker():
        group = alone() if kind == "alone" else world()
        config = Config(sequence_parallel=kind == "sequence")
        column, row = (build(name, 4, 4, config=config, tp_group=group) for name in ("column", "row"))
        x = numbers(2, 3, 4, seed=0 if kind == "explicit" else rank).requires_grad_()

        def function(x):
            return row(torch.tanh(column(x)[0]))[0].sin()

        parameters = [x, *column.parameters(), *row.parameters()]
        expected = grads_of(lambda: function(x), *parameters)
        for tensor in parameters:
            tensor.grad = None
        with saved_tensors() as saved:
            out = checkpoint(function, True, x)
        assert saved[0].numel() == x.numel()  # x itself is what was kept
        assert x.numel() == (12 if kind == "explicit" else 24)
        out.sum().backward()
        assert_equal([out.detach(), *(tensor.grad for tensor in parameters)], expected)


@ranks(2)
def test_an_unknown_group_to_share_out_over_is_refused():
    with no_tracker(), pytest.raises(ValueError, match="tp_group"):
        checkpoint(torch.sin, True, torch.ones(4, requires_grad=True))


@pytest.mark.slow
@ranks(2)
def test_in_megatrons_model():
    check({"tp": 2}, **FULL, distribute_saved_activations=True)

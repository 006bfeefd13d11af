"""The fused head against the unsharded, unfused truth: the loss and every gradient, whatever the options."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext import linear_cross_entropy
from megatron_ext.distributed.counting import count_collectives
from tests.head.problem import Problem
from tests.ranks import ranks

OPTIONS = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "softcap": {"softcap": 3.0},
    "temperature": {"temperature": 0.7},
    "everything": {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 3.0, "temperature": 1.7},
}


@ranks(1, 2, 4)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_options(layout, options):
    for with_bias, size, cache, chunk_tokens in [
        (False, 20, 0.0, None),
        (True, 20, 1.0, 7),
        (True, 18, 0.5, 5),
        (False, 9, 0.5, 1),  # at 4 ranks two shards have no column that counts
    ]:
        problem = Problem(with_bias=with_bias, size=size, options=options)
        problem.check(problem.ours(layout, cache=cache, chunk_tokens=chunk_tokens), layout)


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_dtypes(dtype, layout):
    """fp32 to its rounding; 16 bits to a few of theirs (how good they are is measured elsewhere)."""
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2 if dtype == torch.float16 else 8e-2
    for cache in (0.0, 0.4, 1.0):
        problem = Problem(dtype=dtype, scale=0.3, options={"label_smoothing": 0.1}, with_bias=True)
        loss, *grads = problem.ours(layout, cache=cache)
        assert loss.dtype == torch.float32
        assert all(grad.dtype == dtype for grad in grads)
        problem.check((loss, *grads), layout, rtol=tolerance, atol=tolerance)


@ranks(2, 4)
@pytest.mark.parametrize("chunk_tokens", [1, 8, 24])
@pytest.mark.parametrize("cache", [0.0, 0.5, 1.0])
def test_collectives_whatever_the_chunks(cache, chunk_tokens):
    for layout, number in (("replicated", 1), ("sequence", 2)):
        problem = Problem(options={"label_smoothing": 0.1})
        hidden, weight, _ = problem.pieces(layout)

        with count_collectives() as forward:
            loss = linear_cross_entropy(
                hidden, weight, problem.labels_SB, dist.group.WORLD, layout, cache=cache, chunk_tokens=chunk_tokens
            )
        with count_collectives() as backward:
            loss.backward(problem.grad_SB)
        assert (sum(forward.values()), sum(backward.values())) == (number, number), (forward, backward)


@ranks(1)
def test_no_collectives_on_one_rank():
    problem = Problem()
    with count_collectives() as counts:
        problem.ours("sequence", cache=0.5, chunk_tokens=5)
    assert not counts


@ranks(1, 2)
def test_backward_twice_gives_the_same_gradients():

    for cache in (0.0, 0.5, 1.0):
        problem = Problem()
        hidden, weight, _ = problem.pieces("replicated")
        loss = linear_cross_entropy(hidden, weight, problem.labels_SB, dist.group.WORLD, cache=cache)
        first = torch.autograd.grad(loss, (hidden, weight), problem.grad_SB, retain_graph=True)
        second = torch.autograd.grad(loss, (hidden, weight), problem.grad_SB)
        for a, b in zip(first, second, strict=True):
            assert torch.equal(a, b)


@ranks(1, 2)
def test_extreme_logits():
    """Gaps of thousands, a rank whose whole shard is far below the maximum, and a masked column."""
    for dtype in (torch.float64, torch.float32):
        problem = Problem(dtype=dtype, scale=300.0, with_bias=True)
        problem.bias_V[3] = -torch.inf
        problem.labels_SB[problem.labels_SB == 3] = 4
        exact = dtype == torch.float64
        for cache in (0.0, 1.0):
            loss, dx, dw, db = problem.ours(cache=cache)
            truth = problem.truth()
            assert loss.isfinite().all()
            size = truth[0].abs().max()
            torch.testing.assert_close(loss.double(), truth[0], rtol=1e-9 if exact else 1e-5, atol=1e-6 * size)
            assert dx.isfinite().all()
            assert dw.isfinite().all()
            if exact:
                problem.check((loss, dx, dw, db), rtol=1e-7, atol=1e-7)


@ranks(1, 2)
def test_nothing_to_do():
    """No tokens, one token, all ignored, one column a rank."""
    empty = Problem(S=0)
    loss, dx, dw, _ = empty.ours()
    assert loss.shape == (0, 3)
    assert dx.shape == empty.hidden_SBD.shape
    assert not dw.any()
    Problem(S=1, B=1).check(Problem(S=1, B=1).ours())
    ignored = Problem()
    ignored.labels_SB.fill_(-100)
    ignored.check(ignored.ours())
    narrow = Problem(V=dist.get_world_size(), size=dist.get_world_size())
    narrow.check(narrow.ours())


@ranks(2)
def test_frozen_weight_and_frozen_hidden_states():

    problem = Problem()
    _, dx, dw, _ = problem.truth()
    shard = problem.shard()
    for train_hidden, train_weight in ((True, False), (False, True), (False, False)):
        hidden, weight, _ = problem.pieces("replicated")
        hidden.requires_grad_(train_hidden)
        weight.requires_grad_(train_weight)
        loss = linear_cross_entropy(hidden, weight, problem.labels_SB, dist.group.WORLD)
        assert loss.requires_grad == (train_hidden or train_weight)
        if loss.requires_grad:
            with count_collectives() as counts:
                loss.backward(problem.grad_SB)
            assert sum(counts.values()) == int(train_hidden)
        if train_hidden:
            torch.testing.assert_close(hidden.grad, dx)
        if train_weight:
            torch.testing.assert_close(weight.grad, dw[shard.start : shard.stop])

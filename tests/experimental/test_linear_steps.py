"""The head in steps against the whole head: losses and gradients on ranks that share the vocabulary."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from benchmarks.meter import measure
from megatron_ext import linear_cross_entropy
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import VocabShard
from megatron_ext.experimental.pipeline_vocabulary import linear_steps
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.readouts.read_out import CrossEntropy
from megatron_ext.head.readouts.row_sums import Entropy
from tests.head.problems import error
from tests.ranks import ranks

T, D, V = 24, 16, 40


def by_steps(hidden, weight, labels, grad_loss, call, **loss):
    """Loss, dx and dW of this rank's shard, in the order in which a pipeline would have them."""
    found = linear_steps.products(hidden, weight, [CrossEntropy(labels, **loss)], call, backward=True)
    result = linear_steps.result(found, linear_steps.start_exchange(found).wait(), weight)
    unit = collectives.all_reduce(result.unit_dx_TD, call.group)
    return result.loss_T, unit * grad_loss.unsqueeze(1), linear_steps.weight_gradient(result, grad_loss, weight)


@ranks(1, 2)
@pytest.mark.parametrize("dtype,limit", [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 6e-3)])
@pytest.mark.parametrize(
    "more", [{}, {"z_loss": 1e-2, "label_smoothing": 0.1, "temperature": 0.7}], ids=["plain", "all"]
)
def test_values_and_gradients(dtype, limit, more):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype)
    full = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    labels = torch.randint(V, (T,), generator=generator)
    labels[3] = -100
    grad_loss = torch.rand(T, generator=generator, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
    rank, world = dist.get_rank(), dist.get_world_size()
    vocab = VocabShard(rank * V // world, (rank + 1) * V // world, V)
    weight = full[vocab.start : vocab.stop].clone()
    call = ResolvedHead(
        dist.group.WORLD if world > 1 else None, vocab, cache=1, temperature=more.get("temperature", 1.0)
    )
    of_loss = {name: value for name, value in more.items() if name != "temperature"}
    loss, dx, dw = by_steps(hidden, weight, labels, grad_loss, call, **of_loss)

    x = hidden.double().requires_grad_()
    w = full.double().requires_grad_()
    expected = linear_cross_entropy(x, w, labels, reduction="none", **more)
    dx_expected, dw_expected = torch.autograd.grad(expected, (x, w), grad_loss.double())
    for name, found, wanted in (
        ("loss", loss, expected.detach()),
        ("dx", dx, dx_expected),
        ("dw", dw, dw_expected[vocab.start : vocab.stop]),
    ):
        assert error(found, wanted) < limit, name
    assert loss[3] == 0
    assert not dx[3].any()


def test_the_weights_gradient_goes_into_main_grad():
    hidden, weight = torch.randn(T, D), torch.randn(V, D).requires_grad_()
    labels, grad_loss = torch.randint(V, (T,)), torch.rand(T)
    plain = ResolvedHead(None, VocabShard(0, V, V), cache=1)
    expected = by_steps(hidden, weight, labels, grad_loss, plain)[2]
    weight.main_grad, weight.grad_added_to_main_grad = torch.full((V, D), 3.0), False
    fused = ResolvedHead(None, VocabShard(0, V, V), cache=1, fuse_main_grad=True)
    by_steps(hidden, weight, labels, grad_loss, fused)
    assert weight.grad_added_to_main_grad
    torch.testing.assert_close(weight.main_grad - 3, expected, rtol=1e-4, atol=1e-6)


def test_what_is_refused():
    hidden, weight, labels = torch.randn(T, D), torch.randn(V, D), torch.randint(V, (T,))
    loss, call = [CrossEntropy(labels)], ResolvedHead(None, VocabShard(0, V, V), cache=1)
    for readouts, more in ((loss, {"softcap": 30.0}), ([*loss, Entropy()], {})):
        with pytest.raises(ValueError, match="use linear_cross_entropy"):
            linear_steps.products(hidden, weight, readouts, replace(call, **more), backward=True)
    with pytest.raises(ValueError, match="labels"):
        linear_steps.products(hidden, weight, [CrossEntropy(labels + V)], call, backward=True)
    with pytest.raises(ValueError, match="in steps they must be plain and of one dtype"):
        linear_steps.products(hidden.bfloat16(), weight, loss, call, backward=True)
    with pytest.raises(ValueError, match="their last dims must be equal"):
        linear_steps.products(hidden[:, 1:], weight, loss, call, backward=True)


@ranks(2)
def test_each_rank_does_its_share_of_six_products():
    group = dist.group.WORLD
    vocab = VocabShard.split(V, group)
    call = ResolvedHead(group, vocab, cache=1)
    hidden, weight, labels = torch.randn(T, D), torch.randn(V // 2, D), torch.randint(V, (T,))
    with measure() as costs:
        by_steps(hidden, weight, labels, torch.rand(T), call)
    assert costs.flops == 6 * T * V * D // 2
    assert sum(costs.collectives.values()) == 2  # the statistics, and what stands here for the sum on one stage

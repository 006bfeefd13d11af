"""The head under what autograd offers: autocast, hooks on saved tensors, recomputation, gradients of some inputs."""

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_ext import linear_cross_entropy, reference, vocab_parallel_cross_entropy
from megatron_ext.head import gather_log_probs, linear_gather_log_probs
from tests.head.problems import Problem, error, loss_and_grads
from tests.ranks import ranks

CACHES = [0, 0.5, 1]


@pytest.mark.parametrize("cache", CACHES)
def test_autocast(cache):
    """The head computes in autocast's dtype and returns gradients in the parameters' own, as a linear layer does."""
    problem = Problem(dtype=torch.float32, options={"bias": True})
    hidden, weight, bias = problem.mine(None)
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, problem.labels, bias=bias, cache=cache)
        inside = torch.autograd.grad(loss, (hidden, weight, bias), problem.grad, retain_graph=True)
        mixed = linear_cross_entropy(hidden.bfloat16(), weight, problem.labels, bias=bias, cache=cache)
    outside = torch.autograd.grad(loss, (hidden, weight, bias), problem.grad)
    assert torch.equal(loss, mixed)
    low = Problem(dtype=torch.bfloat16, options={"bias": True})
    want, want_grads = loss_and_grads(low, cache)
    torch.testing.assert_close(loss, want, rtol=1e-2, atol=1e-2)
    for a, b, c in zip(inside, outside, want_grads, strict=True):
        assert a.dtype == b.dtype == torch.float32
        assert torch.equal(a, b)
        assert error(a, c) < 1e-2


def test_logits_under_autocast():
    """Their dtype is what the caller chose: autocast changes nothing."""
    logits, labels = torch.randn(6, 11, requires_grad=True), torch.arange(6)
    want = vocab_parallel_cross_entropy(logits, labels, label_smoothing=0.1, softcap=2.0)
    with torch.autocast("cpu", torch.bfloat16):
        got = vocab_parallel_cross_entropy(logits, labels, label_smoothing=0.1, softcap=2.0)
        (grad,) = torch.autograd.grad(got.sum(), logits)
    assert torch.equal(got, want)
    assert torch.equal(grad, torch.autograd.grad(want.sum(), logits)[0])


@pytest.mark.parametrize("how", ["recomputed", "recomputed by reentrance", "offloaded"])
def test_hooks_on_saved_tensors(how):
    """Hooks hand out each saved tensor once, and another object than was saved."""
    problem = Problem(options={"bias": True})
    hidden, weight, bias = problem.mine(None)
    ids = torch.arange(3).expand(*problem.shape, 3)

    def calls(hidden, weight, bias):
        logits = reference.logits(hidden, weight, bias)
        for cache in CACHES:
            yield linear_cross_entropy(hidden, weight, problem.labels, bias=bias, cache=cache, label_smoothing=0.1)
        yield vocab_parallel_cross_entropy(logits, problem.labels, gradient_into_logits=True)
        yield linear_gather_log_probs(hidden, weight, ids).sum(-1)
        yield gather_log_probs(reference.logits(hidden, weight), ids).sum(-1)

    leaves = hidden, weight, bias
    for i, plain in enumerate(calls(*leaves)):
        if how == "offloaded":
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x.clone()):
                found = [*calls(*leaves)][i]
        else:
            found = checkpoint(lambda *x, i=i: [*calls(*x)][i], *leaves, use_reentrant=how != "recomputed")
        got, want = (
            torch.autograd.grad(x, leaves, problem.grad.double(), allow_unused=True, materialize_grads=True)
            if how != "recomputed by reentrance"
            else _accumulated(x, leaves, problem.grad.double())
            for x in (found, plain)
        )
        torch.testing.assert_close([found, *got], [plain, *want])


def _accumulated(x, leaves, upstream):
    """Their gradients by `backward`, the only way that reentrant recomputation knows."""
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    x.backward(upstream)
    return [leaf.grad.clone() for leaf in leaves]


def test_no_grad_and_inference_mode():
    problem = Problem()
    hidden, weight, _ = problem.mine(None)
    want = problem.truth("loss")[0][0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            loss = linear_cross_entropy(hidden, weight, problem.labels)
        assert not loss.requires_grad
        torch.testing.assert_close(loss, want)


@ranks(1, 2)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
@pytest.mark.parametrize("cache", [*CACHES, 1024.0])
@pytest.mark.parametrize("wanted", ["hidden", "weight", "bias"])
def test_one_gradient_alone(wanted, cache, layout):
    group, problem = dist.group.WORLD, Problem(options={"bias": True, "label_smoothing": 0.1})
    leaves = dict(zip(("hidden", "weight", "bias"), problem.mine(group, layout), strict=True))
    for name, x in leaves.items():
        x.requires_grad_(name == wanted)
    of = {"tp_group": group, "hidden_layout": layout, "vocab": problem.shard(group), "label_smoothing": 0.1}
    loss = linear_cross_entropy(**leaves, labels=problem.labels, cache=cache, chunk_tokens=6, **of)
    loss.backward(problem.grad)
    want = dict(zip(leaves, problem.pieces(problem.truth("loss")[1], group, layout), strict=True))
    torch.testing.assert_close(leaves[wanted].grad, want[wanted])
    assert all(x.grad is None for name, x in leaves.items() if name != wanted)


def test_tied_weight():
    problem = Problem()
    ids = torch.arange(20).view(4, 5)
    for f in (linear_cross_entropy, lambda x, w, y: reference.cross_entropy(reference.logits(x, w), y)):
        weight = problem.weight.clone().requires_grad_()
        f(weight[ids], weight, problem.labels).backward(problem.grad.double())
        grads = weight.grad if f is linear_cross_entropy else (grads, weight.grad)  # noqa: F821
    torch.testing.assert_close(*grads)

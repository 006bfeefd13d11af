import pytest
import torch
import torch.distributed as dist

from megatron_ext import reference, token_entropy, token_log_probs, vocab_parallel_cross_entropy
from megatron_ext.distributed.counting import count_collectives
from megatron_ext.distributed.groups import group_size
from tests.head.problems import OPTIONS, Problem, error
from tests.marks import quick_if
from tests.ranks import ranks


def logits_of(problem, group, dtype=torch.float64):
    """The problem's whole logits, and this rank's columns as a leaf."""
    z = reference.logits(problem.hidden, problem.weight, problem.bias).to(dtype)
    problem.bias = None
    shard = problem.shard(group)
    return z, z[..., shard.start : shard.stop].clone().requires_grad_(), shard


@ranks(1, 2, 4)
@pytest.mark.parametrize("options", quick_if({"plain", "softcap", "all"}.__contains__, OPTIONS))
def test_values_and_gradients(options):
    group = dist.group.WORLD
    problem = Problem(options=OPTIONS[options])
    whole, mine, shard = logits_of(problem, group)
    whole.requires_grad_()
    loss, log_probs, entropy, hits = problem.from_logits(whole)
    chosen = {"vocab": shard, "tp_group": group}
    more = {k: v for k, v in problem.arguments.items() if k in ("softcap", "temperature")}
    ignore = {"ignore_index": problem.ignore_index}

    def grad(value, of, upstream):
        return torch.autograd.grad(value, of, upstream.double(), retain_graph=True)[0]

    def same(got, want, upstream):
        torch.testing.assert_close(got, want)
        want_grad = grad(want, whole, upstream)[..., shard.start : shard.stop]
        torch.testing.assert_close(grad(got, mine, upstream), want_grad)

    for chunk_tokens in (None, 3):
        chosen["chunk_tokens"] = chunk_tokens
        with count_collectives() as counts:
            got = vocab_parallel_cross_entropy(mine, problem.labels, **chosen, **problem.arguments)
        assert counts.total() == (group_size(group) > 1)
        same(got, loss, problem.grad)
        got = token_log_probs(mine, problem.labels, return_entropy=True, return_hits=True, **chosen, **more, **ignore)
        same(got[0], log_probs, problem.grad)
        same(got[1], entropy, problem.grad_entropy)
        assert torch.equal(got[2], hits)
        everywhere = reference.entropy(problem.bent(whole), problem.size)
        same(token_entropy(mine, **chosen, **more), everywhere, problem.grad_entropy)


@ranks(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gradient_has_the_logits_dtype_and_full_precision(dtype):
    """The loss of 16-bit logits is computed in fp32, and that of fp64 logits in fp64."""
    group, problem = dist.group.WORLD, Problem(columns=301, options={"label_smoothing": 0.1})
    whole, mine, shard = logits_of(problem, group, dtype)
    truth = whole.double().requires_grad_()
    want = problem.from_logits(truth)[0]
    (want_grad,) = torch.autograd.grad(want, truth, problem.grad.double())
    loss = vocab_parallel_cross_entropy(mine, problem.labels, group, shard, label_smoothing=0.1)
    (grad,) = torch.autograd.grad(loss, mine, problem.grad)
    assert grad.dtype == dtype
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert error(loss, want) < 4 * torch.finfo(loss.dtype).eps
    assert error(grad, want_grad[..., shard.start : shard.stop]) < torch.finfo(dtype).eps


@ranks(1, 2)
@pytest.mark.parametrize("gap", [200.0, 2e4, torch.inf])
def test_label_smoothing_with_far_and_masked_columns(gap):
    """A column 200 below the others is no infinite loss, and one at -inf does not count."""
    group = dist.group.WORLD
    problem = Problem(dtype=torch.float32, options={"label_smoothing": 0.1})
    problem.labels.clamp_(max=0)
    whole, _, shard = logits_of(problem, group, torch.float32)
    whole[..., 1:9] -= gap
    truth = whole.double().requires_grad_()
    want = problem.from_logits(truth)[0]
    (want_grad,) = torch.autograd.grad(want, truth, problem.grad.double())
    mine = whole[..., shard.start : shard.stop].clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(mine, problem.labels, group, shard, label_smoothing=0.1)
    loss.backward(problem.grad)
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(mine.grad.double(), want_grad[..., shard.start : shard.stop], rtol=1e-5, atol=1e-7)


def test_gradient_into_logits():
    """The gradient takes the logits' memory; backward runs once, and who needs the logits later gets an error."""
    problem = Problem(dtype=torch.float32)
    _, leaf, _ = logits_of(problem, None, torch.float32)
    want = torch.autograd.grad(vocab_parallel_cross_entropy(leaf, problem.labels), leaf, problem.grad)[0]
    held = leaf + 0
    loss = vocab_parallel_cross_entropy(held, problem.labels, gradient_into_logits=True)
    (grad,) = torch.autograd.grad(loss, held, problem.grad, retain_graph=True)
    assert torch.equal(grad, want)
    assert grad.data_ptr() == held.data_ptr()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, held, problem.grad)
    held = leaf + 0
    square = held.square().sum()  # made before, so its backward comes after
    loss = square + vocab_parallel_cross_entropy(held, problem.labels, gradient_into_logits=True).sum()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@ranks(2)
def test_two_groups_of_a_world():
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    problem = Problem(seed=dist.get_rank())  # another one on each rank
    whole, mine, _ = logits_of(problem, None)
    torch.testing.assert_close(vocab_parallel_cross_entropy(mine, problem.labels, alone), problem.from_logits(whole)[0])

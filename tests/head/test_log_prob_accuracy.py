"""Log-probabilities, divergences and their gradients err no more than torch's log_softmax in the same dtype."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext import reference, token_log_probs
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank, group_size
from megatron_ext.head import gather_log_probs, kl_divergence
from tests.ranks import ranks

T, V, K = 1024, 1024, 6


def mean_and_max(found, truth, group):
    """Of the errors of all ranks' pieces."""
    away = (found.double() - truth).abs()
    mean = collectives.all_reduce(away.mean(), group) / group_size(group)
    return mean.item(), collectives.all_reduce(away.amax(), group, "max").item()


def run(call, z, grad):
    z = z.clone().requires_grad_()
    values = call(z)
    return values.detach(), torch.autograd.grad(values, z, grad.to(values.dtype))[0]


def own_columns(group):
    width = V // group_size(group)
    return slice(group_rank(group) * width, (group_rank(group) + 1) * width)


def check(name, ours, plain, z, grad, group, largest=1.0):
    """`ours` of this rank's columns errs no more than `plain` of the whole in the dtype of `z`, values and gradient."""
    own = own_columns(group)
    truth, by_torch, found = run(plain, z.double(), grad), run(plain, z, grad), run(ours, z[:, own], grad)
    assert (found[0].dtype, found[1].dtype) == (torch.float32, z.dtype)
    for part, mine, right, theirs in zip(
        ("values", "gradient"), found, (truth[0], truth[1][:, own]), (by_torch[0], by_torch[1][:, own]), strict=True
    ):
        errors, allowed = mean_and_max(mine, right, group), mean_and_max(theirs, right, group)
        limits = allowed[0], largest * allowed[1]
        for which, error, limit in zip(("mean", "largest"), errors, limits, strict=True):
            assert error <= limit, f"{name}, {which} error of {part}: {error / limit:.4f} x"


def several(z, ids):
    """`[T, K]` log-probabilities, and the entropy as one more."""
    log_probs = z.log_softmax(1)
    entropy = -(log_probs.exp() * log_probs).sum(1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), entropy], 1)


def our_several(z, ids, group):
    log_probs, entropy = gather_log_probs(z, ids, group, return_entropy=True)
    return torch.cat([log_probs, entropy.unsqueeze(1)], 1)


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale, shift", [(0.1, 0), (1, 0), (2, 0), (8, 0), (1, 1000)])
def test_log_probs_of_many_tokens(scale, shift, dtype):
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    z = (scale * torch.randn(T, V, generator=generator) + shift).to(dtype)
    grad = torch.randn(T, K + 3, generator=generator)
    some = torch.randint(V, (T, K), generator=generator)
    for kind, y in (("any", torch.randint(V, (T,), generator=generator)), ("likeliest", z.argmax(1))):
        y_T1 = y.unsqueeze(1)
        ids = torch.cat([y_T1, some, y_T1], 1)  # the label is asked for twice

        def plain(z, y=y):
            return reference.log_probs(z, y)

        check(f"{kind} label", lambda z, y=y: token_log_probs(z, y, group), plain, z, grad[:, 0], group)
        gathered = lambda z, y=y_T1: gather_log_probs(z, y, group).squeeze(1)  # noqa: E731
        check(f"{kind} label, gathered", gathered, plain, z, grad[:, 0], group)
        ours, theirs = (lambda z, y=ids: our_several(z, y, group)), (lambda z, y=ids: several(z, y))
        check(f"{kind} label and others", ours, theirs, z, grad, group)


@ranks(1, 2)
@pytest.mark.parametrize("scale, shift", [(0.1, 0), (1, 0), (2, 0), (8, 0), (1, 1000)])
def test_divergences_of_many_tokens(scale, shift):
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    z = scale * torch.randn(T, V, generator=generator) + shift
    teacher = z + torch.randn(T, V, generator=generator)
    grad = torch.randn(T, generator=generator)
    own, largest = own_columns(group), 1.5  # which error is the largest is chance: up to 1.47 was seen of 256 tokens

    def divergence(z, direction):
        student, right = z.log_softmax(1), teacher.to(z.dtype).log_softmax(1)
        left, other = (right, student) if direction == "forward" else (student, right)
        return (left.exp() * (left - other)).sum(1)

    for direction in ("forward", "reverse"):
        ours = lambda z, d=direction: kl_divergence(z, teacher[:, own], d, group)  # noqa: E731
        check(direction, ours, lambda z, d=direction: divergence(z, d), z, grad, group, largest)

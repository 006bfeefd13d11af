"""Log-probabilities and their gradients err no more than torch's log_softmax of the same logits in the same dtype."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext import reference, token_log_probs
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank, group_size
from megatron_ext.head import gather_log_probs
from tests.ranks import ranks

T, V, K = 1024, 1024, 6


def mean_and_max(found, truth, group):
    """Of the errors of all ranks' pieces."""
    away = (found.double() - truth).abs()
    mean = collectives.all_reduce(away.mean(), group) / group_size(group)
    return mean.item(), collectives.all_reduce(away.amax(), group, "max").item()


def run(call, z, labels, grad):
    z = z.clone().requires_grad_()
    values = call(z, labels)
    return values.detach(), torch.autograd.grad(values, z, grad.to(values.dtype))[0]


def several(z, ids):
    """`[T, K]` log-probabilities, and the entropy as one more."""
    log_probs = z.log_softmax(1)
    entropy = -(log_probs.exp() * log_probs).sum(1, keepdim=True)
    return torch.cat([log_probs.gather(1, ids), entropy], 1)


def ours(z, ids, group):
    log_probs, entropy = gather_log_probs(z, ids, group, return_entropy=True)
    return torch.cat([log_probs, entropy.unsqueeze(1)], 1)


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale, shift", [(0.1, 0), (1, 0), (2, 0), (8, 0), (1, 1000)])
def test_mean_and_largest_error_over_many_tokens(scale, shift, dtype):
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    z = (scale * torch.randn(T, V, generator=generator) + shift).to(dtype)
    grad = torch.randn(T, K + 3, generator=generator)
    some = torch.randint(V, (T, K), generator=generator)
    width = V // group_size(group)
    own = slice(group_rank(group) * width, (group_rank(group) + 1) * width)
    for kind, labels in (("any", torch.randint(V, (T,), generator=generator)), ("likeliest", z.argmax(1))):
        ids = torch.cat([labels.unsqueeze(1), some, labels.unsqueeze(1)], 1)  # the label is asked for twice
        for name, call, plain, asked, upstream in (
            ("log-probs", lambda z, y: token_log_probs(z, y, group), reference.log_probs, labels, grad[:, 0]),
            (
                "gathered",
                lambda z, y: gather_log_probs(z, y.unsqueeze(1), group).squeeze(1),
                reference.log_probs,
                labels,
                grad[:, 0],
            ),
            ("several", lambda z, y: ours(z, y, group), several, ids, grad),
        ):
            truth, by_torch = (run(plain, x, asked, upstream) for x in (z.double(), z))
            found = run(call, z[:, own], asked, upstream)
            assert (found[0].dtype, found[1].dtype) == (torch.float32, dtype)
            for part, mine, right, theirs in zip(
                ("values", "gradient"),
                found,
                (truth[0], truth[1][:, own]),
                (by_torch[0], by_torch[1][:, own]),
                strict=True,
            ):
                errors, allowed = mean_and_max(mine, right, group), mean_and_max(theirs, right, group)
                for which, error, limit in zip(("mean", "largest"), errors, allowed, strict=True):
                    assert error <= limit, f"{name}, {kind} label, {which} error of {part}: {error / limit:.4f} x"

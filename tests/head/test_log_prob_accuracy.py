"""Log-probabilities and their gradients err no more than torch's log_softmax of the same logits in the same dtype."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext import reference, token_log_probs
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank, group_size
from megatron_ext.head import gather_log_probs
from tests.ranks import ranks

T, V = 1024, 1024


def mean_and_max(found, truth, group):
    """Of the errors of all ranks' pieces."""
    away = (found.double() - truth).abs()
    mean = collectives.all_reduce(away.mean(), group) / group_size(group)
    return mean.item(), collectives.all_reduce(away.amax(), group, "max").item()


def run(call, z, labels, grad):
    z = z.clone().requires_grad_()
    values = call(z, labels)
    return values.detach(), torch.autograd.grad(values, z, grad.to(values.dtype))[0]


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale, shift", [(0.1, 0), (1, 0), (2, 0), (8, 0), (1, 1000)])
def test_mean_and_largest_error_over_many_tokens(scale, shift, dtype):
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    z = (scale * torch.randn(T, V, generator=generator) + shift).to(dtype)
    grad = torch.randn(T, generator=generator)
    width = V // group_size(group)
    own = slice(group_rank(group) * width, (group_rank(group) + 1) * width)
    for kind, labels in (("any", torch.randint(V, (T,), generator=generator)), ("likeliest", z.argmax(1))):
        truth = run(reference.log_probs, z.double(), labels, grad)
        plain = run(reference.log_probs, z, labels, grad)
        for name, call, parts in (
            ("log-probs", lambda z, y: token_log_probs(z, y, group), ("values", "gradient")),
            ("gathered", lambda z, y: gather_log_probs(z, y.unsqueeze(1), group).squeeze(1), ("values",)),
        ):
            found = run(call, z[:, own], labels, grad)
            assert (found[0].dtype, found[1].dtype) == (torch.float32, dtype)
            for part, mine, right, theirs in zip(
                parts,
                (found[0], found[1]),
                (truth[0], truth[1][:, own]),
                (plain[0], plain[1][:, own]),
                strict=False,
            ):
                errors, allowed = mean_and_max(mine, right, group), mean_and_max(theirs, right, group)
                for which, error, limit in zip(("mean", "largest"), errors, allowed, strict=True):
                    assert error <= limit, f"{name}, {kind} label, {which} error of {part}: {error / limit:.4f} x"

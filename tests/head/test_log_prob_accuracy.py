"""Log-probabilities, divergences and their gradients err no more than torch's log_softmax in the same dtype."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext import reference, token_log_probs
from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank, group_size
from megatron_ext.head import gather_log_probs, kl_divergence, sampled_log_probs
from tests.marks import slow
from tests.ranks import ranks

T, V, K = 1024, 1024, 6
SIZES = pytest.mark.parametrize("scale, shift", [*slow((0.1, 0), (1, 0), (2, 0), (8, 0)), (1, 1000)])


def mean_and_max(found, truth, group):
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
@SIZES
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


@pytest.mark.slow
@ranks(1, 2)
@pytest.mark.parametrize("ahead", [0, 8, 10])
def test_an_id_asked_for_many_times(ahead):
    """Sums of many gradients that then cancel, where the model is sure of the id."""
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    z, grad = (torch.randn(T, columns, generator=generator) for columns in (V, 256))
    ids = torch.randint(V, (T, 1), generator=generator)
    ids = ids.expand_as(grad)
    z.scatter_add_(1, ids[:, :1], torch.full((T, 1), float(ahead)))
    check(
        f"{ahead}", lambda z: gather_log_probs(z, ids, group), lambda z: z.log_softmax(1).gather(1, ids), z, grad, group
    )


def filtered(z, top_k, top_p, temperature):
    """bool: what the filter keeps; and of each row whether rounding could not have changed it: no sum is near p."""
    falling = (z.double() / temperature).sort(dim=1, descending=True).values
    inside = falling >= falling[:, (top_k or V) - 1, None]
    mass = falling.masked_fill(~inside, -torch.inf).softmax(1).cumsum(1)
    inside = inside & ((mass - mass.diff(dim=1, prepend=mass.new_zeros(len(z), 1)) < top_p) | (top_p == 1))
    last = falling.masked_fill(~inside, torch.inf).amin(1, keepdim=True)
    return z.double() / temperature >= last, ((mass - top_p).abs() > 1e-5).all(1) | (top_p == 1)


@pytest.mark.slow
@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale, shift", [(0.1, 0), (2, 0), (8, 0), (1, 1000)])
def test_sampling_filters_over_many_tokens(scale, shift, dtype):
    """Against torch's log_softmax of what is kept. At 1000 a temperature's rounding is all the error of either."""
    group = dist.group.WORLD
    generator = torch.Generator().manual_seed(0)
    drawn = (scale * torch.randn(T // 2, V, generator=generator) + shift).to(dtype)
    temperatures = (1.0,) if shift else (1.0, 0.7)
    for top_k, top_p in ((None, 0.9), (50, 0.9), (50, 1.0), (None, 1.0)):
        for temperature in temperatures:
            kept, clear = filtered(drawn, top_k, top_p, temperature)
            assert clear.sum() > 0.9 * len(clear)
            z, kept = drawn[clear], kept[clear]
            labels = torch.multinomial(kept.double(), 1, generator=generator).squeeze(1)
            labels[::2] = z[::2].argmax(1)
            chosen = top_k, top_p, temperature

            def plain(z, kept=kept, labels=labels, temperature=temperature):
                return reference.log_probs((z / temperature).masked_fill(~kept, -torch.inf), labels)

            ours = lambda z, labels=labels, chosen=chosen: sampled_log_probs(z, labels, *chosen, group)  # noqa: E731
            check(f"{chosen}", ours, plain, z, torch.randn(len(z), generator=generator), group)


@pytest.mark.slow
@ranks(1, 2)
@SIZES
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

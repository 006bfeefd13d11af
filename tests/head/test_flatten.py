"""Logits that are views: read where they lie, of any strides, with the values and gradients of a copy."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext import VocabShard, head, reference, token_log_probs, vocab_parallel_cross_entropy
from megatron_ext.distributed.groups import UNSHARDED, group_rank, group_size
from megatron_ext.head.engine import stored_logits
from tests.head.problems import Problem
from tests.marks import slow
from tests.ranks import ranks

VIEWS = {
    "all but the last": lambda z: z[:, :-1],
    "all but the first, transposed": lambda z: z[:, 1:].transpose(0, 1),
    "every other": lambda z: z[1:, ::2],
    "transposed": lambda z: z.transpose(0, 1),
    "some columns": lambda z: z[:, 1:, :7],
    "the first": lambda z: z[:, :1],
    "no sequence": lambda z: z[:0, :-1],
    "no position": lambda z: z[:, :0],
    "one sequence": lambda z: z[1],
    "one token": lambda z: z[1, 2],
    "expanded": lambda z: z[:, :3].unsqueeze(1).expand(-1, 2, -1, -1),
    "several cuts": lambda z: z.unflatten(1, (3, 2))[:-1, 1:, :1].transpose(0, 2),
    "columns first": lambda z: z.permute(2, 1, 0),
    "every other column": lambda z: z[..., ::2],
}


def valued(values, ids):
    return (values * (1 + ids)).sum(-1)


CALLS = {
    "loss": (vocab_parallel_cross_entropy, reference.cross_entropy),
    "log-probs": (token_log_probs, reference.log_probs),
    "gathered": (
        lambda z, y, **more: head.gather_log_probs(z, y.unsqueeze(-1), **more).squeeze(-1),
        reference.log_probs,
    ),
    "largest": (
        lambda z, y, **more: valued(*head.vocab_topk(z, 3, **more)),
        lambda z, y: valued(*z.topk(3)),
    ),
    "top-k": (
        lambda z, y, **more: head.sampled_log_probs(z, y, top_k=z.shape[-1] - 1, **more),
        lambda z, y: reference.sampled_log_probs(z, y, z.shape[-1] - 1),
    ),
    "top-p": (
        lambda z, y, **more: head.sampled_log_probs(z, y, top_p=0.9, **more),
        lambda z, y: reference.sampled_log_probs(z, y, None, 0.9),
    ),
    "divergence": (
        lambda z, y, **more: head.kl_divergence(z, (z / 2).detach(), **more),
        lambda z, y: reference.kl_divergence((z / 2).detach(), z),
    ),
    "divergence from a view": (
        lambda z, y, **more: head.kl_divergence(z / 2, z.detach(), **more),
        lambda z, y: reference.kl_divergence(z.detach(), z / 2),
    ),
}


def pulled(call, make, labels, grad):
    base = torch.randn(4, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    values = call(make(base), labels)
    kept = values.where(values > -torch.inf, 0.0)
    return values.detach(), torch.autograd.grad(kept, base, grad)[0]


@pytest.mark.parametrize(
    "few",
    [40, *slow(0, 1 << 20)],
    ids=["some together", "run by run", "all together"],
)
@pytest.mark.parametrize("view", VIEWS)
def test_values_and_gradients(view, few, monkeypatch):
    monkeypatch.setattr(stored_logits, "_FEW", few)
    make = VIEWS[view]
    z = make(torch.empty(4, 6, 12))
    labels, grad = torch.randint(z.shape[-1], z.shape[:-1]), torch.randn(z.shape[:-1], dtype=torch.float64)
    for name, (ours, truth) in CALLS.items():
        want = pulled(truth, make, labels, grad)
        for chunk_tokens in (None, 1, 3, 5):
            found = pulled(lambda z, y, c=chunk_tokens, f=ours: f(z, y, chunk_tokens=c), make, labels, grad)
            torch.testing.assert_close(found, want, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("few", [0, 1 << 20])
@pytest.mark.parametrize("view", VIEWS)
def test_the_gradient_in_the_memory_of_a_view(view, few, monkeypatch):
    """But where several rows share it, which is then left alone."""
    monkeypatch.setattr(stored_logits, "_FEW", few)
    base = torch.randn(4, 6, 12, dtype=torch.float64)
    z = VIEWS[view](base.clone().requires_grad_() * 1)
    labels, grad = torch.randint(z.shape[-1], z.shape[:-1]), torch.randn(z.shape[:-1], dtype=torch.float64)
    copy = z.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(reference.cross_entropy(copy, labels), copy, grad)
    loss = vocab_parallel_cross_entropy(z, labels, gradient_into_logits=True, chunk_tokens=3)
    (found,) = torch.autograd.grad(loss, z, grad)
    torch.testing.assert_close(found, want)
    assert torch.equal(z, copy) if view == "expanded" else found.data_ptr() == z.data_ptr()


def test_rows_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(stored_logits, "_FEW", 0)
    for view, make in VIEWS.items():
        z = make(torch.randn(4, 6, 12))
        rows = stored_logits.Flat(z).rows(z)
        memory = z.untyped_storage().data_ptr()
        for at in stored_logits.in_runs(
            rows, [slice(0, 5), slice(5, rows.shape[:-1].numel())] if z.numel() > 60 else []
        ):
            assert stored_logits.rows_of(rows, at).untyped_storage().data_ptr() == memory, view
            assert at.stop > at.start


def laid_out(z, order):
    return z.permute(order).contiguous().permute(sorted(range(z.dim()), key=order.__getitem__)) * 1


def log_probs_entropy_and_hits(z, y, t, **more):
    return torch.stack(token_log_probs(z, y, return_entropy=True, return_hits=True, **more))


READ_OUTS = {
    "loss": lambda z, y, t, **more: vocab_parallel_cross_entropy(z, y.where(y % 2 > 0, -100), **more),
    "log-probs": log_probs_entropy_and_hits,
    "softmax": lambda z, y, t, **more: head.vocab_parallel_log_softmax(z, **more),
    "gathered": lambda z, y, t, **more: head.gather_log_probs(z, y.unsqueeze(-1), **more),
    "largest": lambda z, y, t, **more: head.vocab_topk(z, 3, **more)[0],
    "top-k": lambda z, y, t, **more: head.sampled_log_probs(z, y, top_k=30, top_p=0.99, **more),
    "top-p": lambda z, y, t, **more: head.sampled_log_probs(z, y, top_p=0.99, **more),
    "top-p in chunks": lambda z, y, t, **more: head.sampled_log_probs(z, y, top_p=0.99, chunk_tokens=5, **more),
    "divergence": lambda z, y, t, **more: head.kl_divergence(z, t, **more),
    "Jensen-Shannon": lambda z, y, t, **more: head.js_divergence(z, t, **more),
}


@ranks(2, 4)
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("name", READ_OUTS)
def test_read_outs_of_ranks_with_different_orders(name, empty):
    """The exchange has the tokens' own order. An empty shard has no order: torch chooses its strides freely."""
    group, problem = dist.group.WORLD, Problem((3, 2, 4), columns=36)
    size, rank = group_size(group), group_rank(group)
    whole = reference.logits(problem.hidden, problem.weight).requires_grad_()
    teacher = whole.detach().roll(1, -1) / 2
    labels = whole.argmax(-1)
    want = READ_OUTS[name](whole, labels, teacher, tp_group=UNSHARDED)
    grad = torch.randn(want.shape, dtype=want.dtype)
    (want_grad,) = torch.autograd.grad(want, whole, grad)

    width = 36 // (size - empty)  # of an empty shard, the last one
    at = slice(min(width * rank, 36), min(width * (rank + 1), 36))
    shard, order = VocabShard(at.start, at.stop, 36), [(0, 1, 2, 3), (1, 2, 0, 3), (2, 1, 0, 3), (1, 0, 2, 3)][rank]
    leaf = laid_out(whole.detach()[..., at], order).requires_grad_()
    got = READ_OUTS[name](leaf, labels, laid_out(teacher[..., at], order), tp_group=group, vocab=shard)
    want, grad = (x[..., at] if name == "softmax" else x for x in (want.detach(), grad))
    (got_grad,) = torch.autograd.grad(got, leaf, grad)
    torch.testing.assert_close([got, got_grad], [want, want_grad[..., at]])

"""Logits that are views: read where they lie, of any strides, with the values and gradients of a copy."""

import pytest
import torch

from megatron_ext import reference, token_log_probs
from megatron_ext.head import flat, gather_log_probs, kl_divergence, sampled_log_probs

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
}
CALLS = {
    "log-probs": (token_log_probs, reference.log_probs),
    "gathered": (
        lambda z, y, **more: gather_log_probs(z, y.unsqueeze(-1), **more).squeeze(-1),
        reference.log_probs,
    ),
    "top-k": (
        lambda z, y, **more: sampled_log_probs(z, y, top_k=z.shape[-1] - 1, **more),
        lambda z, y: reference.sampled_log_probs(z, y, z.shape[-1] - 1),
    ),
    "top-p": (
        lambda z, y, **more: sampled_log_probs(z, y, top_p=0.9, **more),
        lambda z, y: reference.sampled_log_probs(z, y, None, 0.9),
    ),
    "divergence": (
        lambda z, y, **more: kl_divergence(z, (z / 2).detach(), **more),
        lambda z, y: reference.kl_divergence((z / 2).detach(), z),
    ),
    "divergence from a view": (
        lambda z, y, **more: kl_divergence(z / 2, z.detach(), **more),
        lambda z, y: reference.kl_divergence(z.detach(), z / 2),
    ),
}


def pulled(call, make, labels, grad):
    base = torch.randn(4, 6, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    values = call(make(base), labels)
    kept = values.where(values > -torch.inf, 0.0)
    return values.detach(), torch.autograd.grad(kept, base, grad)[0]


@pytest.mark.parametrize("few", [0, 40, 1 << 20], ids=["run by run", "some together", "all together"])
@pytest.mark.parametrize("view", VIEWS)
def test_values_and_gradients(view, few, monkeypatch):
    monkeypatch.setattr(flat, "_FEW", few)
    make = VIEWS[view]
    z = make(torch.empty(4, 6, 12))
    labels, grad = torch.randint(z.shape[-1], z.shape[:-1]), torch.randn(z.shape[:-1], dtype=torch.float64)
    for name, (ours, truth) in CALLS.items():
        want = pulled(truth, make, labels, grad)
        for chunk_tokens in (None, 1, 3, 5):
            found = pulled(lambda z, y, c=chunk_tokens, f=ours: f(z, y, chunk_tokens=c), make, labels, grad)
            for a, b in zip(found, want, strict=True):
                torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("few", [0, 1 << 20])
@pytest.mark.parametrize("view", [v for v in VIEWS if v != "expanded"])
def test_the_gradient_in_the_memory_of_a_view(view, few, monkeypatch):
    monkeypatch.setattr(flat, "_FEW", few)
    base = torch.randn(4, 6, 12, dtype=torch.float64)
    z = VIEWS[view](base.clone().requires_grad_() * 1)
    labels, grad = torch.randint(z.shape[-1], z.shape[:-1]), torch.randn(z.shape[:-1], dtype=torch.float64)
    copy = z.detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(reference.log_probs(copy, labels), copy, grad)
    (found,) = torch.autograd.grad(token_log_probs(z, labels, gradient_into_logits=True, chunk_tokens=3), z, grad)
    torch.testing.assert_close(found, want)
    assert found.data_ptr() == z.data_ptr()


def test_rows_stay_where_they_are(monkeypatch):
    monkeypatch.setattr(flat, "_FEW", 0)
    for view, make in VIEWS.items():
        z = make(torch.randn(4, 6, 12))
        rows = flat.Flat(z).rows(z)
        memory = z.untyped_storage().data_ptr()
        for at in flat.in_runs(rows, [slice(0, 5), slice(5, flat.tokens_of(rows))] if z.numel() > 60 else []):
            assert flat.rows_of(rows, at).untyped_storage().data_ptr() == memory, view
            assert at.stop > at.start

"""A call with nothing in it on one side: no token that counts in 16 bits, or a rank whose vocabulary shard is empty."""

from functools import partial

import pytest
import torch
import torch.distributed as dist

from megatron_ext import VocabShard, head, linear_cross_entropy
from tests.head.functions import OF_HIDDEN, OF_LOGITS
from tests.ranks import ranks

T, D, V = 5, 4, 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("skip_ignored", [False, True])
@pytest.mark.parametrize("tokens", [0, T])
def test_no_token_counts(dtype, fused, skip_ignored, tokens):
    """dW is 0, and `main_grad` stays as it was: not whatever the memory held before."""
    hidden = torch.randn(tokens, D).to(dtype).requires_grad_()
    weight = torch.randn(V, D).to(dtype).requires_grad_()
    weight.main_grad, weight.grad_added_to_main_grad = torch.arange(float(V * D)).view(V, D), False
    weight.zero_out_wgrad = True
    before = weight.main_grad.clone()
    labels = torch.full((tokens,), -100)
    for cache in (0, 0.5, 1):
        for chosen in ({}, {"label_smoothing": 0.1, "softcap": 3.0}):
            loss = linear_cross_entropy(
                hidden,
                weight,
                labels,
                cache=cache,
                skip_ignored=skip_ignored,
                gradient_accumulation_fusion=fused,
                **chosen,
            )
            dx, dw = torch.autograd.grad(loss.sum(), (hidden, weight))
            assert not loss.any()
            assert torch.equal(dx, torch.zeros_like(dx))
            assert torch.equal(dw, torch.zeros_like(dw))
            assert torch.equal(weight.main_grad, before)


HIDDEN = OF_HIDDEN | {
    "with entropy": lambda x, w, labels, **of: sum(
        part.sum() for part in head.linear_gather_log_probs(x, w, labels.unsqueeze(1), return_entropy=True, **of)
    ),
    "forward KL": lambda x, w, labels, **of: head.linear_kl_divergence(x, w, x.flip(1), w, **of),
    "reverse KL": lambda x, w, labels, **of: head.linear_kl_divergence(x, w, x.flip(1), w, "reverse", **of),
    "JS": lambda x, w, labels, **of: head.linear_js_divergence(x, w, x.flip(1), w, **of),
}
LOGITS = OF_LOGITS | {
    "forward KL": lambda z, labels, **of: head.kl_divergence(z, z.detach().flip(0), **of),
    "reverse KL": lambda z, labels, **of: head.kl_divergence(z, z.detach().flip(0), "reverse", **of),
    "JS": lambda z, labels, **of: head.js_divergence(z, z.detach().flip(0), **of),
    "softmax": lambda z, labels, **of: head.vocab_parallel_softmax(z, **of).square(),
    "log-softmax": lambda z, labels, **of: head.vocab_parallel_log_softmax(z, **of),
}


def shard():
    """The last rank has no column: of two the first has all, of four they are 3, 3, 2 and 0."""
    width = V if dist.get_world_size() == 2 else 3
    start = min(width * dist.get_rank(), V)
    return VocabShard(start, min(start + width, V), V)


def check_an_empty_shard(call, leaves, dims, more=None, **near):
    """Check values and gradients of `leaves` cut along `dims` on every rank against one rank that has it all.

    `more`: options of the call of several ranks.
    """

    def mine(x, dim):
        if dim == "tokens":
            return x.chunk(dist.get_world_size())[dist.get_rank()]
        return x if dim is None else x.narrow(dim, shard().start, shard().columns)

    found = call(*leaves)
    want = torch.autograd.grad(found.sum(), leaves)
    parts = [mine(x.detach(), dim).clone().requires_grad_() for x, dim in zip(leaves, dims, strict=True)]
    own = call(*parts, tp_group=dist.group.WORLD, vocab=shard(), **(more or {}))
    if dims[-1] == 0 or found.shape == own.shape:  # of logits some results are a rank's columns
        torch.testing.assert_close(own, found)
    grads = torch.autograd.grad(own.sum(), parts)
    torch.testing.assert_close(grads, tuple(map(mine, want, dims)), **near)


@ranks(2, 4)
@pytest.mark.parametrize("name", HIDDEN)
@pytest.mark.parametrize(
    "dtype, layout",
    [*((dtype, "replicated") for dtype in (torch.float64, torch.float32, torch.bfloat16)), (torch.float32, "sequence")],
    ids=str,
)
def test_hidden_states_and_an_empty_shard(name, dtype, layout):
    g, tokens = torch.Generator().manual_seed(0), T * dist.get_world_size()
    leaves = [torch.randn(n, D, generator=g).to(dtype).requires_grad_() for n in (tokens, V)]
    labels = torch.randint(V, (tokens,), generator=g)
    near = 0.02 if dtype == torch.bfloat16 else 1e-5
    dims, more = ("tokens" if layout == "sequence" else None, 0), {"hidden_layout": layout}
    check_an_empty_shard(partial(HIDDEN[name], labels=labels), leaves, dims, more, rtol=near, atol=near)


@ranks(2, 4)
@pytest.mark.parametrize("name", LOGITS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_logits_and_an_empty_shard(name, dtype):
    g = torch.Generator().manual_seed(0)
    leaf, labels = torch.randn(T, V, generator=g).to(dtype).requires_grad_(), torch.randint(V, (T,), generator=g)
    check_an_empty_shard(partial(LOGITS[name], labels=labels), [leaf], (1,))

"""Edge cases of heads: extreme logits, nothing to count, odd memory, a graph used twice."""

import pytest
import torch
import torch.distributed as dist

from megatron_ext import (
    VocabShard,
    head,
    linear_cross_entropy,
    linear_log_probs,
    reference,
    token_log_probs,
    vocab_parallel_cross_entropy,
)
from megatron_ext.distributed.groups import UNSHARDED, group_rank, group_size
from tests.head.problems import OPTIONS, Problem, error, loss_and_grads
from tests.ranks import ranks

CACHES = [0, 0.5, 1]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_hidden_states_so_wide_that_rows_go_in_pieces(smoothing):
    hidden, weight = (torch.randn(rows, 1 << 19, requires_grad=True) for rows in (3, 4))
    labels = torch.tensor([1, -100, 3])
    found = linear_cross_entropy(hidden, weight, labels, label_smoothing=smoothing, temperature=1000.0)
    logits = hidden @ weight.t() / 1000.0
    true = torch.nn.functional.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-5)
    both = [torch.autograd.grad(losses.sum(), (hidden, weight)) for losses in (found, true)]
    for own, wanted in zip(*both, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("cache", [*CACHES, "on logits"])
def test_backward_twice(cache):
    problem = Problem(dtype=torch.bfloat16, options={"bias": True})
    leaves = hidden, weight, bias = problem.mine(None)
    if cache == "on logits":
        leaves = (torch.randn(*problem.shape, problem.columns, requires_grad=True),)
        loss = sum(token_log_probs(*leaves, problem.labels, return_entropy=True))
    else:
        loss = linear_cross_entropy(hidden, weight, problem.labels, bias=bias, cache=cache)
    grads = [torch.autograd.grad(loss, leaves, n * problem.grad, retain_graph=True) for n in (1, 2, 1)]
    for first, double, again in zip(*grads, strict=True):
        assert torch.equal(first, again)
        assert torch.equal(2 * first, double)


@pytest.mark.parametrize("on_logits", [False, True])
def test_double_backward_is_refused(on_logits):
    problem = Problem()
    hidden, weight, _ = problem.mine(None)
    if on_logits:
        hidden = (hidden @ weight.t()).detach().requires_grad_()
    source, hidden = hidden, hidden * 2
    if on_logits:
        loss = token_log_probs(hidden, problem.labels)
    else:
        loss = linear_cross_entropy(hidden, weight, problem.labels)
    (grad,) = torch.autograd.grad(loss.sum(), hidden, create_graph=True)
    with_penalty = loss.sum() + grad.square().sum()
    for asked in (hidden, source):
        with pytest.raises(RuntimeError, match="differentiated twice"):
            torch.autograd.grad(with_penalty, asked, retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        with_penalty.backward()


@pytest.mark.parametrize("cache", CACHES)
def test_arguments_are_not_written(cache):
    problem = Problem(dtype=torch.float32, options={"bias": True})
    hidden, weight, bias = leaves = problem.mine(None)
    mask = torch.ones(problem.shape)
    before = [x.detach().clone() for x in (*leaves, problem.labels, mask, problem.grad)]
    loss = linear_cross_entropy(
        hidden, weight, problem.labels, bias=bias, loss_mask=mask, cache=cache, z_loss=0.1, softcap=3.0
    )
    loss.backward(problem.grad)
    for x, y in zip((*leaves, problem.labels, mask, problem.grad), before, strict=True):
        assert torch.equal(x.detach(), y)


@pytest.mark.parametrize(
    "asked",
    [
        lambda labels, mask: head.Entropy(mask),
        lambda labels, mask: head.SumOfSquares(mask),
        lambda labels, mask: head.LogProbs(labels),
        lambda labels, mask: head.Sampled(labels, top_k=40),
        lambda labels, mask: head.Sampled(labels, top_p=0.999),
    ],
    ids=["entropy", "squares", "log-probs", "top-k", "top-p"],
)
def test_labels_and_masks_may_be_written_before_backward(asked):
    """Labels and masks may lie in a buffer that the next batch is copied to."""
    hidden, weight, found = torch.randn(12, 8), 0.1 * torch.randn(41, 8), []
    for writes in (False, True):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)]
        labels, mask = torch.arange(12) * 3, torch.arange(12) % 3 > 0
        result = head.LmHead(leaves[1]).read(leaves[0], asked(labels, mask))
        if writes:
            labels.zero_()
            mask.logical_not_()
        found.append(torch.autograd.grad(result.clamp(min=-99).square().sum(), leaves))
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("shape", [(1,), (), (0,), (3, 0), (2, 1, 3, 2)])
@pytest.mark.parametrize("cache", CACHES)
def test_shapes(shape, cache):
    problem = Problem(shape, options={"bias": True})
    if shape in ((1,), ()):
        problem.labels.fill_(5)
    loss, grads = loss_and_grads(problem, cache, chunk_tokens=2)
    (want,), want_grads = problem.truth("loss")
    torch.testing.assert_close([loss, *grads], [want, *want_grads])
    log_probs, entropy, hits = linear_log_probs(
        *problem.mine(None)[:2], problem.labels, return_entropy=True, return_hits=True, cache=cache
    )
    assert log_probs.shape == entropy.shape == hits.shape == shape
    assert hits.dtype == torch.bool


@ranks(1, 2, 4)
@pytest.mark.parametrize("layout", ["replicated", "sequence"])
def test_no_tokens_and_none_that_count(layout):
    group = dist.group.WORLD
    for bits in ("fast", "batch", "tensor_parallel"):
        (loss,), grads = Problem((0, 3), columns=40).ours("loss", group, layout, bits=bits)
        assert loss.shape == (0, 3)
        assert not any(x.any() for x in grads)
    problem = Problem(options={"bias": True})
    problem.labels.fill_(-100)
    for cache in CACHES:
        for skip_ignored in (False, True):
            (loss,), grads = problem.ours("loss", group, layout, cache=cache, skip_ignored=skip_ignored)
            assert not loss.any()
            assert not any(x.any() for x in grads)
    hidden, weight, _ = problem.mine(group, layout)
    mean = linear_cross_entropy(
        hidden, weight, problem.labels, group, layout, vocab=problem.shard(group), reduction="mean"
    )
    assert mean == 0
    logits = torch.randn(*problem.shape, len(weight), requires_grad=True)
    loss = vocab_parallel_cross_entropy(logits, problem.labels, group, problem.shard(group))
    assert not loss.any()
    assert not torch.autograd.grad(loss.sum(), logits)[0].any()


@ranks(1, 2, 4)
@pytest.mark.parametrize("size", [1e3, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_huge_logits_and_far_shards(size, dtype):
    """exp(m - lse) underflows on the shard that owns the label: finite, and right.

    Of fp32 logits that backward makes anew, by a product of another shape, the last bit may differ on some CPUs.
    """
    group = dist.group.WORLD
    problem = Problem(dtype=dtype, logit_size=size)
    for what in ("loss", "log_probs"):
        for cache in CACHES:
            last_bit = size * 2**-21 if cache == 0.5 and dtype == torch.float32 else 0
            for got, truth, plain in problem.beside_plain(what, group, cache=cache):
                more = 0 if got.shape == problem.shape else last_bit
                assert got.isfinite().all()
                assert error(got, truth) <= 1.1 * error(plain, truth) + 1e-6 + more


def test_statistics_stay_exact_at_logits_near_a_thousand():
    """`z_y - lse` in fp32 is off by 6e-5 here, PyTorch's log_softmax by 5e-6."""
    g = torch.Generator().manual_seed(0)
    z = 1000 + torch.randn(64, 5000, generator=g)
    labels = torch.randint(0, 5000, (64,), generator=g)
    log_probs, entropy = token_log_probs(z, labels, return_entropy=True)
    assert (log_probs - reference.log_probs(z.double(), labels)).abs().max() < 5e-6
    assert (entropy - reference.entropy(z.double())).abs().max() < 5e-6


@ranks(1, 2)
def test_columns_and_labels_at_minus_infinity():
    """Masked columns get no probability and no gradient; a masked label is an infinite loss, not a NaN."""
    group = dist.group.WORLD
    problem = Problem(options={"bias": True, "label_smoothing": 0.1})
    problem.labels[problem.labels >= 0] %= 30
    problem.bias[30:] = -torch.inf
    (want,), want_grads = problem.truth("loss")
    pieces = problem.pieces(want_grads, group, "replicated")
    for cache in CACHES:
        (loss,), grads = problem.ours("loss", group, cache=cache)
        torch.testing.assert_close([loss, *grads], [want, *pieces])
        results, grads = problem.ours("log_probs", group, cache=cache)
        wants, entropy_grads = problem.truth("log_probs")
        torch.testing.assert_close([*results, *grads], [*wants, *problem.pieces(entropy_grads, group, "replicated")])
    problem.labels[0, 0] = 40
    del problem.arguments["label_smoothing"]
    (loss,), grads = problem.ours("loss", group)
    assert loss[0, 0] == torch.inf
    assert loss.view(-1)[1:].isfinite().all()
    assert all(x.isfinite().all() for x in grads)
    problem.grad[0, 0] = 0  # the entropy has a gradient there, whatever the label's probability
    # Then a shard without any finite logit, and the others' far below 0, where what it is relative to is.
    for label, low, masked in ((40, 0, 30), (0, 1000, 20)):
        problem.labels[problem.labels >= 0] %= 20
        problem.labels[0, 0] = label
        problem.bias = problem.bias.detach().clone()
        problem.bias[:20] -= low
        problem.bias[masked:] = -torch.inf
        wants, want_grads = problem.truth("log_probs")
        results, grads = problem.ours("log_probs", group, cache=1)
        torch.testing.assert_close([*results, *grads], [*wants, *problem.pieces(want_grads, group, "replicated")])


@pytest.mark.parametrize("cache", CACHES)
def test_any_memory(cache):
    problem = Problem((5, 4))
    hidden, weight = problem.hidden, problem.weight
    (want,), _ = problem.truth("loss")
    strided = [
        hidden.transpose(0, 1).contiguous().transpose(0, 1),
        weight.t().contiguous().t(),
        problem.labels.t().contiguous().t(),
    ]
    loss = linear_cross_entropy(*strided, cache=cache, loss_mask=torch.ones(4, 5).t())
    torch.testing.assert_close(loss, want)
    one = hidden[:1, :1].clone().requires_grad_()
    leaf = weight.t().contiguous().t().requires_grad_()
    loss = linear_cross_entropy(one.expand(5, 4, 8), leaf, problem.labels, cache=cache)
    got = torch.autograd.grad(loss, (one, leaf), torch.tensor(0.5).expand(5, 4))
    plain = reference.cross_entropy(reference.logits(one.expand(5, 4, 8), leaf), problem.labels)
    torch.testing.assert_close(got, torch.autograd.grad(plain, (one, leaf), torch.tensor(0.5).double().expand(5, 4)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_reductions_and_loss_mask(dtype):
    """The mask's dtype is not the loss's."""
    problem = Problem(dtype=dtype)
    loss = problem.truth("loss")[0][0].to(dtype)
    kept = problem.labels != -100
    hidden, weight, _ = problem.mine(None)
    mask = torch.rand(problem.shape).round()
    for skip_ignored in (False, True):
        for weights in (None, mask, mask.bool(), mask.long(), mask.half(), mask.double() * 0.25):
            call = {"loss_mask": weights, "skip_ignored": skip_ignored}
            weights = torch.ones(problem.shape) if weights is None else weights.to(dtype)
            masked = linear_cross_entropy(hidden, weight, problem.labels, **call)
            torch.testing.assert_close(masked, loss * weights)
            total = linear_cross_entropy(hidden, weight, problem.labels, reduction="sum", **call)
            torch.testing.assert_close(total, (loss * weights).sum())
            mean = linear_cross_entropy(hidden, weight, problem.labels, reduction="mean", **call)
            torch.testing.assert_close(mean, (loss * weights).sum() / (kept * weights).sum())
            log_probs = linear_log_probs(hidden, weight, problem.labels, **call)
            torch.testing.assert_close(log_probs, (-loss).where(weights > 0, 0.0))
            assert not log_probs.signbit()[weights == 0].any(), "no -0"
            (dx,) = torch.autograd.grad(log_probs.sum(), hidden)
            assert not dx[weights == 0].any()


@ranks(1, 2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strict_deterministic_mode(dtype):
    group, problem = dist.group.WORLD, Problem((16, 8), 32, 300, dtype, options={**OPTIONS["all"], "size": 290})
    logits = torch.randn(*problem.shape, problem.size).to(dtype).requires_grad_()
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            (loss,), grads = problem.ours("loss", group, cache=0.5, chunk_tokens=30)
            (log_probs, entropy, _), more = problem.ours("log_probs", group, skip_ignored=True)
            on_logits = vocab_parallel_cross_entropy(logits, problem.labels, UNSHARDED, **problem.arguments)
            dz = torch.autograd.grad(on_logits, logits, problem.grad)
            runs.append([loss, log_probs, entropy, on_logits, *grads, *more, *dz])
    finally:
        torch.use_deterministic_algorithms(True, warn_only=True)  # as the tests have it
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    first = loss.clone()
    dist.broadcast(first, 0)
    assert torch.equal(loss, first)


def test_rows_of_minus_infinity():
    """A row without any finite logit has no distribution: the others' losses and gradients do not notice."""
    z = torch.randn(4, 9)
    z[1] = -torch.inf
    labels = torch.tensor([0, -100, 2, 3])  # nobody asks for it
    leaf = z.clone().requires_grad_()
    loss = vocab_parallel_cross_entropy(leaf, labels, label_smoothing=0.1)
    (grad,) = torch.autograd.grad(loss.sum(), leaf)
    rest = z[[0, 2, 3]].requires_grad_()
    want = reference.cross_entropy(rest, labels[[0, 2, 3]], label_smoothing=0.1)
    torch.testing.assert_close(loss[[0, 2, 3]], want)
    torch.testing.assert_close(grad[[0, 2, 3]], torch.autograd.grad(want.sum(), rest)[0])
    assert loss[1] == 0
    assert not grad[1].any()
    labels[1] = 1  # somebody asks: it is as improbable as can be, and nothing is NaN
    log_probs, entropy = token_log_probs(leaf, labels, return_entropy=True)
    torch.testing.assert_close(log_probs[[0, 2, 3]], reference.log_probs(rest, labels[[0, 2, 3]]))
    assert (log_probs[1], entropy[1]) == (-torch.inf, 0)


def test_weight_gradient_does_not_depend_on_the_chunks():
    """16-bit weight gradients are rounded once, however many chunks: not a 16-bit running sum."""
    problem = Problem((64, 16), 16, 64, torch.bfloat16)
    truth = problem.truth("loss")[1][1]
    errors = [error(loss_and_grads(problem, 0, chunk_tokens=n)[1][1], truth) for n in (None, 64, 4)]
    assert all(e < 1.05 * min(errors) for e in errors)


@pytest.mark.parametrize("ignored", [False, True])
def test_hits_are_the_callers_to_write(ignored):
    logits, labels = torch.randn(4, 5, requires_grad=True), torch.tensor([1, 0, 2, 4])
    if ignored:
        labels[3] = -100
    log_probs, hits = token_log_probs(logits, labels, return_hits=True)
    hits &= torch.tensor([True, False, True, False])
    log_probs.sum().backward()
    twin = logits.detach().requires_grad_()
    (-torch.nn.functional.cross_entropy(twin, labels, reduction="sum")).backward()
    torch.testing.assert_close(logits.grad, twin.grad)


@ranks(1, 2, 4)
@pytest.mark.parametrize("backwards", [False, True])
def test_shards_in_any_order(backwards):
    """Also where the last rank holds the first columns: among equal logits the lowest id wins, whatever its rank."""
    group, width = dist.group.WORLD, 12
    size, last = group_size(group), group_size(group) - 1
    start = width * (last - group_rank(group) if backwards else group_rank(group))
    shard = VocabShard(start, start + width, width * size)
    z = torch.tensor([[0.0, 2, 1, 2], [0, 0, 0, 0], [1, 0, 0, 3], [0, 2, 1, 2], [0, 2, 1, 2]]).repeat(1, 3 * size)
    z[1:3, -2:] += torch.tensor([[1e-3], [2e-3]])
    labels = torch.tensor([1, 0, shard.size - 1, 3, shard.size - 1])
    leaf = z[:, start : shard.stop].clone().requires_grad_()
    log_probs, hits = token_log_probs(leaf, labels, group, shard, return_hits=True)
    assert hits.tolist() == [True, False, True, False, False]
    torch.testing.assert_close(log_probs, reference.log_probs(z, labels))
    (grad,) = torch.autograd.grad(log_probs.sum(), leaf)
    whole = z.requires_grad_()
    (want,) = torch.autograd.grad(reference.log_probs(whole, labels).sum(), whole)
    torch.testing.assert_close(grad, want[:, start : shard.stop])

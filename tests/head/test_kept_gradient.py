"""A divergence whose gradient forward keeps, for as many tokens as `cache` says: costs, values, tokens without any."""

import pytest
import torch

from benchmarks import by_turns
from benchmarks.meter import measure
from megatron_ext import reference
from megatron_ext.head import KL, AcceptanceRate, JensenShannon, LmHead, LogProbs, LoRA, Teacher, TotalVariation

T, D, V = 24, 8, 40
DIVERGENCES = [
    lambda t: KL(t),
    lambda t: KL(t, "reverse"),
    lambda t: KL(t, "cross entropy"),
    JensenShannon,
    TotalVariation,
    AcceptanceRate,
]


def sides(dtype=torch.float64):
    weight, bias, other = torch.randn(V, D), torch.randn(V), Teacher(LmHead(torch.randn(V, 3)), torch.randn(T, 3))
    other = Teacher(LmHead(other.head.weight.to(dtype)), other.hidden.to(dtype))
    return [x.to(dtype).requires_grad_() for x in (torch.randn(T, D), weight, bias)], other


@pytest.mark.parametrize("cache, products", [(0, 6), (0.5, 5), (1, 4), ("bounded", 6)])
def test_products_of_a_forward_and_backward(cache, products):
    """A gradient kept whole takes two products in forward and two in backward, as logits made at once do. The default
    keeps nothing beside a given `chunk_tokens`."""
    (hidden, weight, _), teacher = sides(torch.float32)
    teacher = Teacher(LmHead(torch.randn(V, D)), torch.randn(T, D))
    with measure() as costs:
        LmHead(weight, cache=cache, chunk_tokens=4).read(hidden, KL(teacher)).sum().backward()
    assert costs.flops == products * 2 * T * D * V
    with measure() as costs:
        LmHead(weight).read(hidden, KL(teacher)).sum().backward()
    assert costs.flops == 4 * 2 * T * D * V


def test_gradient_is_kept_only_for_a_lone_read_out_that_trains():
    (hidden, weight, _), teacher = sides()
    head = LmHead(weight, cache=1)
    with measure() as kept:
        found = head.read(hidden, KL(teacher))
    with torch.no_grad(), measure() as costs:
        torch.testing.assert_close(head.read(hidden, KL(teacher)), found)
    assert costs.peak_bytes < kept.peak_bytes
    both = head.read(hidden, KL(teacher), LogProbs(torch.zeros(T, dtype=torch.int64)))
    torch.testing.assert_close(both[0], found)


@pytest.mark.slow
def test_the_products_and_memory_of_the_measured_divergence():
    """The products are as many, and the peak is below that of three chunks of 2^24 logits, which it was."""
    costs = {}
    for name, step in by_turns.divergence_steps().items():
        with torch.autograd.set_multithreading_enabled(False), measure() as costs[name]:
            step()
    own, at_once = costs["from hidden states"], costs["logits made at once"]
    assert own.flops == at_once.flops
    assert own.peak_bytes < 3 * 2**24 * 4 < at_once.peak_bytes


@pytest.mark.parametrize("kind", range(len(DIVERGENCES)))
@pytest.mark.parametrize(
    "facts", [pytest.param({}, marks=pytest.mark.slow), {"softcap": 3.0, "logit_scale": 0.5, "temperature": 0.7}]
)
def test_gradients_are_those_of_nothing_kept(kind, facts):
    """A token whose upstream gradient is 0 may have a divergence of NaN, and backward may run twice."""
    (hidden, weight, bias), teacher = sides()
    teacher.hidden[7], teacher.hidden[20] = torch.nan, torch.inf
    upstream = torch.randn(T).double()
    upstream[[7, 20]] = 0

    def gradients(cache, leaves):
        head = LmHead(weight, bias=bias, cache=cache, chunk_tokens=5, **facts)
        found = head.read(hidden, DIVERGENCES[kind](teacher))
        first = torch.autograd.grad(found, leaves, upstream, retain_graph=True)
        again = torch.autograd.grad(found, leaves, upstream)
        torch.testing.assert_close(first, again, rtol=0, atol=0)
        return found, *first

    for leaves in ([hidden, weight, bias], [hidden], [weight]):
        want = gradients(0, leaves)
        for cache in (0.6, 1):
            found = gradients(cache, leaves)
            assert all(x.isfinite().all() for x in found[1:])
            torch.testing.assert_close(found, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_16_bits_as_exact_as_with_nothing_kept(dtype):
    (hidden, weight, bias), teacher = sides(dtype)
    leaves, upstream = (hidden, weight, bias), torch.rand(T) + 0.1
    exact = [x.detach().double().requires_grad_() for x in leaves]
    z_TV = exact[0] @ exact[1].t() + exact[2]
    teacher_TV = (teacher.hidden @ teacher.head.weight.t()).double()
    wanted = torch.autograd.grad(reference.kl_divergence(teacher_TV, z_TV), exact, upstream.double())
    errors = {}
    for cache in (0, 1):
        found = LmHead(weight, bias=bias, cache=cache).read(hidden, KL(teacher))
        found = torch.autograd.grad(found, leaves, upstream)
        errors[cache] = [(x - y).norm() / y.norm() for x, y in zip(found, wanted, strict=True)]
    for kept, again in zip(errors[1], errors[0], strict=True):
        assert kept <= 1.3 * again + 1e-4


def test_a_token_without_a_finite_gradient_shows_where_it_counts():
    (hidden, weight, _), teacher = sides()
    with torch.no_grad():
        hidden[3] = torch.nan
    dx, dw = torch.autograd.grad(LmHead(weight).read(hidden, KL(teacher)).sum(), (hidden, weight))
    assert dx[3].isnan().all()
    assert dx[4].isfinite().all()
    assert dw.isnan().all()


def test_infinite_divergence_keeps_its_finite_gradient():
    """The student rules out what the teacher allows: the value is infinite, and its gradient q - p."""
    (hidden, weight, bias), teacher = sides()
    with torch.no_grad():
        bias[2] = -torch.inf
    found = [
        torch.autograd.grad(LmHead(weight, bias=bias, cache=c).read(hidden, KL(teacher)).sum(), (hidden, weight))
        for c in (0, 1)
    ]
    assert all(x.isfinite().all() for x in found[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("dropout", [None, 0.0, 0.25], ids=["plain", "LoRA", "dropout"])
@pytest.mark.parametrize("options", [{"cache": 1}, {"cache": 0.5}, {"cache": 0}, {"bits": "batch"}], ids=str)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_token_of_nan_without_a_gradient_does_no_harm(softcap, options, dropout):
    """Divergences alone are tested, kept or not: the softmax's read-outs give 0 times NaN, as PyTorch does
    (docs/numerics.md)."""
    (hidden, weight, _), teacher = sides()
    g_T = torch.ones(T, dtype=hidden.dtype)
    g_T[5] = 0
    low = [torch.randn(*shape, dtype=hidden.dtype, requires_grad=True) for shape in ((2, D), (V, 2))]
    low = [] if dropout is None else low

    def grads(hidden):
        lora = LoRA(*low, dropout=dropout) if low else None
        torch.manual_seed(1)
        found = LmHead(weight, softcap=softcap, lora=lora, **options).read(hidden, KL(teacher))
        return torch.autograd.grad(found, (hidden, weight, *low), g_T)

    expected = grads(hidden)
    hidden = hidden.detach().clone()
    hidden[5] = torch.nan
    torch.testing.assert_close(grads(hidden.requires_grad_()), expected)

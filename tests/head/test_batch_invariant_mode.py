"""`batch_invariant_mode()`: any layer's forward numbers have the same bits in any batch; who else turns the mode on."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from megatron_ext import batch_invariant_mode, linear_log_probs
from megatron_ext.head import LmHead
from megatron_ext.numerics import batch_invariance, fixed_order, replaced_operators
from tests.batch_invariant_mode import fixed_calls, switch
from tests.dtensor.models import batch, make
from tests.head.as_on_cuda import cuda_branches

T, D, N = 130, 96, 40
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def unsaid():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "batch_invariant_mode is on")
        yield


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def layers(dtype):
    w, b, deep = drawn(N, D, seed=1).to(dtype), drawn(N, seed=2).to(dtype), drawn(3, D, N, seed=3).to(dtype)
    return {
        "linear": lambda x: F.linear(x, w),
        "linear with a bias": lambda x: F.linear(x, w, b),
        "of three dims": lambda x: F.linear(x[:, None], w, b)[:, 0],
        "einsum": lambda x: torch.einsum("td,nd->tn", x, w),
        "batches": lambda x: (x.expand(3, *x.shape) @ deep).transpose(0, 1),
        "baddbmm": lambda x: torch.baddbmm(b, x.expand(3, *x.shape), deep, beta=0.5, alpha=2.0).transpose(0, 1),
        "beta of 0": lambda x: torch.addmm(b * torch.inf, x, w.t(), beta=0),
        "silu": F.silu,
        "gelu": F.gelu,
        "tanh's gelu": lambda x: F.gelu(x, approximate="tanh"),
        "sigmoid": torch.sigmoid,
        "mish": F.mish,
        "softplus": F.softplus,
        "rsqrt": lambda x: (x.abs() + 1e-3).rsqrt(),
        "power": lambda x: x.abs() ** 1.5,
        "norm": lambda x: F.rms_norm(x, (D,)),
        "softmax": lambda x: x.softmax(-1),
    }


@DTYPES
def test_every_operator_keeps_a_tokens_bits(dtype):
    """A token's neighbours differ in number and order, as does the token's place in a vector register."""
    x = drawn(T, D).to(dtype)
    order = torch.randperm(T, generator=torch.Generator().manual_seed(4))
    for name, layer in layers(dtype).items():
        with batch_invariant_mode():
            whole = layer(x)
            for some in (slice(5, 6), slice(0, 3), slice(7, 72), order):
                assert torch.equal(layer(x[some]), whole[some]), name
            assert torch.equal(layer(torch.cat([x] * 6))[T : 2 * T], whole), name
        # In 16 bits a product that is scaled and added to is rounded twice.
        close = {"rtol": 2e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 1e-2, "atol": 2e-2}
        torch.testing.assert_close(whole, layer(x), **close)


@pytest.mark.parametrize("biased", [False, True])
def test_on_cuda_a_product_is_the_kernels(monkeypatch, biased):
    made = []

    def product(a_MK, b_KN, out_MN):
        made.append(out_MN.dtype)
        out_MN.copy_(a_MK.double() @ b_KN.double())

    monkeypatch.setattr(fixed_order, "_kernels", lambda: SimpleNamespace(product=product))
    x, w, b = drawn(T, D).bfloat16(), drawn(D, N, seed=1).bfloat16(), drawn(N, seed=2).bfloat16() if biased else None
    expected = x.double() @ w.double() + (b.double() if biased else 0.0)
    with cuda_branches():
        found = fixed_order.mm(x, w, b)
    torch.testing.assert_close(found, expected.bfloat16(), rtol=2**-7, atol=1e-3)
    assert made == [torch.float32 if biased else torch.bfloat16]


def test_without_the_mode_they_do_not():
    """Products in fp32 and activations depend on other tokens here, so the problem is large enough for these tests."""
    x = drawn(T, D)
    linear = layers(torch.float32)["linear"]
    assert not torch.equal(linear(x[:3]), linear(x)[:3])
    many = drawn(70001)
    assert any(not torch.equal(f(many[at:end]), f(many)[at:end]) for f in (F.mish, F.gelu) for at, end in ((3, 70000),))


@DTYPES
def test_gradients_are_those_of_torch(dtype):
    x, w, b, slopes = drawn(T, D), drawn(N, D, seed=1), drawn(N, seed=2), drawn(T, N, seed=3)

    def gradients(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, w, b)]
        y = F.silu(F.linear(*leaves))
        return [y.detach(), *torch.autograd.grad(y, leaves, slopes.to(dtype))]

    truth, plain = gradients(torch.float64), gradients(dtype)
    with batch_invariant_mode():
        found = gradients(dtype)
    for ours, torchs, exact in zip(found, plain, truth, strict=True):
        assert (ours - exact).norm() <= 1.3 * (torchs - exact).norm() + 1e-7 * exact.norm()


def test_what_is_no_product_of_floats_is_torchs():
    a, b = torch.arange(12).view(3, 4), torch.arange(8).view(4, 2)
    with batch_invariant_mode():
        assert torch.equal(a @ b, torch.tensor([[28, 34], [76, 98], [124, 162]]))
        assert (torch.ones(2, 0) @ torch.ones(0, 3)).eq(0).all()
        assert F.silu(torch.ones(0, 3)).shape == (0, 3)
        with pytest.raises(RuntimeError, match="same dtype"):
            torch.mm(torch.ones(2, 2), torch.ones(2, 2).double())


@pytest.mark.parametrize("first_to_leave", [0, 1])
def test_it_lasts_until_all_who_entered_have_left(first_to_leave, monkeypatch):
    """The first of two generators or workers of one process to enter the mode may be the first to leave it."""
    calls, mm = [], fixed_order.mm
    monkeypatch.setitem(replaced_operators._PRODUCTS, "mm", lambda *given: calls.append(1) or mm(*given))
    x, modes = drawn(3, D), [batch_invariant_mode() for _ in range(2)]
    for enter_or_leave, on in (
        (modes[0].__enter__, True),
        (modes[1].__enter__, True),
        (partial(modes[first_to_leave].__exit__, None, None, None), True),
        (partial(modes[1 - first_to_leave].__exit__, None, None, None), False),
    ):
        enter_or_leave()
        calls.clear()
        x @ x.t()
        assert len(calls) == batch_invariance.is_on() == on


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_a_model_of_transformers(family):
    model, ids = make(family), batch()["input_ids"]
    with batch_invariant_mode(), torch.no_grad():
        whole = model.model(input_ids=ids, use_cache=False)[0]
        log_probs = linear_log_probs(whole, model.lm_head.weight, ids)
        for rows in (slice(0, 1), slice(1, None), [1, 0]):
            hidden = model.model(input_ids=ids[rows], use_cache=False)[0]
            assert torch.equal(hidden, whole[rows])
            assert torch.equal(linear_log_probs(hidden, model.lm_head.weight, ids[rows]), log_probs[rows])
    torch.testing.assert_close(whole, model.model(input_ids=ids, use_cache=False)[0], rtol=1e-4, atol=1e-5)


def test_vllms_variable_reaches_heads(monkeypatch):
    """verl sets it in every process where `rollout.full_determinism` asks for it."""
    hidden, weight, labels = drawn(5, 8), drawn(16, 8, seed=1), torch.arange(5)
    for value, fixed in (("0", 0), ("", 0), ("1", 1)):
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", value)
        batch_invariance.say_once.cache_clear()
        with fixed_calls() as calls, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            linear_log_probs(hidden, weight, labels)
            linear_log_probs(hidden, weight, labels, bits="fast")
        assert len(calls) == fixed
        assert ["VLLM_BATCH_INVARIANT is set" in str(one.message) for one in said] == [True] * fixed
    with switch(False):
        assert not batch_invariance.is_on()


def test_head_reads_by_the_mode_at_the_time_of_its_reading():
    outside = LmHead(drawn(N, D))
    with batch_invariant_mode():
        inside = LmHead(drawn(N, D))
        assert (outside.resolved().bits, inside.resolved().bits) == ("batch", "batch")
    assert (outside.resolved().bits, inside.resolved().bits) == ("fast", "fast")


def test_a_complex_power_stays_complex():
    x = torch.arange(1.0, 4.0)
    want = x**1j
    with batch_invariant_mode():
        assert torch.equal(x**1j, want)

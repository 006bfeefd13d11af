"""16-bit products of what runs in the emulation: on a processor without them none reaches torch's kernels."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from megatron_on_cpu import megatron_on_cpu
from megatron_on_cpu.products import sixteen_bit_products
from tests.gpt import model_parallel, tiny_batches, tiny_gpt
from tests.on_transformer_engine.models import plain_loss
from tests.ranks import ranks

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
B, S, D = 2, 6, 8

PRODUCTS = {
    "linear": lambda x, w: F.linear(x, w),
    "linear with bias": lambda x, w: F.linear(x[0], w, w[0]),
    "matmul": lambda x, w: x.unsqueeze(1) @ w,
    "batches": lambda x, w: x @ x.transpose(1, 2),
    "scaled sum": lambda x, w: torch.baddbmm(x.new_empty(()), x, x.transpose(1, 2), beta=0, alpha=0.25),
    "sum": lambda x, w: torch.addmm(x[0], x[1], w, beta=0.5, alpha=2.0),
    "einsum": lambda x, w: torch.einsum("bsd,bse->bde", x, x),
    "attention": lambda x, w: F.scaled_dot_product_attention(*[x.unsqueeze(1)] * 3, is_causal=True),
}


@contextlib.contextmanager
def without_sixteen_bit_products(monkeypatch, seen):
    """`seen` gets the dtypes of what torch's kernels are given."""
    get_kernel = torch.library.get_kernel

    def watched(name, key):
        kernel = get_kernel(name, key)

        class Watched:
            def call_boxed(self, keys, *args, **options):
                seen.update(x.dtype for x in args if isinstance(x, torch.Tensor))
                return kernel.call_boxed(keys, *args, **options)

        return Watched()

    monkeypatch.setattr(torch.library, "get_kernel", watched)
    with sixteen_bit_products(False), megatron_on_cpu():
        yield


def results(product, leaves):
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = product(*leaves)
    gradients = torch.autograd.grad(
        out, leaves, torch.linspace(-1, 1, out.numel()).view_as(out).to(out), allow_unused=True
    )
    return [out.detach(), *(g for g in gradients if g is not None)]


@DTYPES
@pytest.mark.parametrize("name", PRODUCTS)
def test_values_and_gradients(monkeypatch, name, dtype):
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(*shape, generator=draw).to(dtype) for shape in ((B, S, D), (D, D))]
    seen: set = set()
    with without_sixteen_bit_products(monkeypatch, seen):
        found = results(PRODUCTS[name], leaves)
    assert seen == {torch.float32}
    true = results(PRODUCTS[name], [x.double() for x in leaves])
    for got, want in zip(found, true, strict=True):
        assert got.dtype == dtype
        # Softmax has a rounding of its own probabilities, a gradient that is used twice one more of its sum.
        assert (got.double() - want).norm() <= 2 * torch.finfo(dtype).eps * want.norm()


def test_what_is_wide_or_mixed_is_torchs(monkeypatch):
    x, w = torch.randn(S, D, dtype=torch.float64), torch.randn(D, D, dtype=torch.float64)
    seen: set = set()
    with without_sixteen_bit_products(monkeypatch, seen):
        assert torch.equal(x @ w, torch.mm(x, w))
        with pytest.raises(RuntimeError, match="dtype"):
            torch.mm(x.bfloat16(), w)
    assert torch.float64 in seen


def test_outside_torch_has_its_kernels(monkeypatch):
    x = torch.randn(64, 64).bfloat16()
    before = x @ x
    seen: set = set()
    with without_sixteen_bit_products(monkeypatch, seen):
        assert torch.equal(x @ x, (x.float() @ x.float()).bfloat16())
    seen.clear()
    with sixteen_bit_products(False):
        assert torch.equal(x @ x, before)
        torch.bmm(x.float()[None], x.float()[None])
    assert not seen


@ranks(1)
def test_megatrons_own_layers():
    """A step of a bf16 GPTModel with stock layers and a stock head; both ways beside fp32."""
    tokens_BS = tiny_batches()[0]

    def step(dtype):
        with model_parallel():
            (model,) = tiny_gpt(params_dtype=dtype, bf16=dtype == torch.bfloat16)
            model = model.to(dtype)
            loss = plain_loss(model, tokens_BS)
            loss.backward()
            return [loss.detach(), *(p.grad for p in model.parameters())]

    true, seen = step(torch.float32), set()
    with pytest.MonkeyPatch.context() as monkeypatch, without_sixteen_bit_products(monkeypatch, seen):
        found = step(torch.bfloat16)
    assert torch.float32 in seen
    assert torch.bfloat16 not in seen
    with sixteen_bit_products(True):
        native = step(torch.bfloat16)
    error, of_torchs = (
        sum((got.float() - want).norm() / want.norm() for got, want in zip(some, true, strict=True))
        for some in (found, native)
    )
    assert error <= 1.1 * of_torchs

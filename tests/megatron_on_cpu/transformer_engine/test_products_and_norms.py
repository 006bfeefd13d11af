"""GEMMs with their epilogues, norms, activations and softmax, beside autograd through plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F

from megatron_on_cpu.transformer_engine.compiled_module import compiled_module
from megatron_on_cpu.transformer_engine.enums import DType

tex = compiled_module((2, 11))
BF16, FP32 = torch.bfloat16, torch.float32
TE = {BF16: DType.kBFloat16, FP32: DType.kFloat32}


def gemm(a, transpose_a, b, transpose_b, *, out=None, dtype=FP32, bias=None, gelu=False, gelu_in=None, grad=False):
    rest = (None, 0, out is not None, False)
    return tex.generic_gemm(
        *(a, transpose_a, b, transpose_b, out, None, TE[dtype], bias, TE[dtype], gelu, gelu_in, grad, *rest)
    )


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_forward_with_bias_and_gelu(dtype):
    x, weight, bias = torch.randn(3, 5, 8, dtype=dtype), torch.randn(7, 8, dtype=dtype), torch.randn(7, dtype=dtype)
    out, dbias, before, _ = gemm(weight, True, x, False, dtype=dtype, bias=bias, gelu=True)
    expected = F.linear(x.float(), weight.float(), bias.float()).to(dtype)
    assert out.shape == (3, 5, 7)
    assert dbias is None
    torch.testing.assert_close(before, expected)
    torch.testing.assert_close(out, F.gelu(expected.float(), approximate="tanh").to(dtype))


@pytest.mark.essential
def test_backward_with_its_epilogues():
    x, weight = torch.randn(6, 8, requires_grad=True), torch.randn(7, 8, requires_grad=True)
    bias, grad = torch.randn(7, requires_grad=True), torch.randn(6, 7)
    F.linear(x, weight, bias).backward(grad)
    torch.testing.assert_close(gemm(weight.detach(), False, grad, False)[0], x.grad)
    main_grad = torch.randn(7, 8)
    expected = main_grad + weight.grad
    dweight, dbias, *_ = gemm(x.detach(), False, grad, True, out=main_grad, bias=bias.detach(), grad=True)
    torch.testing.assert_close(dweight, expected)
    assert dweight is main_grad
    torch.testing.assert_close(dbias, bias.grad)
    before = torch.randn(6, 8, requires_grad=True)
    F.linear(F.gelu(before, approximate="tanh"), weight.detach()).backward(grad)
    dgelu = gemm(weight.detach(), False, grad, False, gelu=True, gelu_in=before.detach(), grad=True)[0]
    torch.testing.assert_close(dgelu, before.grad)


def test_bf16_gradients_are_added_to_fp32_in_fp32():
    x, grad = torch.randn(64, 8).to(BF16), torch.randn(64, 4).to(BF16)
    main_grad = torch.full((4, 8), 1000.0)
    gemm(x, False, grad, True, out=main_grad, grad=True)
    torch.testing.assert_close(main_grad, 1000 + grad.float().t() @ x.float())


@pytest.mark.parametrize("single", [True, False])
def test_groups(single):
    """One of them has no rows."""
    rows = [3, 0, 2]
    weights, x = [torch.randn(4, 8) for _ in rows], torch.randn(5, 8)
    biases, inputs = [torch.randn(4) for _ in rows], list(x.split(rows))
    out = [torch.full((5, 4), 9.0)] if single else [torch.full((n, 4), 9.0) for n in rows]
    empty = [torch.empty(0)] * 3
    kind = DType.kFloat32
    tex.te_general_grouped_gemm(
        *(weights, True, inputs, False, out, kind, rows, biases, kind, single, empty, False, [], 0, False, False, 0)
    )
    expected = [F.linear(a, w, b) for a, w, b in zip(inputs, weights, biases, strict=True)]
    torch.testing.assert_close(torch.cat(out), torch.cat(expected))
    grads, dbias = [torch.randn(n, 4) for n in rows], [torch.full((4,), 9.0) for _ in rows]
    dweights = [torch.ones(4, 8) for _ in rows]
    tex.te_general_grouped_gemm(
        *(inputs, False, grads, True, dweights, kind, rows, dbias, kind, False, empty, True, [], 0, True, False, 0)
    )
    for a, g, w, b in zip(inputs, grads, dweights, dbias, strict=True):
        torch.testing.assert_close(w, 1 + g.t() @ a)
        torch.testing.assert_close(b, g.sum(0))


@pytest.mark.parametrize("zero_centered", [False, True])
def test_norms(zero_centered):
    x, gamma, beta = (torch.randn(*shape, requires_grad=True) for shape in ((6, 8), (8,), (8,)))
    grad, residual = torch.randn(6, 8), torch.randn(6, 8)
    kind, whole = DType.kFloat32, gamma + 1 if zero_centered else gamma
    F.layer_norm(x, (8,), whole, beta, 1e-5).backward(grad)
    leaves = [t.detach() for t in (x, gamma, beta)]
    out, mean, rstd = tex.layernorm_fwd(*leaves, 1e-5, None, None, kind, 0, zero_centered)
    torch.testing.assert_close(out, F.layer_norm(x, (8,), whole, beta, 1e-5).detach())
    found = tex.layernorm_bwd(grad, leaves[0], mean, rstd, leaves[1], 0, zero_centered)
    for got, leaf in zip(found, (x, gamma, beta), strict=True):
        torch.testing.assert_close(got, leaf.grad)
        leaf.grad = None
    whole = gamma + 1 if zero_centered else gamma
    F.rms_norm(x, (8,), whole, 1e-5).backward(grad)
    out, none, rstd = tex.rmsnorm_fwd(*leaves[:2], 1e-5, None, None, kind, 0, zero_centered)
    assert none is None
    torch.testing.assert_close(out, F.rms_norm(x, (8,), whole, 1e-5).detach())
    dx, dgamma = tex.rmsnorm_bwd(grad, leaves[0], rstd, leaves[1], 0, zero_centered)
    torch.testing.assert_close(dx, x.grad)
    torch.testing.assert_close(dgamma, gamma.grad)
    added = tex.rmsnorm_bwd_add(grad, leaves[0], residual, rstd, leaves[1], 0, zero_centered)
    torch.testing.assert_close(added[0], x.grad + residual)


PLAIN = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x) ** 2,
    "silu": F.silu,
}
GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}


def gate(of):
    return lambda x: PLAIN[of](x[..., :4]) * x[..., 4:]


def gpt_oss(x):
    a, b = x[..., :4].clamp(max=7.0), x[..., 4:].clamp(-7.0, 7.0)
    return PLAIN["qgelu"](a) * (b + 1)


ALL = PLAIN | {name: gate(of) for name, of in GATED.items()} | {"clamped_swiglu": gpt_oss}


@pytest.mark.parametrize("name", ALL)
def test_activations(name):
    x = (3 * torch.randn(5, 8)).requires_grad_()
    out = ALL[name](x)
    grad = torch.randn_like(out)
    out.backward(grad)
    torch.testing.assert_close(getattr(tex, name)(x.detach(), None), out.detach())
    backward = "clamped_dswiglu" if name == "clamped_swiglu" else f"d{name}"
    torch.testing.assert_close(getattr(tex, backward)(grad, x.detach(), None), x.grad)
    if name in PLAIN:
        dbias, dx = getattr(tex, f"dbias_d{name}")(grad, x.detach(), None)
        torch.testing.assert_close(dx, x.grad)
        torch.testing.assert_close(dbias, x.grad.sum(0))


@pytest.mark.parametrize("kind", ["", "_masked", "_upper_triang_masked", "_aligned_causal_masked"])
def test_softmax(kind):
    keys = 6 if kind == "_aligned_causal_masked" else 4
    x = torch.randn(2, 3, 4, keys, requires_grad=True)
    later = torch.ones(4, keys, dtype=torch.bool).triu(1 + keys - 4)
    mask = torch.rand(2, 1, 4, 4) > 0.5
    mask[0, 0, 2] = True  # a row of nothing
    scores = x * 0.7
    if kind == "_masked":
        expected = scores.masked_fill(mask, -10000.0).softmax(-1).masked_fill(mask.all(-1, keepdim=True), 0)
    elif kind:
        expected = scores.masked_fill(later, float("-inf")).softmax(-1)
    else:
        expected = scores.softmax(-1)
    grad = torch.randn_like(expected)
    expected.backward(grad)
    extra = (mask,) if kind == "_masked" else ()
    out = getattr(tex, f"scaled{kind}_softmax_forward")(x.detach(), *extra, 0.7)
    torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(getattr(tex, f"scaled{kind}_softmax_backward")(grad, out, 0.7), x.grad)

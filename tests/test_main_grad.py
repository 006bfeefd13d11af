"""Who adds a weight gradient into `main_grad`: Apex's kernels and Transformer Engine's dummy where they are present.

There is no GPU here: fake CUDA tensors have the shapes, dtypes and devices that decide, and stand-ins of the two
packages take them.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron_ext import main_grad
from megatron_ext.optional_packages import optional_module
from tests.devices import GPU

T, N, D = 5, 3, 4


@pytest.fixture
def apex(monkeypatch):
    """A module with Apex's two functions and the order of their arguments; `calls` has what they were called with."""
    module = ModuleType("fused_weight_gradient_mlp_cuda")
    module.calls = []

    def kernel(name):
        def add(input_, d_output, d_weight):
            assert all(tensor.is_contiguous() for tensor in (input_, d_output, d_weight))
            module.calls.append((name, tuple(input_.shape), tuple(d_output.shape), tuple(d_weight.shape)))
            d_weight.add_((d_output.t() @ input_).to(d_weight.dtype))

        return add

    module.wgrad_gemm_accum_fp32, module.wgrad_gemm_accum_fp16 = kernel("fp32"), kernel("fp16")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    optional_module.cache_clear()
    yield module
    optional_module.cache_clear()


def add(operand, out, device="cuda", strided=False):
    with FakeTensorMode():
        left_TN, right_TD = (torch.empty(T, n, dtype=operand, device=device) for n in (N, D))
        if strided:
            left_TN = torch.empty(N, T, dtype=operand, device=device).t()
        main_grad.add_product(torch.zeros(N, D, dtype=out, device=device), left_TN, right_TD)


@pytest.mark.parametrize(
    "operand,out,kernel",
    [
        (torch.bfloat16, torch.float32, "fp32"),
        (torch.float16, torch.float32, "fp32"),
        (torch.float32, torch.float32, "fp32"),
        (torch.bfloat16, torch.bfloat16, "fp16"),
        (torch.float16, torch.float16, "fp16"),
    ],
)
def test_apexs_kernels_take_the_input_first(apex, operand, out, kernel):
    add(operand, out)
    assert apex.calls == [(kernel, (T, D), (T, N), (N, D))]


def test_what_apex_does_not_take_is_pytorchs(apex):
    add(torch.float64, torch.float64)
    add(torch.bfloat16, torch.float32, device="cpu")
    add(torch.bfloat16, torch.bfloat16, strided=True)  # it would need a copy
    assert apex.calls == []


def test_without_apex():
    """The normal case: it is looked for once, and PyTorch's matmul does as well."""
    assert "fused_weight_gradient_mlp_cuda" not in sys.modules
    optional_module.cache_clear()
    add(torch.bfloat16, torch.bfloat16)
    add(torch.bfloat16, torch.bfloat16)
    assert main_grad._apex() is None
    assert optional_module.cache_info().misses == 1


@pytest.mark.parametrize("zero", [False, True])
def test_transformer_engine_lends_the_dummy(monkeypatch, zero):
    module, asked = ModuleType("transformer_engine.pytorch.module.base"), []

    def get_dummy_wgrad(shape, dtype, zero=False):
        asked.append((shape, dtype, zero))
        return "the one buffer"

    module.get_dummy_wgrad = get_dummy_wgrad
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with FakeTensorMode():
        weight = torch.empty(N, D, device="cuda")
        assert main_grad.finish(weight, torch.bfloat16) is None
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = False, zero
        assert main_grad.finish(weight, torch.bfloat16) == "the one buffer"
    assert weight.grad_added_to_main_grad
    assert asked == [([N, D], torch.bfloat16, zero)]


def test_transformer_engine_is_asked_for_matrices_alone(monkeypatch):
    """Its 2.11 asserts two dims, and a weight may have others: a convolution's, or one that was flattened."""
    module = ModuleType("transformer_engine.pytorch.module.base")
    module.get_dummy_wgrad = lambda shape, dtype, zero=False: pytest.fail(f"asked for {shape}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with FakeTensorMode():
        for shape in ((N,), (2, N, D)):
            weight = torch.empty(shape, device="cuda")
            weight.grad_added_to_main_grad = False
            assert main_grad.finish(weight, torch.bfloat16).shape == shape


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.parametrize("operand", [torch.bfloat16, torch.float32])
def test_on_the_gpu(operand):
    """With the kernels or without, the gradient is added in fp32: of whole numbers it loses nothing, where a product
    or a sum rounded to 16 bits would be far off."""
    left_TN, right_TD = (torch.randint(-32, 33, (512, n), device=GPU).to(operand) for n in (N, D))
    start, product = 1.5, left_TN.double().t() @ right_TD.double()
    out_ND = torch.full((N, D), start, device=GPU)
    main_grad.add_product(out_ND, left_TN, right_TD)

    def furthest(found):
        return float((found.double() - (start + product)).abs().max())

    allowed = torch.finfo(torch.float32).eps * float(product.abs().max())
    assert furthest(out_ND) <= allowed
    for rounded in (start + product.bfloat16().double(), (start + product).bfloat16()):
        assert furthest(rounded) > 10 * allowed

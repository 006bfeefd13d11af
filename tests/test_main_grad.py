"""Weight gradients added into `main_grad`, and the dummy that Transformer Engine lends in the gradient's place.

There is no GPU here: fake CUDA tensors have the shapes, dtypes and devices that decide, and a stand-in of Transformer
Engine takes them.
"""

import sys
from types import ModuleType

import pytest
import torch
from torch._subclasses import FakeTensorMode

from megatron_ext import main_grad
from tests.devices import GPU

T, N, D = 5, 3, 4


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
    """Transformer Engine 2.11 asserts two dims; a weight may have others: a convolution's, or a flattened one."""
    module = ModuleType("transformer_engine.pytorch.module.base")
    module.get_dummy_wgrad = lambda shape, dtype, zero=False: pytest.fail(f"asked for {shape}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with FakeTensorMode():
        for shape in ((N,), (2, N, D)):
            weight = torch.empty(shape, device="cuda")
            weight.grad_added_to_main_grad = False
            assert main_grad.finish(weight, torch.bfloat16).shape == shape


def test_a_compiled_forward_tells_megatron_of_main_grad(monkeypatch):
    weights = [torch.nn.Parameter(torch.zeros(N, D), requires_grad=trains) for trains in (True, True, False)]
    for weight in weights[1:]:
        weight.grad_added_to_main_grad, weight.shared_embedding = False, True
    main_grad.promise(weights[1])
    assert not weights[1].grad_added_to_main_grad  # nothing is compiled
    assert weights[
        1
    ].zero_out_wgrad  # before a backward of Megatron's own layers, which makes a dummy of the weight too
    del weights[1].zero_out_wgrad
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    for weight in weights:
        main_grad.promise(weight)
    assert not hasattr(weights[0], "grad_added_to_main_grad")
    assert weights[1].grad_added_to_main_grad
    assert weights[1].zero_out_wgrad
    assert not weights[2].grad_added_to_main_grad


@pytest.mark.parametrize("marked", [False, True])
def test_a_shared_table_keeps_the_gradient_of_its_lookup(marked):
    """Megatron adds autograd's gradient only where `zero_out_wgrad` is set, and sets it on one stage alone."""
    weight = torch.zeros(N, D)
    weight.grad_added_to_main_grad, weight.shared_embedding = False, True
    weight.is_embedding_or_output_parameter = marked  # Megatron-Core 0.20 marks the tables of later stages too
    dummy = main_grad.finish(weight, torch.float32)
    assert weight.zero_out_wgrad
    assert not dummy.any()


@pytest.mark.gpu
@pytest.mark.rehearsed
@pytest.mark.parametrize("operand", [torch.bfloat16, torch.float32])
def test_on_the_gpu(operand):
    """The gradient is added in fp32: of whole numbers it loses nothing, where a product
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

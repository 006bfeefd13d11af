"""Functions of Apex that Megatron calls: how many arguments they take, weight gradients, and softmax.

`apex_signatures.tsv` lists the functions with their parameters, read from Apex's sources (csrc/megatron, 23c1f86). They
are taken by position there: names do not count, their number and their order do.
"""

import inspect
import sys
from pathlib import Path

import pytest
import torch

from megatron_on_cpu import megatron_on_cpu
from megatron_on_cpu.transformer_engine import apex

RECORD = [line.split("\t") for line in Path(__file__).with_name("apex_signatures.tsv").read_text().splitlines()]


def test_every_function_is_there_and_takes_as_many_arguments():
    ours = {(module, name) for module, functions in apex.MODULES.items() for name in functions}
    assert ours == {(module, name) for module, name, _ in RECORD}
    for module, name, parameters in RECORD:
        taken = inspect.signature(getattr(apex.compiled_module(module), name)).parameters
        assert len(taken) == len(parameters.split()), (module, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradients_are_added(dtype):
    x, grad = torch.randn(2, 3, 8).to(torch.bfloat16), torch.randn(2, 3, 4).to(torch.bfloat16)
    weight_grad = torch.randn(4, 8).to(dtype)
    expected = (weight_grad.float() + grad.flatten(0, 1).float().t() @ x.flatten(0, 1).float()).to(dtype)
    name = "wgrad_gemm_accum_fp32" if dtype == torch.float32 else "wgrad_gemm_accum_fp16"
    getattr(apex.compiled_module("fused_weight_gradient_mlp_cuda"), name)(x, grad, weight_grad)
    torch.testing.assert_close(weight_grad, expected)


@pytest.mark.parametrize("keys,rows", [(8, 32), (32, 8), (128, 8), (129, 4), (4096, 4)])
def test_rows_of_a_block(keys, rows):
    assert apex.get_batch_per_block(64, keys, 2, 4) == rows


@pytest.mark.parametrize("mask", ["causal", "padding", None])
def test_megatrons_fused_softmax_is_its_unfused_one(mask, monkeypatch):
    for name in apex.MODULES:
        monkeypatch.setitem(sys.modules, name, apex.compiled_module(name))
    with megatron_on_cpu():
        from megatron.core.fusions.fused_softmax import FusedScaleMaskSoftmax
        from megatron.core.transformer.enums import AttnMaskType
        from megatron.core.transformer.utils import attention_mask_func

        softmax = FusedScaleMaskSoftmax(
            input_in_fp16=False,
            input_in_bf16=True,
            attn_mask_type=AttnMaskType.causal if mask == "causal" else AttnMaskType.padding,
            scaled_masked_softmax_fusion=True,
            mask_func=attention_mask_func,
            softmax_in_fp32=True,
            scale=0.3,
        )
        scores = torch.randn(2, 4, 32, 32).to(torch.bfloat16)
        hidden = torch.rand(2, 1, 32, 32) < 0.4 if mask == "padding" else None
        assert softmax.is_kernel_available(hidden, *scores.shape)
        found = {}
        for way in (softmax.forward_fused_softmax, softmax.forward_torch_softmax):
            leaf = scores.clone().requires_grad_()
            probabilities = way(leaf, hidden)
            (probabilities * torch.linspace(-1, 1, 32)).sum().backward()
            found[way.__name__] = probabilities.detach(), leaf.grad
    for fused, plain in zip(*found.values(), strict=True):
        torch.testing.assert_close(fused, plain, rtol=2e-2, atol=2e-3)
    assert found["forward_fused_softmax"][1].abs().max() > 1e-3

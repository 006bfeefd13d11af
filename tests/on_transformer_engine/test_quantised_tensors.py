"""Quantised tensors, optimizers and caches of Transformer Engine by themselves, without Megatron."""

from collections import OrderedDict

import pytest
import torch

from tests.ranks import ranks


def quantizer(internal=False):
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import MXFP8Quantizer

    made = MXFP8Quantizer(fp8_dtype=tex.DType.kFloat8E4M3)
    made.internal = internal
    return made


@ranks(1)
def test_mxfp8_tensor_in_arithmetic_and_an_optimizer():
    x = torch.linspace(-3, 3, 64 * 64).view(64, 64)
    tensor = quantizer()(x)
    torch.testing.assert_close(tensor.dequantize(), x, rtol=0.1, atol=0.01)
    torch.testing.assert_close(tensor + 1, tensor.dequantize() + 1)
    torch.testing.assert_close(quantizer(internal=True)(x).dequantize(), tensor.dequantize())
    parameter = torch.nn.Parameter(quantizer()(x))
    parameter.grad = torch.ones(64, 64)
    torch.optim.SGD([parameter], lr=0.5).step()
    torch.testing.assert_close(parameter.dequantize().detach(), x - 0.5, rtol=0.1, atol=0.1)


@ranks(1)
def test_tensors_without_dims():
    import transformer_engine_torch as tex
    from transformer_engine.pytorch import Float8CurrentScalingQuantizer, Float8Quantizer

    kind = tex.DType.kFloat8E4M3
    delayed = Float8Quantizer(scale=torch.ones(1), amax=torch.zeros(1), fp8_dtype=kind)
    for made in delayed, Float8CurrentScalingQuantizer(fp8_dtype=kind, device="cpu"):
        tensor = made(torch.tensor(3.0))
        assert tensor.shape == tensor._data.shape == ()
        assert torch.equal(tensor.dequantize(), torch.tensor(3.0))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@ranks(1)
def test_fused_sgd(momentum):
    from transformer_engine.pytorch.optimizers import FusedSGD

    parameters, kinds = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)], (FusedSGD, torch.optim.SGD)
    optimizers = [kind([p], lr=0.1, momentum=momentum) for kind, p in zip(kinds, parameters, strict=True)]
    for _ in range(3):
        for optimizer, parameter in zip(optimizers, parameters, strict=True):
            parameter.grad = parameter.detach() * 2
            optimizer.step()
    torch.testing.assert_close(*parameters)


@ranks(1)
def test_cache_of_keys_and_values():
    from transformer_engine.pytorch.attention import InferenceParams

    cache = InferenceParams(2, 16, num_heads_kv=2, head_dim_k=8, dtype=torch.float32)
    cache.allocate_memory(1)
    old, new = torch.randn(2, 3, 2, 8), torch.randn(2, 1, 2, 8)
    for k, lengths in (old, (3, 2)), (new, (1, 1)):
        cache.pre_step(OrderedDict(enumerate(lengths)))
        found, *_ = cache.step(1, k, k, "bshd")
    assert torch.equal(found[0, :4], torch.cat([old[0], new[0]]))
    assert torch.equal(found[1, :3], torch.cat([old[1, :2], new[1]]))

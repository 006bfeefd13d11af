"""FP8's scales beside NumPy, whose arithmetic is that of the kernels: divisions rounded once, maxima that skip NaN."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megatron_on_cpu.transformer_engine.compiled_module import compiled_module
from megatron_on_cpu.transformer_engine.enums import DType
from megatron_on_cpu.transformer_engine.quantisation.blocks import blocks_of, mx_blocks_of
from tests.megatron_on_cpu.transformer_engine import numbers

tex = compiled_module((2, 11))
NAN, INF = math.nan, math.inf


def many_amaxes():
    return numbers(2000, seed=0).abs() + 1e-3


@pytest.mark.parametrize("largest", [448.0, 57344.0])
def test_scale_is_a_division_rounded_once(largest):
    amax = many_amaxes()
    scale, scale_inv = torch.empty(2000), torch.empty(2000)
    tex.multi_tensor_compute_scale_and_scale_inv(1, None, [[amax], [scale], [scale_inv]], largest, False, 0.0)
    expected = np.float32(largest) / amax.numpy()
    assert np.array_equal(scale.numpy(), expected)
    assert np.array_equal(scale_inv.numpy(), np.float32(1) / expected)


def test_delayed_scale_is_a_division_rounded_once():
    amax = many_amaxes()
    history, scale = torch.zeros(3, 2000), torch.ones(2000)
    tex.fused_amax_and_scale_update_after_reduction(amax, [history], [scale], "max", DType.kFloat8E4M3, 1.0)
    assert np.array_equal(scale.numpy(), np.float32(224) / amax.numpy())


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_amax_of_zero_leaves_history_and_scale(algorithm):
    """The first tensor has no amax in this step, the second one, the third one only in its history's first row."""
    history = torch.tensor([[0.0, 1.0, 7.0], [2.0, 2.0, 2.0], [3.0, 3.0, 3.0]])
    scale = torch.tensor([5.0, 5.0, 5.0])
    step = torch.tensor([0.0, 4.0, 0.0])
    tex.fused_amax_and_scale_update_after_reduction(step, [history], [scale], algorithm, DType.kFloat8E4M3, 0.0)
    assert history.tolist() == [[0, 0, 0], [2, 3, 3], [3, 4, 7]]
    assert scale.tolist() == [5.0, 112.0, 64.0]


def test_amax_that_is_not_finite_leaves_the_scale():
    history, scale = torch.zeros(2, 2), torch.full((2,), 5.0)
    step = torch.tensor([INF, NAN])
    tex.fused_amax_and_scale_update_after_reduction(step, [history], [scale], "most_recent", DType.kFloat8E4M3, 0.0)
    assert scale.tolist() == [5.0, 5.0]


def test_amax_skips_nan():
    amax = torch.zeros(1)
    tex.compute_amax(torch.tensor([NAN, -3.0, 2.0]), amax)
    assert amax.item() == 3
    tex.compute_amax(torch.empty(0, 4), amax)
    assert amax.item() == 0


@pytest.mark.parametrize("columnwise", [False, True])
def test_blocks_with_nan_have_the_scales_of_the_others(columnwise):
    x = numbers(128, 128, seed=0)
    clean, x[3, 5] = x.clone(), NAN
    clean[3, 5] = 0
    small = SimpleNamespace(dtype=DType.kFloat8E4M3)
    wide = SimpleNamespace(block_scaling_dim=1, force_pow_2_scales=False, amax_epsilon=0.0, **vars(small))
    for blocks, quantizer in (blocks_of, wide), (mx_blocks_of, small):
        data, scales = blocks(x, quantizer, columnwise)
        without, expected = blocks(clean, quantizer, columnwise)
        assert torch.equal(scales, expected)
        assert (data != without).sum() == 1


def test_largest_factor_is_that_of_the_number():
    """A tensor of bf16 has the largest number of bf16."""
    quantizer = SimpleNamespace(
        block_scaling_dim=1, force_pow_2_scales=False, amax_epsilon=0.0, dtype=DType.kFloat8E4M3
    )
    _, scale_inv = blocks_of(torch.full((1, 128), 1e-38, dtype=torch.bfloat16), quantizer, False)
    assert scale_inv[0, 0].item() == np.float32(1) / np.float32(torch.finfo(torch.bfloat16).max)


def test_exponents_are_of_a_product_with_the_reciprocal():
    """Amaxes are powers of two times the largest number, where rounding decides."""
    amax = torch.tensor([448.0 * 2.0**k for k in range(-100, 100)])
    exponent = torch.empty(200, dtype=torch.uint8)
    tex.multi_tensor_compute_scale_inv_e8m0(1, None, [[amax], [exponent]])
    bits = (amax.numpy() * np.float32(1 / np.float32(448))).view(np.int32)
    assert np.array_equal(exponent.numpy(), (bits >> 23) + ((bits & 0x7FFFFF) > 0))

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig

from megatron_ext.megatron.layer_specs import _FinalNorm
from megatron_ext.megatron.norms import LayerNorm, Norm, RMSNorm


def config(**overrides):
    return SimpleNamespace(
        **{"normalization": "LayerNorm", "sequence_parallel": True, "qk_layernorm": False, **overrides}
    )


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_values_and_gradients(kind, zero_centered):
    x, dy = torch.randn(5, 2, 6, dtype=torch.float64), torch.randn(5, 2, 6, dtype=torch.float64)
    norm = Norm(config(normalization=kind, layernorm_zero_centered_gamma=zero_centered), 6, 1e-3).double()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(torch.randn(6))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    norm(ours).backward(dy)

    gamma = (norm.weight.detach() + zero_centered).requires_grad_()
    beta = norm.bias.detach().clone().requires_grad_() if kind == "LayerNorm" else None
    centred = theirs - theirs.mean(-1, keepdim=True) if kind == "LayerNorm" else theirs
    expected = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + 1e-3) * gamma
    expected = expected if beta is None else expected + beta
    expected.backward(dy)

    torch.testing.assert_close(norm(x), expected.detach())
    torch.testing.assert_close(ours.grad, theirs.grad)
    torch.testing.assert_close(norm.weight.grad, gamma.grad)
    if beta is not None:
        torch.testing.assert_close(norm.bias.grad, beta.grad)


def test_fresh_norm_is_the_identity_on_normalised_rows():
    x = F.layer_norm(torch.randn(3, 8), (8,))
    for zero_centered in (False, True):
        norm = Norm(config(layernorm_zero_centered_gamma=zero_centered), 8)
        torch.testing.assert_close(norm(x), x, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_are_marked_for_gradient_sums_over_tp_ranks(sequence_parallel):
    for kind in ("LayerNorm", "RMSNorm"):
        norm = Norm(config(normalization=kind, sequence_parallel=sequence_parallel), 4)
        assert [p.sequence_parallel for p in norm.parameters()] == [sequence_parallel] * len(list(norm.parameters()))


def test_config_names_the_norm():
    assert type(Norm(config(), 4)) is LayerNorm
    assert type(Norm(config(normalization="RMSNorm"), 4)) is RMSNorm
    with pytest.raises(ValueError, match=r"config.normalization is 'L3Norm': it must be one of"):
        Norm(config(normalization="L3Norm"), 4)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_wider_residual_comes_out_in_the_weights_dtype(kind):
    """`fp32_residual_connection` beside 16-bit parameters, which ended in torch's "mixed dtype"."""
    x, dy = torch.randn(5, 2, 6), torch.randn(5, 2, 6).bfloat16()
    norm = Norm(config(normalization=kind), 6).bfloat16()
    wide = Norm(config(normalization=kind), 6)
    with torch.no_grad():
        for parameter, same in zip(norm.parameters(), wide.parameters(), strict=True):
            same.copy_(parameter.add_(torch.randn(6)))
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    y = norm(ours)
    y.backward(dy)
    wide(theirs).backward(dy.float())
    torch.testing.assert_close(y, wide(x).bfloat16(), rtol=0, atol=0)
    torch.testing.assert_close(ours.grad, theirs.grad)
    for parameter, same in zip(norm.parameters(), wide.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, same.grad.bfloat16(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_a_wider_residual_runs_under_autocast(kind):
    """Autocast once ended in torch's "mixed dtype"; as on CUDA the result has the residual's dtype."""
    norm, x = Norm(config(normalization=kind), 6).bfloat16(), torch.randn(5, 2, 6)
    with torch.autocast("cpu", torch.bfloat16):
        y = norm(x)
    torch.testing.assert_close(y, Norm(config(normalization=kind), 6)(x), rtol=0, atol=0)


def test_final_norm_of_megatron_has_its_default_epsilon():
    """Also where the class stands in for Megatron's, which passes `eps` itself."""
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    x = torch.randn(3, 8) * 1e-3  # so small that eps shows
    torch.testing.assert_close(_FinalNorm(config, 8)(x), F.layer_norm(x, (8,), eps=1e-5))

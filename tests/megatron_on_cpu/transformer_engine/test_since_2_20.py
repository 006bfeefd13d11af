"""Functions that 2.20 has otherwise than 2.11, beside 2.11's (which have tests beside plain PyTorch) or by hand."""

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from megatron_on_cpu.transformer_engine import cross_entropy
from megatron_on_cpu.transformer_engine.compiled_module import compiled_module
from megatron_on_cpu.transformer_engine.python_modules import MODULES
from tests.megatron_on_cpu.transformer_engine import attended, called, numbers, of_attention

old, new = compiled_module((2, 11)), compiled_module((2, 20))
SEQUENCES = torch.tensor([0, 8, 12], dtype=torch.int32)


@pytest.mark.parametrize("window", [(-1, 0), (2, 0)])
def test_attention(window):
    """Output, and gradients of queries, keys and values, of two causal packed sequences."""
    results = []
    for tex in old, new:
        layout, mask = tex.NVTE_QKV_Layout.NVTE_THD_THD_THD, tex.NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK
        tensors = [numbers(12, 2, 4, seed=seed) for seed in range(3)]
        more = {"window_size": window, "bottom_right_diagonal": True}
        given = of_attention(tex, tensors, layout, mask, SEQUENCES, SEQUENCES, **more)
        results.append(attended(tex, given, numbers(12, 2, 4, seed=3))[:4])
    expected, found = results
    assert expected[0].abs().max() > 0.1
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want)


def of_one_sequence(mask, **more):
    tensors, lengths = [numbers(1, 4, 2, 4, seed=seed) for seed in range(3)], torch.tensor([0, 4], dtype=torch.int32)
    return of_attention(new, tensors, new.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, mask, lengths, lengths, **more)


def test_the_largest_score_comes_after_the_log_sum_exp():
    given = of_one_sequence(new.NVTE_Mask_Type.NVTE_NO_MASK, return_max_logit=True)
    _, lse, largest, *_ = called(new.fused_attn_fwd, given)
    scores = 0.5 * torch.einsum("bqhd,bkhd->bhqk", given["Q"], given["K"])
    torch.testing.assert_close(lse.view(1, 2, 4), scores.logsumexp(-1))
    torch.testing.assert_close(largest.view(1, 2, 4), scores.amax(-1))


def test_a_diagonal_that_is_not_emulated_is_refused():
    diagonal = {"window_size": (1, 1), "bottom_right_diagonal": True}
    with pytest.raises(NotImplementedError, match="use a causal mask or bottom_right_diagonal=False"):
        called(new.fused_attn_fwd, of_one_sequence(new.NVTE_Mask_Type.NVTE_PADDING_MASK, **diagonal))


@pytest.mark.parametrize("only_second_half", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_outputs_of_steps_are_merged(only_second_half, packed):
    """Rows from 12 on are padding."""
    rows = torch.tensor([4, 5, 6, 7, 10, 11]) if only_second_half else torch.arange(12)
    out, step = numbers(14, 2, 3, seed=0), numbers(len(rows), 2, 3, seed=1)
    lse_before, lse_step = numbers(12, 2, seed=2), numbers(len(rows), 2, seed=3)
    lse = lse_before.clone()
    lse[rows] = torch.logaddexp(lse_before[rows], lse_step)
    expected = out.clone()
    sums = out[rows] * lse_before[rows].exp()[..., None] + step * lse_step.exp()[..., None]
    expected[rows] = sums / lse[rows].exp()[..., None]

    def laid_out(x_TH, lengths):
        if packed:
            return x_TH.t().contiguous()
        return torch.nn.utils.rnn.pad_sequence(x_TH.split(lengths), batch_first=True).transpose(1, 2).contiguous()

    lses = [laid_out(x, [8, 4]) for x in (lse_before, lse)]
    of_step = laid_out(lse_step, [4, 2] if only_second_half else [8, 4])
    new.thd_out_correction(out, step, *lses, of_step, SEQUENCES, only_second_half, packed)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("score,pre_softmax", [("softmax", True), ("softmax", False), ("sigmoid", False)])
def test_router(score, pre_softmax):
    """Any leading dims, and gradients are written where the caller says."""
    logits, grad = numbers(2, 3, 4, seed=0), numbers(2, 3, 4, seed=1)
    rest = (2, pre_softmax, None, None, None, score, None)
    expected = old.fused_topk_with_score_function_fwd(logits.view(6, 4), *rest)
    found = new.fused_topk_with_score_function_fwd(logits, *rest)
    for got, want in zip(found, expected, strict=True):
        assert torch.equal(got, want.view(2, 3, 4))
    want = old.fused_topk_with_score_function_bwd(
        6, 4, expected[1], expected[2], grad.view(6, 4), 2, pre_softmax, None, score
    )
    got = torch.empty(2, 3, 4)
    new.fused_topk_with_score_function_bwd(found[1], found[2], grad, got, 2, pre_softmax, None, score)
    assert torch.equal(got, want.view(2, 3, 4))
    assert got.abs().max() > 0.01


def test_scores_of_the_auxiliary_loss():
    logits, grad, got = numbers(2, 3, 4, seed=0), numbers(2, 3, 4, seed=1), torch.empty(2, 3, 4)
    expected = old.fused_score_for_moe_aux_loss_fwd(logits.view(6, 4), 2, "sigmoid")
    found = new.fused_score_for_moe_aux_loss_fwd(logits, 2, "sigmoid")
    for one, want in zip(found, expected, strict=True):
        assert torch.equal(one, want.view(2, 3, 4))
    new.fused_score_for_moe_aux_loss_bwd(found[2], grad, got, 2, "sigmoid")
    want = old.fused_score_for_moe_aux_loss_bwd(6, 4, expected[2], grad.view(6, 4), 2, "sigmoid")
    assert torch.equal(got, want.view(2, 3, 4))
    counts = torch.tensor([3.0, 5.0, 1.0, 3.0])
    loss = new.fused_moe_aux_loss_fwd_graph_safe(found[0].view(6, 4), counts, torch.tensor(6), 4, 6, 4, 2, 0.1)
    same = old.fused_moe_aux_loss_fwd(found[0].view(6, 4), counts, 6, 4, 6, 4, 2, 0.1)
    assert torch.equal(loss[0], same[0])


def test_other_routers_are_refused():
    logits = numbers(2, 4, seed=0)
    with pytest.raises(NotImplementedError, match="leave routing_map_format and topk_indices at their defaults"):
        new.fused_topk_with_score_function_fwd(logits, 2, False, None, None, None, "softmax", None, 1)
    with pytest.raises(NotImplementedError, match="score_function is 'sqrtsoftplus'"):
        new.fused_topk_with_score_function_fwd(logits, 2, False, None, None, None, "sqrtsoftplus", None)


def interleaved(x, size):
    """Both halves of the columns of x, in turns of `size`."""
    return torch.stack([half.unflatten(-1, (-1, size)) for half in x.chunk(2, dim=-1)], dim=-2).flatten(-3)


def situ(gate, linear):
    return 2 * torch.tanh(gate / 2) * torch.sigmoid(gate) * 3 * torch.tanh(linear / 3)


def of_gpt_oss(gate, linear):
    gate, linear = gate.clamp(max=2.0), linear.clamp(-2.0, 2.0)
    return gate * torch.sigmoid(1.5 * gate) * (linear + 0.5)


def swiglu(gate, linear):
    return F.silu(gate) * linear


@pytest.mark.parametrize(
    "name,options,function",
    [
        ("glu", (), lambda gate, linear: gate.sigmoid() * linear),
        ("clamped_swiglu", (2.0, 1.5, 0.5), of_gpt_oss),
        ("situglu", (2.0, 3.0), situ),
    ],
)
def test_gated_activations(name, options, function):
    x, grad = 3 * numbers(5, 8, seed=0), numbers(5, 4, seed=1)
    leaf = x.clone().requires_grad_()
    expected = function(*leaf.chunk(2, dim=-1))
    expected.backward(grad)
    torch.testing.assert_close(getattr(new, name)(x, None, *options), expected.detach())
    torch.testing.assert_close(getattr(new, name_of_gradient(name))(grad, x, None, *options), leaf.grad)


def name_of_gradient(name):
    start, underscore, end = name.rpartition("_")
    return f"{start}{underscore}d{end}"


@pytest.mark.parametrize("size", [0, 2])
@pytest.mark.parametrize(
    "name,options,function",
    [("swiglu", (), swiglu), ("clamped_swiglu", (2.0, 1.5, 0.5), of_gpt_oss), ("situglu", (2.0, 3.0), situ)],
)
def test_gated_activations_with_a_factor_for_each_row(name, options, function, size):
    x, grad, scales = 3 * numbers(2, 5, 8, seed=0), numbers(2, 5, 4, seed=1), numbers(2, 5, seed=2)
    leaf, factors = x.clone().requires_grad_(), scales.clone().requires_grad_()
    expected = function(*leaf.chunk(2, dim=-1)) * factors[..., None]
    expected.backward(grad)
    given, want = (interleaved(one, size) if size else one for one in (x, leaf.grad))
    forward, backward = getattr(new, f"scaled_{name}"), getattr(new, name_of_gradient(f"scaled_{name}"))
    torch.testing.assert_close(forward(given, scales, None, *options, size), expected.detach())
    dx, dscales = backward(grad, given, scales, None, *options, size, True)
    torch.testing.assert_close(dx, want)
    torch.testing.assert_close(dscales, factors.grad)
    without = backward(grad, given, scales, None, *options, size, False)
    assert torch.equal(without[0], dx)
    assert without[1] is None


def test_squared_relu_with_a_factor_for_each_row():
    """Each result has the dtype of the tensor that it belongs to, and is rounded once."""
    x, grad, scales = numbers(5, 4, seed=0).bfloat16(), numbers(5, 4, seed=1).bfloat16(), numbers(5, seed=2)
    leaf, factors = x.float().requires_grad_(), scales.clone().requires_grad_()
    expected = F.relu(leaf).square() * factors[:, None]
    expected.backward(grad.float())
    assert torch.equal(new.scaled_srelu(x, scales, None), expected.detach().bfloat16())
    dx, dscales = new.scaled_dsrelu(grad, x, scales, None, True)
    assert torch.equal(dx, leaf.grad.bfloat16())
    torch.testing.assert_close(dscales, factors.grad)


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_experts_biases(scaled):
    """Gradients are added to the tensors' values; the second expert has no tokens, and the last row is of no expert."""
    module = ModuleType("transformer_engine.pytorch.triton.grouped_dbias_dscales")
    ((_, replacements),) = MODULES[module.__name__](module)
    dy, bias, scales = (
        numbers(6, 4, seed=0),
        numbers(3, 4, seed=1).requires_grad_(),
        numbers(6, seed=2).requires_grad_(),
    )
    before, before_scales = numbers(3, 4, seed=3), numbers(6, seed=4)
    expert, rows = torch.tensor([0, 0, 2, 2, 2]), slice(0, 5)
    factors = scales[rows, None] if scaled else 1.0
    ((bias[expert] * factors) * dy[rows]).sum().backward()
    dbias, dscales = before.clone(), before_scales.clone()
    more = (scales.detach(), bias.detach(), dscales) if scaled else (None, None, None)
    replacements["_launch_grouped_dbias"](dy, torch.tensor([0, 2, 2, 5]), dbias, *more)
    torch.testing.assert_close(dbias, before + bias.grad)
    if scaled:
        torch.testing.assert_close(dscales, before_scales + scales.grad)


@pytest.mark.parametrize("mean", [False, True])
def test_cross_entropy(mean):
    """A mean is over the tokens that are not ignored."""
    logits, labels = numbers(2, 3, 7, seed=0).requires_grad_(), torch.tensor([[0, 6, -100], [3, -100, 2]])
    reduction = "mean" if mean else "none"
    expected = F.cross_entropy(logits.view(6, 7), labels.view(6), reduction=reduction)
    grad = torch.tensor(2.0) if mean else numbers(2, 3, seed=1)
    expected.backward(grad.view(expected.shape))
    loss, *saved, count, rank, ranks = cross_entropy.cross_entropy_forward_since_2_20(
        logits.detach(), labels, 0.0, mean, None, -100, False
    )
    torch.testing.assert_close(loss.view(expected.shape), expected.detach())
    found = cross_entropy.cross_entropy_backward_since_2_20(*saved, count, grad, 0.0, mean, rank, ranks, -100)
    torch.testing.assert_close(found, logits.grad)

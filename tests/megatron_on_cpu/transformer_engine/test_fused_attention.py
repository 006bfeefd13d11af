"""Fused attention, packed sequences and rotary embeddings, beside autograd through plain PyTorch."""

import math

import pytest
import torch

from megatron_on_cpu.cuda_graphs import CUDAGraph, graph
from megatron_on_cpu.transformer_engine.compiled_module import compiled_module
from megatron_on_cpu.transformer_engine.enums import (
    NVTE_Bias_Type,
    NVTE_Mask_Type,
    NVTE_QKV_Format,
    NVTE_QKV_Layout,
    NVTE_Softmax_Type,
)
from tests.megatron_on_cpu.transformer_engine import attended, called, numbers, of_attention

tex = compiled_module((2, 11))
B, H, G, D = 2, 4, 2, 8


def call(tensors, layout, mask, cu_q, cu_kv, grad, **more):
    return attended(tex, of_attention(tex, tensors, layout, mask, cu_q, cu_kv, **more), grad)


def reference(q, k, v, hidden, bias=None, sink=None):
    """Attention of one sequence, `[S, H, D]`; `hidden` `[Sq, Skv]` is True where a query does not see a key."""
    k, v = (t.repeat_interleave(H // G, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(D)
    scores = scores if bias is None else scores + bias
    scores = scores.masked_fill(hidden, float("-inf"))
    if sink is not None:
        scores = torch.cat([scores, sink.view(H, 1, 1).expand(H, q.shape[0], 1)], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weights, v)


def hidden(queries, keys, kind, left=-1):
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    distance = distance + (keys - queries if "bottom" in kind else 0)
    found = distance < 0 if "causal" in kind else torch.zeros_like(distance, dtype=torch.bool)
    return found | (distance > left) if left >= 0 else found


MASKS = {
    "none": NVTE_Mask_Type.NVTE_NO_MASK,
    "causal": NVTE_Mask_Type.NVTE_CAUSAL_MASK,
    "causal_bottom_right": NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK,
}


@pytest.mark.parametrize("order", ["sbhd", "bshd"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("what", ["plain", "bias", "sink", "off_by_one", "window"])
def test_whole_sequences(order, mask, what):
    queries, keys = 6, 9
    leaves = [numbers(B, s, h, D, seed=i).requires_grad_() for i, (s, h) in enumerate([(queries, H), (keys, G)] * 2)]
    q, k, v = leaves[0], leaves[1], leaves[3]
    grad = numbers(B, queries, H, D, seed=9)
    bias = numbers(1, H, queries, keys, seed=5).requires_grad_() if what == "bias" else None
    sink = {"sink": numbers(H, seed=6), "off_by_one": torch.zeros(H)}.get(what)
    sink = sink if sink is None else sink.requires_grad_()
    unseen = hidden(queries, keys, mask, 3 if what == "window" else -1)
    rows = [reference(q[i], k[i], v[i], unseen, None if bias is None else bias[0], sink) for i in range(B)]
    expected = torch.stack(rows)
    expected.backward(grad)
    options = {"window_size": (3, -1)} if what == "window" else {}
    if what == "bias":
        options = {"Bias": bias.detach(), "bias_type": NVTE_Bias_Type.NVTE_POST_SCALE_BIAS}
    if what == "sink":
        options = {"softmax_type": NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX}
        options["SoftmaxOffset"] = sink.detach().view(1, H, 1, 1)
    if what == "off_by_one":
        options = {"softmax_type": NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX}
    laid = (lambda t: t.transpose(0, 1)) if order == "sbhd" else (lambda t: t)
    layout = getattr(NVTE_QKV_Layout, "NVTE_" + "_".join([order.upper()] * 3))
    cu = [torch.arange(B + 1, dtype=torch.int32) * n for n in (queries, keys)]
    found = call([laid(t.detach()) for t in (q, k, v)], layout, MASKS[mask], *cu, laid(grad), **options)
    for got, leaf in zip(found[:4], (expected.detach(), q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(laid(got), leaf, rtol=1e-5, atol=1e-5)
    if bias is not None:
        torch.testing.assert_close(found[4], bias.grad, rtol=1e-5, atol=1e-5)
    if what == "sink":
        torch.testing.assert_close(found[5].view(H), sink.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gap", [0, 2], ids=["packed", "padded"])
@pytest.mark.parametrize("causal", [False, True], ids=["all", "causal"])
@pytest.mark.parametrize("lengths", [[5, 1, 7], [5, 0, 7], [0, 0, 0]], ids=["three", "two", "none"])
def test_packed_sequences(gap, causal, lengths):
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    starts = ends + gap * torch.arange(4, dtype=torch.int32)
    total = int(starts[-1])
    q, k, v = (numbers(total, h, D, seed=i).requires_grad_() for i, h in enumerate((H, G, G)))
    grad = numbers(total, H, D, seed=9)
    parts = [slice(int(s), int(s) + n) for s, n in zip(starts, lengths, strict=False)]
    expected = torch.zeros(total, H, D)
    for part, n in zip(parts, lengths, strict=True):
        expected[part] = reference(q[part], k[part], v[part], hidden(n, n, "causal" if causal else "all"))
    expected.backward(grad)
    mask = NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK if causal else NVTE_Mask_Type.NVTE_PADDING_MASK
    layout, tensors = NVTE_QKV_Layout.NVTE_THD_THD_THD, [t.detach() for t in (q, k, v)]
    padded = dict.fromkeys(("cu_seqlens_q_padded", "cu_seqlens_kv_padded"), starts)
    found = call(tensors, layout, mask, ends, ends, grad, **padded)
    for got, leaf in zip(found[:4], (expected.detach(), q.grad, k.grad, v.grad), strict=True):
        torch.testing.assert_close(got, leaf, rtol=1e-5, atol=1e-5)


def test_packed_sequences_in_a_cuda_graph():
    """Kernels read the lengths on the device; a replay with others than were captured is refused."""
    q, k, v = (numbers(8, h, D, seed=i) for i, h in enumerate((H, G, G)))
    cu = torch.tensor([0, 3, 8], dtype=torch.int32)
    mask, layout = NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK, NVTE_QKV_Layout.NVTE_THD_THD_THD
    given = of_attention(tex, (q, k, v), layout, mask, cu, cu)
    captured = CUDAGraph()
    with graph(captured):
        out, *_ = called(tex.fused_attn_fwd, given)
    q.copy_(numbers(8, H, D, seed=7))
    captured.replay()
    for part in slice(0, 3), slice(3, 8):
        n = part.stop - part.start
        torch.testing.assert_close(out[part], reference(q[part], k[part], v[part], hidden(n, n, "causal")))
    cu[1] = 4
    with pytest.raises(
        RuntimeError, match=r"cu_seqlens was \[0, 3, 8\] .* and is \[0, 4, 8\] now: .* without CUDA graphs"
    ):
        captured.replay()


def test_padded_batches():
    """Rows of padding are zeros, and their gradients do not count."""
    lengths = [3, 6]
    q, k, v, grad = (numbers(B, 6, h, D, seed=i) for i, h in enumerate((H, G, G, H)))
    cu = torch.tensor([0, 3, 9], dtype=torch.int32)
    mask = NVTE_Mask_Type.NVTE_PADDING_CAUSAL_MASK
    found = call([q, k, v], NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, mask, cu, cu, grad)
    for i, n in enumerate(lengths):
        leaves = [t[i, :n].clone().requires_grad_() for t in (q, k, v)]
        expected = reference(*leaves, hidden(n, n, "causal"))
        expected.backward(grad[i, :n])
        for got, whole in zip(found[:4], (expected.detach(), *(t.grad for t in leaves)), strict=True):
            torch.testing.assert_close(got[i, :n], whole, rtol=1e-5, atol=1e-5)
            assert not got[i, n:].any()


def test_dropout_is_the_same_forward_and_backward():
    """The gradient of the values tells which weights were kept: with one query, `dV = weights^T dO`."""
    keys = 64
    q, grad = torch.zeros(1, 1, 1, D), torch.ones(1, 1, 1, D)
    k, v = torch.zeros(1, keys, 1, D), torch.eye(keys)[None, :, None, :D]
    cu = torch.tensor([0, 1], dtype=torch.int32), torch.tensor([0, keys], dtype=torch.int32)
    layout = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD
    out, _, _, dv, *_ = call([q, k, v], layout, NVTE_Mask_Type.NVTE_NO_MASK, *cu, grad, p_dropout=0.5)
    torch.testing.assert_close(dv[0, :D, 0, 0], out[0, 0, 0])
    kept = dv[0, :, 0, 0] > 0
    assert 10 < kept.sum() < 54
    torch.testing.assert_close(dv[0, kept, 0], torch.full((int(kept.sum()), D), 2 / keys))


def test_evaluation_gives_what_training_does():
    """Transformer Engine unpacks the log-sum-exp and the seed either way."""
    q, k, v = (numbers(1, 4, 2, D, seed=seed) for seed in range(3))
    cu = torch.tensor([0, 4], dtype=torch.int32)
    layout, mask = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, NVTE_Mask_Type.NVTE_NO_MASK
    given = of_attention(tex, (q, k, v), layout, mask, cu, cu, attn_scale=0.5)
    training, evaluation = (called(tex.fused_attn_fwd, given | {"is_training": is_so}) for is_so in (True, False))
    scores = 0.5 * torch.einsum("bqhd,bkhd->bhqk", q, k)
    assert len(training) == len(evaluation) == 3
    for out, lse, _ in training, evaluation:
        torch.testing.assert_close(lse[..., 0], scores.logsumexp(-1))
        torch.testing.assert_close(out, torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v))


def test_alibi():
    """Slopes of 6 heads, of which 4 are a power of two; the bias falls with the distance."""
    q, k, v = torch.zeros(1, 3, 6, D), torch.zeros(1, 3, 6, D), torch.eye(3)[None, :, None, :].expand(1, 3, 6, 3)
    v = torch.nn.functional.pad(v, (0, D - 3))
    cu = torch.tensor([0, 3], dtype=torch.int32)
    layout, mask = NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD, NVTE_Mask_Type.NVTE_CAUSAL_MASK
    out, *_ = call([q, k, v.contiguous()], layout, mask, cu, cu, q, bias_type=NVTE_Bias_Type.NVTE_ALIBI)
    slopes = torch.tensor([2**-2, 2**-4, 2**-6, 2**-8, 2**-1, 2**-3])
    expected = (-slopes[:, None] * torch.tensor([2.0, 1.0, 0.0])).softmax(-1)
    torch.testing.assert_close(out[0, 2, :, :3], expected)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_embeddings(interleaved):
    """Turned as complex numbers are, back by the backward; under context parallelism by the positions of the chunks."""
    width, total = 6, 16
    angles = numbers(total, width // 2, seed=1)
    pairs = torch.stack([angles, angles], dim=-1).flatten(-2) if interleaved else torch.cat([angles, angles], dim=-1)
    freqs = pairs[:, None, None]
    x = numbers(total, B, H, D, seed=2)
    turning = x[..., :width]
    real, imaginary = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    turned = torch.view_as_real(torch.complex(real, imaginary) * torch.polar(torch.ones(1), angles)[:, None, None])
    turned = turned.flatten(-2) if interleaved else turned.movedim(-1, -2).flatten(-2)
    expected = torch.cat([turned, x[..., width:]], dim=-1)
    sbhd, bshd, thd = NVTE_QKV_Format.NVTE_SBHD, NVTE_QKV_Format.NVTE_BSHD, NVTE_QKV_Format.NVTE_THD
    out = tex.fused_rope_forward(x, freqs, None, sbhd, interleaved, None, 1, 0)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(tex.fused_rope_backward(out, freqs, None, sbhd, interleaved, None, 1, 0), x)
    swapped = tex.fused_rope_forward(x.transpose(0, 1), freqs, None, bshd, interleaved, None, 1, 0)
    torch.testing.assert_close(swapped, expected.transpose(0, 1))
    for rank in range(2):
        own = torch.cat([torch.arange(4) + 4 * rank, torch.arange(4) + 12 - 4 * rank])
        part = tex.fused_rope_forward(x[own], freqs, None, sbhd, interleaved, None, 2, rank)
        torch.testing.assert_close(part, expected[own])
    packed = torch.cat([x[:5, 0], x[:11, 0]])
    cu = torch.tensor([0, 5, 16], dtype=torch.int32)
    found = tex.fused_rope_forward(packed, freqs, None, thd, interleaved, cu, 1, 0)
    torch.testing.assert_close(found, torch.cat([expected[:5, 0], expected[:11, 0]]))
    qkv = numbers(total, B, G, 4 * D, seed=3)
    split = [2 * D, D, D]
    q, k, v = tex.fused_qkv_rope_forward(qkv, freqs, freqs, None, split, sbhd, interleaved, 1, 0)
    assert (q.shape[2], k.shape[2], v.shape[2]) == (2 * G, G, G)
    back = tex.fused_qkv_rope_backward(q, k, v, freqs, freqs, split, sbhd, interleaved, 1, 0)
    torch.testing.assert_close(back, qkv)

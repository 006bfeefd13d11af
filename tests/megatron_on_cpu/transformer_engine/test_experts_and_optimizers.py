"""Permutation, router and optimizer steps, beside plain PyTorch."""

import pytest
import torch

from megatron_on_cpu.transformer_engine.compiled_module import compiled_module
from megatron_on_cpu.transformer_engine.enums import DType
from megatron_on_cpu.transformer_engine.experts import permutation_by_mask as by_mask

tex = compiled_module((2, 11))
KIND = DType.kFloat32


@pytest.mark.parametrize("dropped", [0, 3])
def test_permutation_by_indices(dropped):
    tokens, indices = torch.randn(5, 4), torch.tensor([[2, 0], [0, 1], [2, 1], [0, 2], [1, 0]])
    probs, wanted = torch.rand(5, 2), 10 - dropped
    sorted_tokens, rows, _ = tex.moe_permute_fwd(tokens, KIND, indices, wanted, [], 10)
    pairs = sorted((int(indices[t, k]), 2 * t + k) for t in range(5) for k in range(2))[:wanted]
    source = torch.tensor([pair // 2 for _, pair in pairs])
    assert torch.equal(sorted_tokens, tokens[source])
    leaves = [sorted_tokens.clone().requires_grad_(), probs.clone().requires_grad_()]
    weights = leaves[1].flatten()[[pair for _, pair in pairs]]
    expected = torch.zeros(5, 4).index_add(0, source, leaves[0] * weights[:, None])
    out = tex.moe_unpermute_fwd(sorted_tokens, KIND, rows, probs, 5, 2)
    torch.testing.assert_close(out, expected.detach())
    grad = torch.randn(5, 4)
    expected.backward(grad)
    dtokens, dprobs = tex.moe_unpermute_bwd(grad, sorted_tokens, KIND, rows, probs)
    torch.testing.assert_close(dtokens, leaves[0].grad)
    torch.testing.assert_close(dprobs, leaves[1].grad)
    back = tex.moe_permute_bwd(sorted_tokens, KIND, rows, torch.empty(0), 5, 2)
    torch.testing.assert_close(back, torch.zeros(5, 4).index_add(0, source, sorted_tokens))


def test_permutation_by_mask():
    tokens, mask = torch.randn(5, 4), torch.rand(5, 3, generator=torch.Generator().manual_seed(0)) > 0.4
    probs, out_tokens = torch.rand(5, 3), int(mask.sum())
    row_map = by_mask.make_row_id_map(mask, 5, 3)
    assert row_map.shape == (5, 7)
    found, _, permuted = by_mask.permute_with_mask_map(tokens, row_map, probs, None, 5, 3, out_tokens, 4, 0)
    expert, token = mask.t().nonzero(as_tuple=True)
    assert torch.equal(found, tokens[token])
    assert torch.equal(permuted, probs[token, expert])
    leaves = [found.clone().requires_grad_(), probs.clone().requires_grad_()]
    expected = torch.zeros(5, 4).index_add(0, token, leaves[0] * leaves[1][token, expert, None])
    grad = torch.randn(5, 4)
    expected.backward(grad)
    merged, unpermuted = by_mask.unpermute_with_mask_map(found, row_map, probs, permuted, 5, 3, 4)
    torch.testing.assert_close(merged, expected.detach())
    assert torch.equal(unpermuted, probs * mask)
    gradients = by_mask.unpermute_with_mask_map_bwd_with_merging_probs(grad, row_map, found, probs, 5, 3, out_tokens, 4)
    for got, leaf in zip(gradients, leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad)


def test_chunks_are_sorted_and_put_back():
    tokens, probs = torch.arange(6.0)[:, None], torch.arange(6.0)
    rows = by_mask.make_chunk_sort_map(torch.tensor([1, 3, 2]), torch.tensor([2, 0, 1]), 6, 3)
    found, moved = by_mask.sort_chunks_by_map(tokens, rows, probs, 6, 1, True)
    assert found[:, 0].tolist() == moved.tolist() == [4, 5, 0, 1, 2, 3]
    assert by_mask.sort_chunks_by_map(found, rows, moved, 6, 1, False)[1].tolist() == probs.tolist()


def test_rows_are_padded_and_cut():
    x = torch.arange(1.0, 6.0)[:, None]
    padded, cut = torch.full((8, 1), 9.0), torch.empty(5, 1)
    tex.fused_multi_row_padding(x, padded, [3, 2], [4, 4])
    assert padded[:, 0].tolist() == [1, 2, 3, 0, 4, 5, 0, 0]
    tex.fused_multi_row_unpadding(padded, cut, [4, 4], [3, 2])
    assert torch.equal(cut, x)


@pytest.mark.parametrize("score,before", [("softmax", False), ("softmax", True), ("sigmoid", False)])
@pytest.mark.parametrize("groups", [(None, None), (2, 1)], ids=["all", "groups"])
def test_router(score, before, groups):
    logits, topk, factor = torch.randn(7, 6, requires_grad=True), 2, 2.5
    bias = torch.randn(6) if score == "sigmoid" else None
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1) if before else logits
    ranked = scores.detach() + (0 if bias is None else bias)
    if groups[0]:
        sums = ranked.view(7, 2, 3).topk(2, -1).values.sum(-1)
        closed = torch.arange(2) != sums.argmax(-1, keepdim=True)
        ranked = ranked.view(7, 2, 3).masked_fill(closed[..., None], float("-inf")).view(7, 6)
    chosen = torch.zeros(7, 6, dtype=torch.bool).scatter_(1, ranked.topk(topk).indices, True)
    if score == "sigmoid":
        kept = scores * chosen
        expected = factor * kept / (kept.sum(-1, keepdim=True) + 1e-20)
    elif before:
        expected = factor * scores * chosen
    else:
        expected = factor * scores.masked_fill(~chosen, float("-inf")).softmax(-1)
    grad = torch.randn(7, 6)
    expected.backward(grad)
    probs, mask, saved = tex.fused_topk_with_score_function_fwd(
        logits.detach(), topk, before, *groups, factor, score, bias
    )
    assert torch.equal(mask, chosen)
    torch.testing.assert_close(probs, expected.detach())
    found = tex.fused_topk_with_score_function_bwd(7, 6, mask, saved, grad, topk, before, factor, score)
    torch.testing.assert_close(found, logits.grad)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_scores_and_auxiliary_loss(score):
    logits, counts = torch.randn(7, 6, requires_grad=True), torch.tensor([1, 2, 3, 4, 2, 2])
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
    found, chosen, saved = tex.fused_score_for_moe_aux_loss_fwd(logits.detach(), 2, score)
    torch.testing.assert_close(found, scores.detach())
    assert torch.equal(chosen, torch.zeros(7, 6, dtype=torch.bool).scatter_(1, scores.topk(2).indices, True))
    loss = (scores.sum(0) * counts).sum() * 6 * 0.01 / (2 * 7 * 7)
    loss.backward()
    got, factor = tex.fused_moe_aux_loss_fwd(found, counts, 7, 6, 7, 6, 2, 0.01)
    torch.testing.assert_close(got, loss.detach())
    dscores = tex.fused_moe_aux_loss_bwd(factor, counts, 7, 6, torch.ones(()))
    torch.testing.assert_close(tex.fused_score_for_moe_aux_loss_bwd(7, 6, saved, dscores, 2, score), logits.grad)


@pytest.mark.parametrize("mode,torchs", [(0, torch.optim.Adam), (1, torch.optim.AdamW)])
def test_adam(mode, torchs):
    parameters = [torch.nn.Parameter(torch.randn(n)) for n in (5, 3)]
    ours = [p.detach().clone() for p in parameters]
    masters, halves = [p.clone() for p in ours], [p.to(torch.bfloat16) for p in ours]
    remainders, rounded = [torch.zeros(0)] * 2, [p.to(torch.bfloat16) for p in ours]
    for i, p in enumerate(ours):  # the lower bits of the masters, beside parameters that are rounded
        remainders[i] = p.view(torch.int32).to(torch.int16)
    moments = [[[torch.zeros_like(p) for p in ours] for _ in range(2)] for _ in range(3)]
    optimizer = torchs(parameters, lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    flag, hyper = torch.zeros(1, dtype=torch.int32), (1e-2, 0.8, 0.9, 1e-6)
    for step in (1, 2, 3):
        grads = [torch.randn_like(p) for p in ours]
        for p, grad in zip(parameters, grads, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        rest = (*hyper, step, mode, 1, 0.1)
        tex.multi_tensor_adam(65536, flag, [grads, ours, *moments[0]], *rest)
        tex.multi_tensor_adam(65536, flag, [grads, halves, *moments[1], masters], *rest)
        tex.multi_tensor_adam_param_remainder(65536, flag, [grads, rounded, *moments[2], remainders], *rest)
    for i, p in enumerate(parameters):
        torch.testing.assert_close(ours[i], p.detach(), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(masters[i], p.detach(), rtol=1e-6, atol=1e-7)
        assert torch.equal(halves[i], masters[i].to(torch.bfloat16))
        torch.testing.assert_close(rounded[i].float(), p.detach(), rtol=1e-2, atol=1e-2)
        high = rounded[i].view(torch.int16).int() - (remainders[i] < 0).int()
        whole = ((high << 16) | (remainders[i].int() & 0xFFFF)).view(torch.float32)
        torch.testing.assert_close(whole, p.detach(), rtol=1e-6, atol=1e-7)


def test_moments_of_a_whole_parameter_serve_its_shard():
    """The kernels take the number of elements from the gradients, as FSDP needs."""
    grad, flag = torch.randn(2, 3), torch.zeros(1, dtype=torch.int32)
    shard, whole = [torch.zeros(2, 3), torch.zeros(2, 3)], [torch.zeros(4, 3), torch.zeros(4, 3)]
    parameters = [torch.ones(2, 3), torch.ones(2, 3)]
    for parameter, moments in zip(parameters, (shard, whole), strict=True):
        tex.multi_tensor_adam(
            *(65536, flag, [[grad], [parameter], *([moment] for moment in moments)]),
            *(1e-2, 0.8, 0.9, 1e-6, 1, 1, 1, 0.1),
        )
    assert torch.equal(*parameters)
    assert not torch.equal(parameters[0], torch.ones(2, 3))
    for small, large in zip(shard, whole, strict=True):
        assert torch.equal(large[:2], small)
        assert not large[2:].any()


def test_sgd_scale_and_norm():
    parameter = torch.nn.Parameter(torch.randn(5))
    ours, moment, flag = parameter.detach().clone(), torch.zeros(5), torch.zeros(1, dtype=torch.int32)
    optimizer = torch.optim.SGD([parameter], lr=0.1, momentum=0.9, weight_decay=0.01, nesterov=True)
    for step in range(3):
        grad = torch.randn(5)
        parameter.grad = grad.clone()
        optimizer.step()
        tex.multi_tensor_sgd(1, flag, [[grad], [ours], [moment]], 0.01, 0.9, 0.0, 0.1, True, step == 0, False, 1.0)
    torch.testing.assert_close(ours, parameter.detach())
    tensors = [torch.randn(4), torch.randn(2, 3)]
    total, each = tex.multi_tensor_l2norm(1, flag, [tensors], True)
    torch.testing.assert_close(total[0], torch.cat([t.flatten() for t in tensors]).norm())
    torch.testing.assert_close(each, torch.stack([t.norm() for t in tensors]))
    scaled = [torch.empty(4), torch.empty(2, 3)]
    tex.multi_tensor_scale(1, flag, [tensors, scaled], 0.5)
    torch.testing.assert_close(scaled[1], tensors[1] / 2)
    assert flag.item() == 0
    tex.multi_tensor_scale(1, flag, [[torch.tensor([float("nan")])], [torch.empty(1)]], 1.0)
    assert flag.item() == 1

"""Fused attention as cuDNN has it: every layout, mask, bias and softmax, but neither paged caches nor FP8.

Work is in fp32, whatever the dtype of the tensors, which may be fp32 too. Backward uses the log-sum-exp and the output
that it is given. With context parallelism these are those of all keys, where the scores are of a part of them.

Shapes inside: `[B, H, S, D]`. With packed sequences (THD) the log-sum-exp is `[T, H, 1]`, else `[B, H, S, 1]`.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.emulation.transformer_engine.attention.layouts import Pack, is_served, pack_of, written
from megatron_ext.emulation.transformer_engine.attention.scores import Rules, mask_and_bias
from megatron_ext.emulation.transformer_engine.enums import (
    TORCH_DTYPES,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
    NVTE_Softmax_Type,
)

_NO_ARRAY_BIAS = (NVTE_Bias_Type.NVTE_NO_BIAS, NVTE_Bias_Type.NVTE_ALIBI)


def get_fused_attn_backend(
    is_training: bool,
    q_dtype: Any,
    kv_dtype: Any,
    qkv_layout: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    p_dropout: float,
    num_attn_heads: int,
    num_gqa_groups: int,
    max_seqlen_q: int,
    max_seqlen_kv: int,
    head_dim_qk: int,
    head_dim_v: int,
    window_size_left: int,
    window_size_right: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> Any:
    """The backend for any sequence length, or none."""
    return NVTE_Fused_Attn_Backend["NVTE_F16_arbitrary_seqlen" if is_served(q_dtype, qkv_layout) else "NVTE_No_Backend"]


def fused_attn_fwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    is_training: bool,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    fake_dtype: torch.dtype,
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    page_table_k: Tensor | None,
    page_table_v: Tensor | None,
    s_quantizer: Any,
    o_quantizer: Any,
    Bias: Tensor | None,
    SoftmaxOffset: Tensor | None,
    rng_gen: torch.Generator | None,
    rng_elts_per_thread: int,
    return_max_logit: bool,
    cuda_graph: bool,
) -> list[Any]:
    """[output, log-sum-exp, seed of the dropout], then bias and offset of the softmax where they are given.

    With `return_max_logit` the second is the largest score of each row, followed by the sum of exponentials less it.
    """
    rules = Rules(attn_scale, bias_type, attn_mask_type, softmax_type, tuple(window_size), Bias, SoftmaxOffset)
    seed = torch.empty(1, dtype=torch.int64).random_(0, 2**62, generator=rng_gen or torch.default_generator)
    rng_state = torch.cat([seed, torch.zeros_like(seed)])
    q_lengths = (cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q)
    kv_lengths = (cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv)
    outs, tops, sums = [], [], []
    packs = pack_of(qkv_layout, Q, K, V, q_lengths, kv_lengths)
    for pack in packs:
        out, top, total = _forward(pack, rules, _keep(pack, p_dropout if is_training else 0.0, rng_state))
        outs.append(out)
        tops.append(top)
        sums.append(total)
    shape = (*Q.shape[:-1], V.shape[-1])
    out = written(packs, [pack.q_rows for pack in packs], outs, Q.new_zeros(shape))
    largest, total = (_statistics(packs, found, Q) for found in (tops, sums))
    statistics = [largest, total] if return_max_logit else [largest + total.log()]
    extra = [Bias if bias_type not in _NO_ARRAY_BIAS else None, SoftmaxOffset if rules.has_offset else None]
    return [out, *statistics, rng_state, *(x for x in extra if x is not None)]


def fused_attn_bwd(
    max_seqlen_q: int,
    max_seqlen_kv: int,
    attn_scale: float,
    p_dropout: float,
    set_zero: bool,
    qkv_layout: Any,
    bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    window_size: Any,
    deterministic: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_kv: Tensor,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    O: Tensor,
    dO: Tensor,
    fake_dtype: torch.dtype,
    dqkv_type: Any,
    Aux_CTX_Tensors: list[Tensor],
    cu_seqlens_q_padded: Tensor | None,
    cu_seqlens_kv_padded: Tensor | None,
    s_quantizer: Any,
    dp_quantizer: Any,
    dqkv_quantizer: Any,
    cuda_graph: bool,
) -> list[Any]:
    """[gradients of Q, K and V, of the bias or None, of the softmax's offset or None]."""
    lse, rng_state, *extra = Aux_CTX_Tensors
    bias = extra.pop(0) if bias_type not in _NO_ARRAY_BIAS and extra else None
    offset = extra.pop(0) if softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX and extra else None
    rules = Rules(attn_scale, bias_type, attn_mask_type, softmax_type, tuple(window_size), bias, offset)
    q_lengths = (cu_seqlens_q, cu_seqlens_q_padded, max_seqlen_q)
    kv_lengths = (cu_seqlens_kv, cu_seqlens_kv_padded, max_seqlen_kv)
    packs = pack_of(qkv_layout, Q, K, V, q_lengths, kv_lengths)
    found = []
    dbias = None if bias is None else torch.zeros(bias.shape)
    doffset = None if offset is None else torch.zeros(offset.shape)
    for pack in packs:
        rows = (pack.heads_first(O), pack.heads_first(dO), pack.statistics(lse))
        dq, dk, dv, dscores, dsink = _backward(pack, rules, rows, _keep(pack, p_dropout, rng_state))
        found.append((dq, dk, dv))
        if dbias is not None:
            dbias += dscores.sum_to_size(dbias.shape)
        if doffset is not None:
            doffset += dsink.sum((0, 2, 3)).view(doffset.shape)
    dtype = TORCH_DTYPES[dqkv_type]
    grads = [
        written(packs, [getattr(p, rows) for p in packs], parts, torch.zeros(like.shape, dtype=dtype))
        for like, rows, parts in zip((Q, K, V), ("q_rows", "kv_rows", "kv_rows"), zip(*found, strict=True), strict=True)
    ]
    return [*grads, None if dbias is None else dbias.to(bias.dtype), doffset]  # type: ignore[union-attr]


def _forward(pack: Pack, rules: Rules, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Output, largest score of each row, and the sum of exponentials less it, `[B, H, S, 1]`."""
    scores = mask_and_bias(pack, rules)
    # A packed sequence may be empty: CUDA graphs are captured with lengths of 0.
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    if rules.has_offset:
        sink = rules.sink(scores)
        top = torch.maximum(top, sink)
    top = top.masked_fill(top == float("-inf"), 0.0)
    exponentials = (scores - top).exp()
    total = exponentials.sum(-1, keepdim=True)
    if rules.has_offset:
        total = total + (sink - top).exp()
    probabilities = exponentials / total.clamp(min=torch.finfo(torch.float32).tiny)
    probabilities = probabilities if keep is None else probabilities * keep
    return probabilities @ pack.v, top, total


def _backward(
    pack: Pack, rules: Rules, rows: tuple[Tensor, Tensor, Tensor], keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of queries, keys, values, scores before the mask, and of the offset of the softmax in each row."""
    out, dout, lse = rows
    scores = mask_and_bias(pack, rules)
    seen = scores > float("-inf")
    probabilities = torch.where(seen, (scores - lse).exp(), 0.0)
    dprobabilities = dout @ pack.v.transpose(-1, -2)
    used = probabilities
    if keep is not None:
        dprobabilities, used = dprobabilities * keep, probabilities * keep
    mean = (dout * out).sum(-1, keepdim=True)
    dscores = probabilities * (dprobabilities - mean)
    dsink = -(rules.sink(scores) - lse).exp() * mean if rules.has_offset else mean
    dv = used.transpose(-1, -2) @ dout
    scaled = dscores * rules.scale
    return scaled @ pack.k, pack.ungrouped(scaled.transpose(-1, -2) @ pack.q), pack.ungrouped(dv), dscores, dsink


def _keep(pack: Pack, p: float, rng_state: Tensor) -> Tensor | None:
    """What the probabilities are multiplied by in dropout, the same for the same seed and sequence."""
    if p == 0:
        return None
    generator = torch.Generator().manual_seed(int(rng_state[0]) + pack.index)
    shape = (*pack.q.shape[:-1], pack.k.shape[-2])
    return (torch.rand(shape, generator=generator) >= p).float() / (1 - p)


def _statistics(packs: list[Pack], found: list[Tensor], q: Tensor) -> Tensor:
    """`[B, H, S, 1]` of rows of equal length, `[T, H, 1]` of packed ones."""
    if not packs[0].packed:
        return found[0]
    full = torch.zeros(q.shape[0], q.shape[1], 1)
    for pack, part in zip(packs, found, strict=True):
        full[pack.q_rows] = part[0].transpose(0, 1)
    return full

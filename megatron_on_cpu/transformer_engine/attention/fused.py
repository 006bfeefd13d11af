"""Fused attention as cuDNN has it: all masks, biases and kinds of softmax, and all layouts but two kinds.

Paged caches and packed queries with keys that are not packed are refused, and so is FP8. Work is in fp32, whatever the
dtype of the tensors, which may be fp32 too. Backward uses the log-sum-exp and the output that it is given: with context
parallelism these are of all keys, while the scores are of a part of the keys.

Shapes inside: `[B, H, S, D]`. With packed sequences (THD) the log-sum-exp is `[T, H, 1]`, else `[B, H, S, 1]`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.transformer_engine.attention.layouts import Pack, is_served, pack_of, written
from megatron_on_cpu.transformer_engine.attention.scores import has_offset, mask_and_bias, sink
from megatron_on_cpu.transformer_engine.enums import (
    TORCH_DTYPES,
    NVTE_Bias_Type,
    NVTE_Fused_Attn_Backend,
)
from megatron_on_cpu.transformer_engine.parameters import taking

_FORWARD = (
    "max_seqlen_q max_seqlen_kv is_training attn_scale p_dropout set_zero qkv_layout bias_type attn_mask_type "
    "softmax_type window_size cu_seqlens_q cu_seqlens_kv Q K V fake_dtype cu_seqlens_q_padded cu_seqlens_kv_padded "
    "page_table_k page_table_v s_quantizer o_quantizer Bias SoftmaxOffset rng_gen rng_elts_per_thread "
    "return_max_logit cuda_graph"
)
_BACKWARD = (
    "max_seqlen_q max_seqlen_kv attn_scale p_dropout set_zero qkv_layout bias_type attn_mask_type softmax_type "
    "window_size deterministic cu_seqlens_q cu_seqlens_kv Q K V O dO fake_dtype dqkv_type Aux_CTX_Tensors "
    "cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer dp_quantizer dqkv_quantizer cuda_graph"
)
_NO_ARRAY_BIAS = (NVTE_Bias_Type.NVTE_NO_BIAS, NVTE_Bias_Type.NVTE_ALIBI)


@taking(
    "is_training q_dtype kv_dtype qkv_layout bias_type attn_mask_type softmax_type p_dropout num_attn_heads "
    "num_gqa_groups max_seqlen_q max_seqlen_kv head_dim_qk head_dim_v window_size_left window_size_right "
    "return_max_logit cuda_graph"
)
def get_fused_attn_backend(given: Any) -> Any:
    """Return the backend for any sequence length, or NVTE_No_Backend for FP8 and paged caches."""
    served = is_served(given.q_dtype, given.qkv_layout)
    return NVTE_Fused_Attn_Backend["NVTE_F16_arbitrary_seqlen" if served else "NVTE_No_Backend"]


def attend(given: Any) -> list[Any]:
    """Return [output, log-sum-exp, seed of the dropout], then bias and offset of the softmax where they are given.

    With `return_max_logit` the log-sum-exp is replaced by the largest score of each row and the sum of `exp(score -
    largest)`, two tensors.
    """
    packs = _packs(given)
    seed = torch.empty(1, dtype=torch.int64).random_(0, 2**62, generator=given.rng_gen or torch.default_generator)
    rng_state = torch.cat([seed, torch.zeros_like(seed)])
    p_dropout = given.p_dropout if given.is_training else 0.0
    found = [_forward(pack, given, _keep(pack, p_dropout, rng_state)) for pack in packs]
    outs, tops, sums = zip(*found, strict=True)
    shape = (*given.Q.shape[:-1], given.V.shape[-1])
    out = written(packs, outs, given.Q.new_zeros(shape), of_queries=True)
    largest, total = (_statistics(packs, parts, given.Q) for parts in (tops, sums))
    statistics = [largest, total] if given.return_max_logit else [largest + total.log()]
    extra = [given.Bias] * (given.bias_type not in _NO_ARRAY_BIAS) + [given.SoftmaxOffset] * has_offset(given)
    return [out, *statistics, rng_state, *(x for x in extra if x is not None)]


def gradients(given: Any, dtype: torch.dtype) -> list[Any]:
    """Return the gradients of [Q, K, V, bias or None, offset of the softmax or None], the first three in `dtype`."""
    lse, rng_state, *extra = given.Aux_CTX_Tensors
    bias = given.Bias = extra.pop(0) if given.bias_type not in _NO_ARRAY_BIAS and extra else None
    offset = given.SoftmaxOffset = extra.pop(0) if has_offset(given) and extra else None
    packs = _packs(given)
    found = []
    dbias = None if bias is None else torch.zeros(bias.shape)
    doffset = None if offset is None else torch.zeros(offset.shape)
    for pack in packs:
        rows = (pack.heads_first(given.O), pack.heads_first(given.dO), pack.statistics(lse))
        dq, dk, dv, dscores, dsink = _backward(pack, given, rows, _keep(pack, given.p_dropout, rng_state))
        found.append((dq, dk, dv))
        if dbias is not None:
            dbias += dscores.sum_to_size(dbias.shape)
        if doffset is not None:
            doffset += dsink.sum((0, 2, 3)).view(doffset.shape)
    dq, dk, dv = (torch.zeros(like.shape, dtype=dtype) for like in (given.Q, given.K, given.V))
    for full, parts in zip((dq, dk, dv), zip(*found, strict=True), strict=True):
        written(packs, parts, full, of_queries=full is dq)
    return [dq, dk, dv, None if dbias is None else dbias.to(bias.dtype), doffset]  # type: ignore[union-attr]


fused_attn_fwd = taking(_FORWARD)(attend)


@taking(_BACKWARD)
def fused_attn_bwd(given: Any) -> list[Any]:
    """Return the gradients of attention, see `gradients`."""
    return gradients(given, TORCH_DTYPES[given.dqkv_type])


def _packs(given: Any) -> list[Pack]:
    q_lengths = given.cu_seqlens_q, given.cu_seqlens_q_padded, given.max_seqlen_q
    kv_lengths = given.cu_seqlens_kv, given.cu_seqlens_kv_padded, given.max_seqlen_kv
    return pack_of(given.qkv_layout, given.Q, given.K, given.V, q_lengths, kv_lengths)


def _forward(pack: Pack, given: Any, keep: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output, and of each row the largest score and the sum of `exp(score - largest)`, `[B, H, S, 1]`."""
    scores = mask_and_bias(pack, given)
    # A packed sequence may be empty: CUDA graphs are captured with lengths of 0.
    top = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    if has_offset(given):
        top = torch.maximum(top, sink(given, scores))
    top = top.masked_fill(top == float("-inf"), 0.0)
    exponentials = (scores - top).exp()
    total = exponentials.sum(-1, keepdim=True)
    if has_offset(given):
        total = total + (sink(given, scores) - top).exp()
    probabilities = exponentials / total.clamp(min=torch.finfo(torch.float32).tiny)
    probabilities = probabilities if keep is None else probabilities * keep
    return probabilities @ pack.v, top, total


def _backward(
    pack: Pack, given: Any, rows: tuple[Tensor, Tensor, Tensor], keep: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of queries, keys, values, masked scores, and of the softmax's offset in each row."""
    out, dout, lse = rows
    scores = mask_and_bias(pack, given)
    seen = scores > float("-inf")
    probabilities = torch.where(seen, (scores - lse).exp(), 0.0)
    dprobabilities = dout @ pack.v.transpose(-1, -2)
    used = probabilities
    if keep is not None:
        dprobabilities, used = dprobabilities * keep, probabilities * keep
    mean = (dout * out).sum(-1, keepdim=True)
    dscores = probabilities * (dprobabilities - mean)
    dsink = -(sink(given, scores) - lse).exp() * mean if has_offset(given) else mean
    dv = used.transpose(-1, -2) @ dout
    scaled = dscores * given.attn_scale
    return scaled @ pack.k, pack.ungrouped(scaled.transpose(-1, -2) @ pack.q), pack.ungrouped(dv), dscores, dsink


def _keep(pack: Pack, p: float, rng_state: Tensor) -> Tensor | None:
    """Return the factors of dropout for the probabilities, the same for the same seed and sequence, or None."""
    if p == 0:
        return None
    generator = torch.Generator().manual_seed(int(rng_state[0]) + pack.index)
    shape = (*pack.q.shape[:-1], pack.k.shape[-2])
    return (torch.rand(shape, generator=generator) >= p).float() / (1 - p)


def _statistics(packs: list[Pack], found: Sequence[Tensor], q: Tensor) -> Tensor:
    """Join statistics of rows: `[B, H, S, 1]` without packing, `[T, H, 1]` of packed sequences."""
    if not packs[0].packed:
        return found[0]
    full = torch.zeros(q.shape[0], q.shape[1], 1)
    for pack, part in zip(packs, found, strict=True):
        full[pack.q_rows] = part[0].transpose(0, 1)
    return full

"""Attention as Transformer Engine 2.20 calls it, expressed by the functions of 2.11."""

from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.transformer_engine.attention import fused, packed_sequences
from megatron_on_cpu.transformer_engine.attention.layouts import is_served
from megatron_on_cpu.transformer_engine.enums import NVTE_Bias_Type, NVTE_Mask_Type
from megatron_on_cpu.transformer_engine.parameters import taking
from megatron_on_cpu.transformer_engine.since_2_20.enums import NVTE_Fused_Attn_Backend

_FORWARD = (
    "max_seqlen_q max_seqlen_kv is_training attn_scale p_dropout set_zero qkv_layout o_format qkv_scale_inv_format "
    "bias_type attn_mask_type softmax_type window_size bottom_right_diagonal cu_seqlens_q cu_seqlens_kv Q K V "
    "fake_dtype cu_seqlens_q_padded cu_seqlens_kv_padded page_table_k page_table_v s_quantizer o_quantizer Bias "
    "SoftmaxOffset rng_gen rng_elts_per_thread return_max_logit cuda_graph"
)
_BACKWARD = (
    "max_seqlen_q max_seqlen_kv attn_scale p_dropout set_zero qkv_layout o_format do_format dqkv_layout "
    "qkv_scale_inv_format do_scale_inv_format bias_type attn_mask_type softmax_type window_size "
    "bottom_right_diagonal deterministic cu_seqlens_q cu_seqlens_kv Q K V O dO fake_dtype Aux_CTX_Tensors "
    "cu_seqlens_q_padded cu_seqlens_kv_padded s_quantizer dp_quantizer dqkv_quantizer cuda_graph"
)


def get_fused_attn_backend(fused_attn_params: Any) -> tuple[Any, str]:
    """Return (the backend, the reason if there is none) for TE's `FusedAttentionParams`."""
    if is_served(fused_attn_params.qkv_dtype, fused_attn_params.qkv_layout):
        return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "the CPU emulation has neither attention in FP8 nor paged caches"


@taking(_FORWARD)
def fused_attn_fwd(given: Any) -> list[Any]:
    """Return [output, log-sum-exp, with `return_max_logit` the largest score of each row, seed, bias, offset]."""
    _refuse_other_diagonal(given)
    found = fused.attend(given)
    if given.return_max_logit:
        largest, total = found[1:3]
        found[1:3] = [largest + total.log(), largest]
    return found


@taking(_BACKWARD)
def fused_attn_bwd(given: Any) -> list[Any]:
    """Return the gradients of attention; those of Q, K and V have the dtype that the three stand for."""
    _refuse_other_diagonal(given)
    return fused.gradients(given, given.fake_dtype)


def thd_out_correction(
    out: Tensor,
    out_per_step: Tensor,
    old_lse: Tensor,
    lse: Tensor,
    lse_per_step: Tensor,
    cu_seqlens: Tensor,
    only_second_half: bool,
    lse_packed: bool,
) -> None:
    """Add the output of a step, `[T, H, D]`, to the output of the steps before, each weighted by its log-sum-exp.

    The sum is written into `out`. In 2.11 the output of the steps before has its weight already.
    """
    before, before_lse = out, old_lse
    if only_second_half:
        before = packed_sequences.thd_read_half_tensor(out, cu_seqlens, 1)
        before_lse = packed_sequences.thd_read_second_half_lse(old_lse, cu_seqlens, lse_packed, lse_per_step.shape[-1])
    total = torch.zeros_like(out, dtype=torch.float32)
    for part, part_lse in (before, before_lse), (out_per_step, lse_per_step):
        packed_sequences.thd_out_correction(total, part, lse, part_lse, cu_seqlens, only_second_half, lse_packed)
    if only_second_half:
        second = packed_sequences.thd_read_half_tensor(total, cu_seqlens, 1)
        packed_sequences.thd_grad_correction(out, second, cu_seqlens, "none", "copy")
    else:
        packed_sequences.thd_grad_correction(out, total, cu_seqlens, "copy", "copy")


def _refuse_other_diagonal(given: Any) -> None:
    """Refuse a bottom-right diagonal that windows or ALiBi would use without a causal mask."""
    mask = given.attn_mask_type
    counts = tuple(given.window_size) != (-1, -1) or given.bias_type == NVTE_Bias_Type.NVTE_ALIBI
    uneven = mask == NVTE_Mask_Type.NVTE_NO_MASK and given.max_seqlen_q != given.max_seqlen_kv
    if given.bottom_right_diagonal and counts and (uneven or mask == NVTE_Mask_Type.NVTE_PADDING_MASK):
        raise NotImplementedError(
            "bottom_right_diagonal is True with a window or ALiBi and no causal mask: the CPU emulation of "
            "Transformer Engine aligns these at the top left; use a causal mask or bottom_right_diagonal=False"
        )

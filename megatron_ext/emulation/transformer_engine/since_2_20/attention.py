"""Attention as 2.20 of Transformer Engine calls it, in terms of what 2.11 has."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_ext.emulation.transformer_engine.attention import fused, packed_sequences
from megatron_ext.emulation.transformer_engine.attention.layouts import is_served
from megatron_ext.emulation.transformer_engine.enums import TORCH_DTYPES, NVTE_Bias_Type, NVTE_Mask_Type
from megatron_ext.emulation.transformer_engine.since_2_20.enums import NVTE_Fused_Attn_Backend


def get_fused_attn_backend(fused_attn_params: Any) -> tuple[Any, str]:
    """(the backend, why there is none) for TE's `FusedAttentionParams`."""
    if is_served(fused_attn_params.qkv_dtype, fused_attn_params.qkv_layout):
        return NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen, ""
    return NVTE_Fused_Attn_Backend.NVTE_No_Backend, "the CPU emulation has neither attention in FP8 nor paged caches"


def _taking_more(of_2_11: Callable[..., Any], **added: str) -> Callable[[Callable[..., list[Any]]], Any]:
    """Makes a function of 2.20 of one that is called with all arguments by name, and with those that 2.11 knows.

    It takes what the function of 2.11 does but for `dqkv_type`, and behind some of that what is `added`.
    """
    known = inspect.signature(of_2_11).parameters
    names = [name for before in known for name in (before, *added.get(before, "").split()) if name != "dqkv_type"]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def decorate(function: Callable[..., list[Any]]) -> Any:
        def call(*args: Any, **kwargs: Any) -> list[Any]:
            given = signature.bind(*args, **kwargs).arguments
            _refuse_other_diagonal(given)
            return function(given, {name: x for name, x in given.items() if name in known})

        call.__signature__ = signature  # type: ignore[attr-defined]
        call.__doc__ = function.__doc__
        return call

    return decorate


@_taking_more(fused.fused_attn_fwd, qkv_layout="o_format qkv_scale_inv_format", window_size="bottom_right_diagonal")
def fused_attn_fwd(given: dict[str, Any], known: dict[str, Any]) -> list[Any]:
    """[output, log-sum-exp, with `return_max_logit` the largest score of each row, seed, ...]."""
    found = fused.fused_attn_fwd(**known)
    if given["return_max_logit"]:
        largest, total = found[1:3]
        found[1:3] = [largest + total.log(), largest]
    return found


@_taking_more(
    fused.fused_attn_bwd,
    qkv_layout="o_format do_format dqkv_layout qkv_scale_inv_format do_scale_inv_format",
    window_size="bottom_right_diagonal",
)
def fused_attn_bwd(given: dict[str, Any], known: dict[str, Any]) -> list[Any]:
    """As before; gradients have the dtype that Q, K and V stand for."""
    (dqkv_type,) = (number for number, dtype in TORCH_DTYPES.items() if dtype == given["fake_dtype"])
    return fused.fused_attn_bwd(**known, dqkv_type=dqkv_type)


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
    """Adds the output of a step, `[T, H, D]`, to that of the steps before, in place, each weighted by its log-sum-exp.

    In 2.11 what was there before had its weight already.
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


def _refuse_other_diagonal(given: dict[str, Any]) -> None:
    """A diagonal counts in windows and in ALiBi; that of causal masks goes with the mask."""
    mask = given["attn_mask_type"]
    counts = tuple(given["window_size"]) != (-1, -1) or given["bias_type"] == NVTE_Bias_Type.NVTE_ALIBI
    uneven = mask == NVTE_Mask_Type.NVTE_NO_MASK and given["max_seqlen_q"] != given["max_seqlen_kv"]
    if given["bottom_right_diagonal"] and counts and (uneven or mask == NVTE_Mask_Type.NVTE_PADDING_MASK):
        raise NotImplementedError(
            "bottom_right_diagonal is True with a window or ALiBi and no causal mask: the CPU emulation of "
            "Transformer Engine aligns these at the top left; use a causal mask or bottom_right_diagonal=False"
        )

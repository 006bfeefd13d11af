"""Scores of attention: scaled products with bias and mask.

`given` has the arguments of `fused_attn_fwd`. In a window (left, right), -1 means no limit.
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.transformer_engine.attention.layouts import Pack
from megatron_on_cpu.transformer_engine.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_Softmax_Type


def has_offset(given: Any) -> bool:
    """Tell whether the softmax has an additional column: 0, or a learned number for each head."""
    return bool(given.softmax_type != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX)


def sink(given: Any, scores: Tensor) -> Tensor:
    """Return the additional column of the softmax, `[1, H, 1, 1]`."""
    if given.softmax_type == NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX or given.SoftmaxOffset is None:
        return scores.new_zeros(1, scores.shape[1], 1, 1)
    return given.SoftmaxOffset.detach().float().view(1, -1, 1, 1)


def mask_and_bias(pack: Pack, given: Any) -> Tensor:
    """Return the scores `[B, H, Sq, Skv]` in fp32, -inf where a query does not see a key."""
    scores = pack.q @ pack.k.transpose(-1, -2)
    if given.bias_type == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS and given.Bias is not None:
        scores = scores + given.Bias.float()
    scores = scores * given.attn_scale
    if given.bias_type == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS and given.Bias is not None:
        scores = scores + given.Bias.float()
    distance = _distance(pack, given)
    if given.bias_type == NVTE_Bias_Type.NVTE_ALIBI:
        scores = scores - _alibi_slopes(scores.shape[1]).view(1, -1, 1, 1) * distance.abs()
    return scores.masked_fill(_hidden(pack, given, distance), float("-inf"))


def _distance(pack: Pack, given: Any) -> Tensor:
    """Return query position minus key position, `[1 or B, 1, Sq, Skv]`; a bottom-right mask aligns the last ones."""
    queries, keys = pack.q.shape[2], pack.k.shape[2]
    distance = (torch.arange(queries)[:, None] - torch.arange(keys)).view(1, 1, queries, keys)
    if given.attn_mask_type == NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK:
        return distance + (keys - queries)
    if given.attn_mask_type == NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK:
        return distance + (pack.kv_lengths - pack.q_lengths).view(-1, 1, 1, 1)
    return distance


def _hidden(pack: Pack, given: Any, distance: Tensor) -> Tensor:
    kinds = NVTE_Mask_Type
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if given.attn_mask_type not in (kinds.NVTE_NO_MASK, kinds.NVTE_PADDING_MASK):
        hidden = hidden | (distance < 0)
    left, right = given.window_size
    if left >= 0:
        hidden = hidden | (distance > left)
    if right >= 0:
        hidden = hidden | (distance < -right)
    padded = (
        kinds.NVTE_PADDING_MASK,
        kinds.NVTE_PADDING_CAUSAL_MASK,
        kinds.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
    )
    if given.attn_mask_type in padded:
        rows = torch.arange(pack.q.shape[2]).view(1, 1, -1, 1) >= pack.q_lengths.view(-1, 1, 1, 1)
        columns = torch.arange(pack.k.shape[2]).view(1, 1, 1, -1) >= pack.kv_lengths.view(-1, 1, 1, 1)
        hidden = hidden | rows | columns
    return hidden


def _alibi_slopes(heads: int) -> Tensor:
    """Return the slopes: 2^(-8 i / n), i = 1..n, for the largest power of two n up to `heads`, then values between."""
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]
    return torch.tensor(slopes)

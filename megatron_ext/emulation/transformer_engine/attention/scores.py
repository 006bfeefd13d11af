"""Scores of attention: scaled products with bias and mask."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ext.emulation.transformer_engine.attention.layouts import Pack
from megatron_ext.emulation.transformer_engine.enums import NVTE_Bias_Type, NVTE_Mask_Type, NVTE_Softmax_Type


@dataclass
class Rules:
    """What a call says of its scores. `window` is (left, right), -1 for no end."""

    scale: float
    bias_type: Any
    mask: Any
    softmax: Any
    window: tuple[int, int]
    bias: Tensor | None
    offset: Tensor | None

    @property
    def has_offset(self) -> bool:
        """Whether the softmax has a column of its own in every row: 0, or a learned number for each head."""
        return bool(self.softmax != NVTE_Softmax_Type.NVTE_VANILLA_SOFTMAX)

    def sink(self, scores: Tensor) -> Tensor:
        """That column, `[1, H, 1, 1]`."""
        if self.softmax == NVTE_Softmax_Type.NVTE_OFF_BY_ONE_SOFTMAX or self.offset is None:
            return scores.new_zeros(1, scores.shape[1], 1, 1)
        return self.offset.detach().float().view(1, -1, 1, 1)


def mask_and_bias(pack: Pack, rules: Rules) -> Tensor:
    """Scores `[B, H, Sq, Skv]` in fp32, -inf where a query does not see a key."""
    scores = pack.q @ pack.k.transpose(-1, -2)
    if rules.bias_type == NVTE_Bias_Type.NVTE_PRE_SCALE_BIAS and rules.bias is not None:
        scores = scores + rules.bias.float()
    scores = scores * rules.scale
    if rules.bias_type == NVTE_Bias_Type.NVTE_POST_SCALE_BIAS and rules.bias is not None:
        scores = scores + rules.bias.float()
    distance = _distance(pack, rules)
    if rules.bias_type == NVTE_Bias_Type.NVTE_ALIBI:
        scores = scores - _alibi_slopes(scores.shape[1]).view(1, -1, 1, 1) * distance.abs()
    return scores.masked_fill(_hidden(pack, rules, distance), float("-inf"))


def _distance(pack: Pack, rules: Rules) -> Tensor:
    """Position of the query less that of the key, `[B, 1, Sq, Skv]`; the last ones meet with a bottom-right mask."""
    queries, keys = pack.q.shape[2], pack.k.shape[2]
    distance = (torch.arange(queries)[:, None] - torch.arange(keys)).view(1, 1, queries, keys)
    if rules.mask == NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK:
        return distance + (keys - queries)
    if rules.mask == NVTE_Mask_Type.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK:
        return distance + (pack.kv_lengths - pack.q_lengths).view(-1, 1, 1, 1)
    return distance


def _hidden(pack: Pack, rules: Rules, distance: Tensor) -> Tensor:
    kinds = NVTE_Mask_Type
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if rules.mask not in (kinds.NVTE_NO_MASK, kinds.NVTE_PADDING_MASK):
        hidden = hidden | (distance < 0)
    left, right = rules.window
    if left >= 0:
        hidden = hidden | (distance > left)
    if right >= 0:
        hidden = hidden | (distance < -right)
    padded = (
        kinds.NVTE_PADDING_MASK,
        kinds.NVTE_PADDING_CAUSAL_MASK,
        kinds.NVTE_PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
    )
    if rules.mask in padded:
        rows = torch.arange(pack.q.shape[2]).view(1, 1, -1, 1) >= pack.q_lengths.view(-1, 1, 1, 1)
        columns = torch.arange(pack.k.shape[2]).view(1, 1, 1, -1) >= pack.kv_lengths.view(-1, 1, 1, 1)
        hidden = hidden | rows | columns
    return hidden


def _alibi_slopes(heads: int) -> Tensor:
    """2^(-8/n), its powers, for the n heads up to a power of two; those beyond lie between them."""
    n = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (i + 1) / n) for i in range(n)]
    slopes += [2 ** (-4 * (2 * i + 1) / n) for i in range(heads - n)]
    return torch.tensor(slopes)

"""Rows of a micro-batch padded or packed as the model takes them, and the model's results unpacked to rows.

Legend: B rows, S positions of the longest, T tokens of a pack.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def inside_rows(data: Mapping[str, Any]) -> Tensor:
    """bool `[B, S]`: the tokens of right-padded rows, whose "input_lengths" may be missing if they have no padding."""
    tokens_BS = data["input_ids"]
    column_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    lengths = data.get("input_lengths")
    return torch.ones_like(tokens_BS, dtype=torch.bool) if lengths is None else column_S < lengths[:, None]


def counted(data: Mapping[str, Any]) -> Tensor:
    """bool `[B, S]`: the tokens of rows, but for those where `token_mask` `[B, S]` or `sample_mask` `[B]` is 0."""
    counts_BS = inside_rows(data)
    if (tokens := data.get("token_mask")) is not None:
        counts_BS = counts_BS & (tokens != 0)
    if (rows := data.get("sample_mask")) is not None:
        counts_BS = counts_BS & (rows != 0)[:, None]
    return counts_BS


@dataclass(frozen=True)
class Rows:
    """Right-padded rows.

    Attributes:
        tokens: `[B, S]`, or packed `[1, T]`.
        cu_seqlens: where packed documents begin, and the last one ends; None: not packed.
        inside_BS: bool, the tokens of the rows.
        place_BS: packed, the place of each position; those outside the rows have any.
    """

    tokens: Tensor
    inside_BS: Tensor
    cu_seqlens: Tensor | None = None
    place_BS: Tensor | None = None

    @classmethod
    def of(cls, data: Mapping[str, Any], pack: bool, multiple: int = 1) -> "Rows":
        """With `pack` the rows are laid end to end, each in a multiple of `multiple` places."""
        tokens_BS, inside_BS = data["input_ids"], inside_rows(data)
        if not pack:
            return cls(tokens_BS, inside_BS)
        lengths_B = inside_BS.sum(1)
        places_B = (lengths_B + multiple - 1) // multiple * multiple
        ends_B = places_B.cumsum(0)
        tokens_T = tokens_BS.new_zeros(int(ends_B[-1]))
        place_BS = (ends_B - places_B)[:, None] + torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        tokens_T[place_BS[inside_BS]] = tokens_BS[inside_BS]
        cu_seqlens = torch.cat([ends_B.new_zeros(1), ends_B])
        return cls(tokens_T[None], inside_BS, cu_seqlens, place_BS.where(inside_BS, 0))

    def laid(self, x_BSK: Tensor) -> Tensor:
        """Numbers of each position as `tokens` lie; 0 where there is no token."""
        if self.place_BS is None:
            return x_BSK
        laid_TK = x_BSK.new_zeros(self.tokens.shape[1], x_BSK.shape[2])
        laid_TK[self.place_BS[self.inside_BS]] = x_BSK[self.inside_BS]
        return laid_TK[None]

    def labels_that_count(self, data: Mapping[str, Any]) -> Tensor:
        """`tokens`, with -100 where one does not count."""
        return self.tokens.masked_fill(self.laid(counted(data)[..., None])[..., 0].logical_not(), -100)

    def at_positions(self, found: Tensor) -> Tensor:
        """`[B, S, ...]` of `found`, one for each of `tokens`; 0 outside the rows."""
        rows = found if self.place_BS is None else found[0][self.place_BS]
        return rows.where(self._like(self.inside_BS, rows), 0)

    def at_tokens(self, found: Tensor) -> Tensor:
        """`[B, S, ...]` of what was computed at each token for the one after it; 0 for the first, and outside."""
        rows = self.at_positions(found).roll(1, 1)
        counts_BS = self.inside_BS.index_fill(1, torch.zeros(1, dtype=torch.int64, device=rows.device), False)
        return rows.where(self._like(counts_BS, rows), 0)

    @staticmethod
    def _like(mask_BS: Tensor, rows: Tensor) -> Tensor:
        return mask_BS.view(*mask_BS.shape, *[1] * (rows.dim() - 2))

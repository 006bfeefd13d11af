"""Rows of a micro-batch through the model, side by side or packed, and their log-probabilities back as rows.

Legend: B rows, S positions of the longest, T tokens of a pack.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# From tokens [B, S], or packed ones [1, T] and where documents begin, to each position's next token's log-probability.
NextTokenLogProbs = Callable[[Tensor, Tensor | None], Tensor]


def row_log_probs(
    next_token_log_probs: NextTokenLogProbs, data: Mapping[str, Any], pack: bool, multiple: int = 1
) -> Tensor:
    """fp32 `[B, S]`: the log-probability of each token given those before it; 0 for the first, and behind a row's end.

    With `pack` the rows are laid end to end, each in a multiple of `multiple` places; else all positions are computed.
    """
    tokens_BS = data["input_ids"]
    column_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    lengths = data.get("input_lengths")
    lengths_B = tokens_BS.new_full(tokens_BS.shape[:1], tokens_BS.shape[1]) if lengths is None else lengths
    counts_BS = (column_S > 0) & (column_S < lengths_B[:, None])
    if not pack:
        found_BS = next_token_log_probs(tokens_BS, None).roll(1, 1)
        return found_BS.where(counts_BS, 0.0)
    places_B = (lengths_B + multiple - 1) // multiple * multiple
    ends_B = places_B.cumsum(0)
    start_B = ends_B - places_B
    tokens_T = tokens_BS.new_zeros(int(ends_B[-1]))
    is_token_BS = column_S < lengths_B[:, None]
    place_BS = start_B[:, None] + column_S
    tokens_T[place_BS[is_token_BS]] = tokens_BS[is_token_BS]
    cu_seqlens = torch.cat([ends_B.new_zeros(1), ends_B])
    found_T = next_token_log_probs(tokens_T[None], cu_seqlens)[0]
    # The log-probability of a token was computed at the one before it.
    return found_T[(place_BS - 1).where(counts_BS, 0)].where(counts_BS, 0.0)

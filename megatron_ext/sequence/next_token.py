"""Labels from token ids: the next tokens. No other module shifts labels."""

import torch
from torch import Tensor


def next_tokens(
    tokens: Tensor,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_padded: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """Return for every token the next token, and `ignore_index` where there is none.

    Args:
        tokens: `[..., S]`, whole sequences of token ids of any integer dtype, or of weights of any floating dtype.
        cu_seqlens: integers `[documents + 1]`, the cumulative lengths of packed documents. The last token of a document
            has no next token.
        cu_seqlens_padded: the cumulative lengths with the padding after each document; None: there is no padding.

    Returns:
        A tensor of the shape of `tokens`, int64, or the floating dtype of `tokens`. No host synchronisation.
    """
    positions = tokens.shape[-1]
    labels = (tokens if tokens.is_floating_point() else tokens.to(torch.int64)).roll(-1, -1)
    place = torch.arange(positions, device=tokens.device)
    if cu_seqlens is None:
        return labels.where(place + 1 < positions, ignore_index)
    start = cu_seqlens if cu_seqlens_padded is None else cu_seqlens_padded
    documents = start.shape[0] - 1
    if documents < 1:
        return torch.full_like(labels, ignore_index)
    document = torch.searchsorted(start[1:].contiguous(), place.to(start.dtype), right=True)
    known = document.clamp(max=documents - 1)
    has_next = (place - start[known] + 1 < cu_seqlens.diff()[known]) & (document < documents)
    return labels.where(has_next, ignore_index)

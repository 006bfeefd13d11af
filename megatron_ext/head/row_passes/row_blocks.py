"""Rows of logits to work on at a time, where a pass makes temporaries of their size."""

from torch import Tensor


def blocks(z_TV: Tensor, more: float = 1) -> list[slice]:
    """Rows to work on at a time with a few temporaries of their size, or of a `more`th of it: a small part of them."""
    tokens, columns = z_TV.shape
    step = max(1, int(more * (1 << (24 if z_TV.is_cuda else 16))) // max(columns, 1))
    return [slice(at, min(at + step, tokens)) for at in range(0, tokens, step)]

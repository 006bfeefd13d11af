"""Checks of token ids, k and top-p, each a ValueError; how they are raised: see `argument_checks.size_fault`."""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.validation.argument_checks import INTEGERS, SizeFault, check_integers
from megatron_ext.head.validation.option_checks import check_number, is_int
from megatron_ext.numerics.readable_values import check_plain, check_within, has_values, raise_if


def filters(top_k: Any, top_p: Any) -> bool:
    """Return whether top-k or top-p is on, which are checked."""
    if top_k is not None and not (is_int(top_k, -1) and top_k != 0):
        raise ValueError(f"top_k is {top_k!r}: it must be an int of at least 1; None or -1 turns it off")
    check_number("top_p", top_p, "in (0, 1]", lambda x: 0 < x <= 1, "1.0 turns it off")
    return top_k not in (None, -1) or top_p < 1


def check_k(argument: str, k: Any, size: int) -> None:
    if not is_int(k, 1) or k > size:
        kind = SizeFault if is_int(k, 1) else ValueError
        raise kind(f"{argument} is {k!r}: it must be an int from 1 to the vocabulary's size {size}")


def check_ids(indices: Tensor, size: int) -> None:
    check_integers("indices", indices)
    if indices.dim() == 0 or indices.shape[-1] == 0:
        raise ValueError(f"indices has shape {tuple(indices.shape)}: it must be [..., K] with K at least 1")
    fix = "; clamp those of tokens that do not count and mask their results"
    check_within("indices", indices, size, fix)


def check_kept_shapes(labels: Tensor, offsets: Any, ids: Any) -> None:
    """Raises ValueError unless `offsets` and `ids` are integers of one dim, an offset for each label and one more."""
    for name, x in (("offsets", offsets), ("ids", ids)):
        check_plain(name, x)
        if not isinstance(x, Tensor) or x.dtype not in INTEGERS or x.dim() != 1:
            found = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} is {found}: it must be a tensor of integers with one dim; use torch.tensor")
    if offsets.shape[0] != labels.numel() + 1:
        raise ValueError(
            f"offsets has {offsets.shape[0]} entries for {labels.numel()} labels: it must have one for each label and "
            f"one more; repeat an offset where a token was not sampled"
        )


def check_kept_rows(labels: Tensor, offsets: Tensor, ids: Tensor, size: int, ignore_index: int) -> None:
    """Raises ValueError unless `ids` are of the vocabulary, none twice at a token, and each label is among its own."""
    if not has_values(labels) or not has_values(offsets) or not has_values(ids):
        return
    offsets, ids, count = offsets.to(labels.device).long(), ids.to(labels.device).long(), ids.shape[0]
    lengths = offsets.diff()
    raise_if(
        (offsets[0] != 0) | (offsets[-1] != count) | (lengths < 0).any(),
        f"offsets do not cut {count} ids into rows: they must begin with 0, never fall and end with {count}; pass the "
        f"cumulative numbers of kept ids",
    )
    check_within("ids", ids, size)
    token = torch.searchsorted(offsets[1:], torch.arange(count, device=ids.device), right=True)
    place = (token * size + ids).sort().values
    raise_if((place.diff() == 0).any(), "ids holds one twice at one token: each must be there once")
    flat = labels.reshape(-1).long()
    kept = torch.zeros(flat.shape[0] + 1, dtype=torch.bool, device=ids.device)
    token = token.clamp(max=flat.shape[0] - 1) if flat.shape[0] else token
    kept[token.where(flat[token] == ids, flat.shape[0]) if flat.shape[0] else token] = True
    raise_if(
        (~kept[:-1] & (flat != ignore_index)).any(),
        f"labels holds one that is not among the kept ids of its token: it cannot have been sampled there; mark tokens "
        f"that were not sampled with ignore_index ({ignore_index}), and pass the mask of the same tokens, not shifted "
        f"against the labels",
    )

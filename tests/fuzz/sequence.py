"""Cases of attention over context-parallel ranks, of next tokens, and of the division of packs over ranks."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import reference
from megatron_ext.sequence.attention import Packing, Window, attend
from megatron_ext.sequence.next_token import next_tokens
from megatron_ext.sequence.zigzag import split_zigzag, thd_partition_indices
from tests.fuzz.case import Case, whole
from tests.fuzz.draw import Draw
from tests.sequence.batches import documents_seen, seen


def cumulative(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def packing(draw: Draw, multiple: int, longest: int = 6) -> Packing:
    """Draw documents of any length, padded to a multiple of `multiple` and maybe further."""
    lengths = [draw.integer(0, longest) for _ in range(draw.integer(1, 4))]
    places = [(-(-n // multiple) + (draw.integer(0, 1) if draw.chance(0.2) else 0)) * multiple for n in lengths]
    if not sum(places):
        places[0] = multiple
    draw.record["documents"] = (lengths, places)
    return Packing(tuple(lengths), tuple(places))


def attention(draw: Draw) -> Case:
    ranks = draw.ranks
    multiple = 2 * ranks if ranks > 1 else 1
    groups, per_group = draw.integer(1, 2), draw.integer(1, 3)
    channels, values = draw.integer(1, 6), draw.integer(1, 6)
    window = draw.one_of("window", *(Window(*sides) for sides in _WINDOWS))
    packed = draw.one_of("packed", False, False, True)
    batch = 1 if packed else draw.integer(1, 2)
    pack = packing(draw, multiple) if packed else None
    queries = sum(pack.places) if pack else multiple * draw.integer(1, 4)
    keys = queries + (draw.integer(0, 3) if not packed and ranks == 1 else 0)
    dtype = draw.one_of("dtype", torch.float64, torch.float64, torch.float32)
    visible = documents_seen(window, pack, pack) if pack else seen(window, queries, keys)
    hidden = None
    if not packed and draw.one_of("mask", False, False, True):
        shape = (draw.integer(1, batch), draw.random.choice([1, groups * per_group]), queries, keys)
        hidden = torch.rand(shape, generator=draw.generator) < 0.4
        visible = visible & ~hidden
    options = draw.options(scale=(None, 0.3, 2.0))

    if pack:
        starts = cumulative(pack.places)

        def cut(x: Tensor, rank: int) -> Tensor:
            return x[thd_partition_indices(starts, queries, ranks, rank).long()]
    else:

        def cut(x: Tensor, rank: int) -> Tensor:
            return split_zigzag(x, ranks, rank)

    q = draw.normal(queries, batch, groups * per_group, channels, dtype=dtype)
    k, v = (draw.normal(keys, batch, groups, width, dtype=dtype) for width in (channels, values))
    largest = 6.0 * channels * max(1.0, options.get("scale") or 1.0)

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        more: dict[str, Any] = {"q_packing": pack, "kv_packing": pack}
        if hidden is not None:
            more["mask"] = split_zigzag(hidden, ranks, rank, 2)
        group = dist.group.WORLD if ranks > 1 else None
        return [attend(*mine, window, cp_group=group, **more, **options)]

    return Case(
        "attend",
        [(draw.strided(x), cut) for x in (q, k, v)],
        lambda q, k, v: [reference.attention(q, k, v, visible, options.get("scale"))],
        ours,
        [draw.upstream(queries, batch, groups * per_group, values)],
        outputs=[cut],
        logit_size=largest,
        value_dtype=dtype,
        grad_size=8.0 * per_group * queries,
    )


_WINDOWS = [(None, None), (None, 0), (None, 0), (0, 0), (3, 0), (2, 2), (None, 1), (20, 0)]


def places_of_tokens(draw: Draw) -> Case:
    """Draw a case of `next_tokens` and `thd_partition_indices` of packs, with the truth computed by document."""
    ranks = draw.ranks
    multiple = 2 * ranks if ranks > 1 else 1
    pack = packing(draw, multiple)
    starts, total = cumulative(pack.places), sum(pack.places)
    tokens = draw.ids((draw.integer(1, 3), total), 100)

    def truth() -> list[Tensor]:
        labels = torch.full(tokens.shape, -100)
        parts: list[list[int]] = [[] for _ in range(ranks)]
        for start, length, places in zip(starts.tolist(), pack.lengths, pack.places, strict=False):
            for place in range(start, start + length - 1):
                labels[:, place] = tokens[:, place + 1]
            chunk = places // (2 * ranks) if ranks > 1 else places
            for rank, part in enumerate(parts):
                chunks = [rank, 2 * ranks - 1 - rank] if ranks > 1 else [0]
                part += [start + i * chunk + j for i in chunks for j in range(chunk)]
        return [labels, torch.tensor(parts)]

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        labels = next_tokens(tokens, cumulative(pack.lengths), starts)
        return [labels, thd_partition_indices(starts, total, ranks, rank)]

    return Case("next_tokens", [], truth, ours, [], outputs=[whole, lambda x, rank: x[rank]])

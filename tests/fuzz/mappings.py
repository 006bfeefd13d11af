"""Cases of the mappings between ranks: each mapping as a function from all ranks' inputs to all ranks' outputs.

Ranks hold the same tensor ("whole"), pieces of one, or each another tensor ("each", stacked here along an own dim). The
mapping's backward must return autograd's gradient of the function.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.model_utils import allgather_cp_sharded_tensor, cp_load_balanced_to_contiguous, cp_shift_next
from megatron_ext.sequence.zigzag import gather_zigzag, split_zigzag
from megatron_ext.tensor_parallel import mappings
from tests.fuzz.case import Case, Cut, whole
from tests.fuzz.draw import Draw


def _one(x: Tensor, ranks: int) -> Tensor:
    return x


def _each(x: Tensor, ranks: int) -> Tensor:
    return x.expand(ranks, *x.shape)


def _sum(x: Tensor, ranks: int) -> Tensor:
    return x.sum(0)


# Name: the mapping, what it makes of what ranks hold before (with the dim of pieces), and what they hold after it.
MAPPINGS: dict[str, tuple[Callable, str, Callable, str]] = {
    "copy": (mappings.copy_to_tensor_model_parallel_region, "whole", _each, "each"),
    "reduce": (mappings.reduce_from_tensor_model_parallel_region, "each", _sum, "whole"),
    "scatter last": (mappings.scatter_to_tensor_model_parallel_region, "whole", _one, "last"),
    "gather last": (mappings.gather_from_tensor_model_parallel_region, "last", _one, "whole"),
    "scatter first": (mappings.scatter_to_sequence_parallel_region, "whole", _one, "first"),
    "gather first": (mappings.gather_from_sequence_parallel_region, "first", _each, "each"),
    "gather first, repeated": (
        lambda x, **more: mappings.gather_from_sequence_parallel_region(x, False, **more), "first", _one, "whole",
    ),
    "reduce-scatter first": (mappings.reduce_scatter_to_sequence_parallel_region, "each", _sum, "first"),
    "all-gather last": (mappings.all_gather_last_dim_from_tensor_parallel_region, "last", _each, "each"),
    "reduce-scatter last": (mappings.reduce_scatter_last_dim_to_tensor_parallel_region, "each", _sum, "last"),
    "sp2hp": (mappings.all_to_all_sp2hp, "first", _one, "last"),
    "hp2sp": (mappings.all_to_all_hp2sp, "last", _one, "first"),
    "gather zigzag": (gather_zigzag, "zigzag", _each, "each"),
    "gather zigzag of a batch": (
        lambda x, group: allgather_cp_sharded_tensor(x, group), "zigzag of dim 1", _each, "each",
    ),
    "zigzag to contiguous": (
        lambda x, group: cp_load_balanced_to_contiguous(x, cp_group=group), "zigzag of dim 1", _one, "second",
    ),
    "shift": (
        lambda x, group: cp_shift_next(x, group, fill=3.0), "second",
        lambda x, ranks: torch.cat([x[:, 1:], torch.full_like(x[:, :1], 3.0)], 1), "second",
    ),
}  # fmt: skip
UNEVEN = {  # by the name of the option that says how many rows each rank has
    "gather first": "output_split_sizes",
    "gather first, repeated": "output_split_sizes",
    "reduce-scatter first": "input_split_sizes",
}


def cut(held: str, ranks: int, rows: list[int] | None) -> Cut:
    return {
        "whole": whole,
        "each": lambda x, rank: x[rank],
        "first": lambda x, rank: (x.chunk(ranks) if rows is None else x.split(rows))[rank],
        "second": lambda x, rank: x.chunk(ranks, 1)[rank],
        "last": lambda x, rank: x.chunk(ranks, -1)[rank],
        "zigzag": lambda x, rank: split_zigzag(x, ranks, rank),
        "zigzag of dim 1": lambda x, rank: split_zigzag(x, ranks, rank, 1),
    }[held]


def mapping(draw: Draw) -> Case:
    name = draw.one_of("of", *MAPPINGS)
    function, before, made, after = MAPPINGS[name]
    ranks, dtype = draw.ranks, draw.dtype()
    shape = [draw.integer(1, 3) for _ in range(2 if "2" in name else draw.integer(2, 4))]
    for dim in (0, 1, -1):
        shape[dim] *= 2 * ranks
    rows = None
    if name in UNEVEN and draw.chance(0.5):
        rows = [draw.integer(0, 4) for _ in range(ranks)]
        shape[0] = sum(rows)
    draw.record |= {"shape": shape, "rows": rows}
    x = draw.strided(draw.normal(*([ranks] if before == "each" else []), *shape, dtype=dtype))
    sizes: dict[str, Any] = {} if rows is None else {UNEVEN[name]: torch.tensor(rows) if draw.chance(0.5) else rows}

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        return [function(mine[0], group=dist.group.WORLD, **sizes)]

    return Case(
        f"mapping, {name}",
        [(x, cut(before, ranks, rows))],
        lambda x: [made(x, ranks)],
        ours,
        [draw.upstream(*([ranks] if after == "each" else []), *shape)],
        outputs=[cut(after, ranks, rows)],
        logit_size=4.0 * ranks,
        value_dtype=dtype,
        grad_size=4.0 * ranks,
    )


def all_to_all(draw: Draw) -> Case:
    """Draw a case of all-to-all, in which ranks send each other drawn numbers of rows, or equal pieces."""
    ranks, dtype, width = draw.ranks, draw.dtype(), draw.integer(1, 4)
    equal = draw.one_of("equal", True, False)
    rows = draw.integer(0, 3)
    sent = [[rows if equal else draw.integer(0, 3) for _ in range(ranks)] for _ in range(ranks)]
    draw.record["rows"] = sent
    received = [list(column) for column in zip(*sent, strict=True)]
    said = not equal or draw.chance(0.5)
    x = draw.strided(draw.normal(sum(map(sum, sent)), width, dtype=dtype))
    flat = [n for row in sent for n in row]

    def truth(x: Tensor) -> list[Tensor]:
        pieces = x.split(flat)
        return [torch.cat([pieces[source * ranks + to] for to in range(ranks) for source in range(ranks)])]

    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        sizes = (received[rank], sent[rank]) if said else ()
        return [mappings.all_to_all(dist.group.WORLD, mine[0], *sizes)]

    return Case(
        "all_to_all",
        [(x, lambda x, rank: x.split([sum(row) for row in sent])[rank])],
        truth,
        ours,
        [draw.upstream(*x.shape)],
        outputs=[lambda x, rank: x.split([sum(row) for row in received])[rank]],
        logit_size=4.0,
        value_dtype=dtype,
    )

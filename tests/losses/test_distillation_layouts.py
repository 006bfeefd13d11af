"""Top-k distillation at every arrangement of ranks: tensor and context parallel, packed or padded, slices, chunks.

The values of one process, and of ids that are given, are those of `tests.fuzz.distillation`.
"""

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from megatron_ext import VocabShard
from megatron_ext.distributed.collectives import all_reduce
from megatron_ext.distributed.groups import UNSHARDED
from megatron_ext.losses import TopKDistillationLoss
from megatron_ext.sequence.zigzag import split_zigzag, thd_partition_indices
from tests.losses.problems import TEMPERATURE, drawn
from tests.marks import slow
from tests.model_utils.sharded import Grid, grids, same
from tests.ranks import ranks

D, V, K, BETA = 5, 23, 3, 0.3
STARTS = (0, 8, 24)  # of two documents, and the end: they divide by twice the context-parallel ranks
DIVERGENCES, SIDES, BUCKETS = ("forward", "reverse", "jsd"), ("teacher", "student"), (False, True)


class Problem(NamedTuple):
    """Whole sequences of both models `[S, B, D]`, their weights, and which tokens count `[S, B]`."""

    packed: bool
    student: list[Tensor]
    teacher: list[Tensor]
    mask: Tensor


def problem(packed: bool) -> Problem:
    shape = (STARTS[-1], 1) if packed else (8, 2)
    student = [drawn(*shape, D), drawn(V, D, seed=1)]
    teacher = [drawn(*shape, 7, seed=2), drawn(V, 7, seed=3)]
    return Problem(packed, student, teacher, (drawn(*shape, seed=4) > -0.5).double())


def part_of(grid: Grid, x: Tensor, packed: bool) -> Tensor:
    """The model's own part `[S/W, B, ...]`, from what the layout is: of each document pieces r and 2 W - 1 - r."""
    if grid.cp == 1:
        return x
    found = []
    for document in x.split([b - a for a, b in itertools.pairwise(STARTS if packed else (0, len(x)))]):
        pieces = document.chunk(2 * grid.cp)
        found += [pieces[grid.cp_rank], pieces[2 * grid.cp - 1 - grid.cp_rank]]
    return torch.cat(found)


def cut(grid: Grid, x: Tensor, packed: bool) -> Tensor:
    """The same of masks, as users cut them."""
    if not packed:
        return split_zigzag(x, grid.cp, grid.cp_rank)
    return x[thd_partition_indices(torch.tensor(STARTS), len(x), grid.cp, grid.cp_rank)]


def check(grid: Grid, given: Problem, kind: tuple[str, str, bool], options: dict[str, Any]) -> None:
    """Value and gradients beside those of one process."""
    divergence, side, bucket = kind
    packed, in_slices = given.packed, options.get("hidden_layout") == "sequence"
    shard = VocabShard.split(V, grid.tp_group)
    whole = TopKDistillationLoss(
        tp_group=UNSHARDED, divergence=divergence, bucket=bucket, beta=BETA, temperature=TEMPERATURE
    )
    leaves = [x.clone().requires_grad_() for x in given.student]
    want, _ = whole.with_teacher(*leaves, *given.teacher, K, side, given.mask)
    want_dx, want_dw = torch.autograd.grad(want, leaves)

    def held(x: Tensor) -> Tensor:
        mine = part_of(grid, x, packed)
        return mine.chunk(grid.tp)[grid.tp_rank].clone() if in_slices else mine

    def rows(x: Tensor) -> Tensor:
        return x[shard.start : shard.stop]

    hidden, weight = held(given.student[0]).requires_grad_(), rows(given.student[1]).clone().requires_grad_()
    loss = replace(whole, tp_group=grid.tp_group, vocab=shard, **options)
    teacher = held(given.teacher[0]), rows(given.teacher[1])
    found, _ = loss.with_teacher(hidden, weight, *teacher, K, side, cut(grid, given.mask, packed), given.mask.sum())
    dx, dw = torch.autograd.grad(found, [hidden, weight])
    same(all_reduce(found.detach(), grid.cp_group), want.detach())
    same(dx, held(want_dx))
    same(all_reduce(dw, grid.cp_group), rows(want_dw))


LAYOUTS = (
    {"hidden_layout": "sequence", "chunk_tokens": 3},
    {"chunk_tokens": 5, "skip_ignored": True},
    {"hidden_layout": "sequence", "skip_ignored": 20},
    {},
)


@ranks(1, 2, 4)
@pytest.mark.parametrize("layout", [0, *slow(1, 2), 3])
@pytest.mark.parametrize("packed", [*slow(False), True], ids=["padded", "packed"])
def test_every_combination(packed, layout):
    for grid in grids():
        for kind in itertools.product(DIVERGENCES, SIDES, BUCKETS):
            check(grid, problem(packed), kind, LAYOUTS[layout])

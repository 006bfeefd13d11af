"""Top-k distillation at every arrangement of ranks: tensor and context parallel, packed or padded, slices, chunks."""

import itertools
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import VocabShard, reference
from megatron_ext.distributed.collectives import all_reduce
from megatron_ext.losses import TopKDistillationLoss
from megatron_ext.sequence.zigzag import split_zigzag, thd_partition_indices
from tests.fuzz.distillation import Divergence
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
    """The same of ids and masks, as users cut them."""
    if not packed:
        return split_zigzag(x, grid.cp, grid.cp_rank)
    return x[thd_partition_indices(torch.tensor(STARTS), len(x), grid.cp, grid.cp_rank)]


def truth(given: Problem, divergence: str, side: str, bucket: bool) -> tuple[Tensor, list[Tensor], Tensor, Tensor]:
    """The loss of one process, its gradients, the teacher's log-probabilities `[S, B, K]` of the ids, and these."""
    leaves = [x.clone().requires_grad_() for x in given.student]
    p, q = (reference.logits(*head, temperature=TEMPERATURE).softmax(-1) for head in (leaves, given.teacher))
    ids = {"teacher": q, "student": p}[side].topk(K).indices
    p_K, q_K = p.gather(-1, ids), q.gather(-1, ids)
    if bucket:
        p_K, q_K = (F.pad(x, (0, 1)) + F.pad((1 - x.sum(-1, keepdim=True)), (K, 0)) for x in (p_K, q_K))
    else:
        p_K, q_K = (x / x.sum(-1, keepdim=True) for x in (p_K, q_K))
    per_token = Divergence(divergence, BETA).of(p_K.log(), q_K.log())
    loss = (per_token * given.mask).sum() / given.mask.sum()
    return loss.detach(), [*torch.autograd.grad(loss, leaves)], q.gather(-1, ids).log(), ids


def check(grid: Grid, given: Problem, kind: tuple[str, str, bool], options: dict[str, Any]) -> None:
    """Value and gradients of both ways to call the loss, with the ids that one process finds and with the models'."""
    divergence, side, bucket = kind
    want, want_grads, values, ids = truth(given, divergence, side, bucket)
    packed, in_slices = given.packed, options.get("hidden_layout") == "sequence"
    shard = VocabShard.split(V, grid.tp_group)
    loss = TopKDistillationLoss(
        tp_group=grid.tp_group,
        vocab=shard,
        divergence=divergence,
        bucket=bucket,
        beta=BETA,
        temperature=TEMPERATURE,
        **options,
    )

    def held(x: Tensor) -> Tensor:
        mine = part_of(grid, x, packed)
        return mine.chunk(grid.tp)[grid.tp_rank].clone() if in_slices else mine

    def rows(x: Tensor) -> Tensor:
        return x[shard.start : shard.stop]

    mask, count = cut(grid, given.mask, packed), given.mask.sum()
    teacher = held(given.teacher[0]), rows(given.teacher[1])
    ids, values = cut(grid, ids, packed), cut(grid, values, packed)
    values = values if bucket else values * TEMPERATURE  # logits, which the temperature divides
    for way in ("given", "found"):
        hidden, weight = held(given.student[0]).requires_grad_(), rows(given.student[1]).clone().requires_grad_()
        if way == "given":
            found, _ = loss(hidden, weight, values, ids, mask, count)
        else:
            found, _ = loss.with_teacher(hidden, weight, *teacher, K, side, mask, count)
        dx, dw = torch.autograd.grad(found, [hidden, weight])
        same(all_reduce(found.detach(), grid.cp_group), want)
        same(dx, held(want_grads[0]))
        same(all_reduce(dw, grid.cp_group), rows(want_grads[1]))


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

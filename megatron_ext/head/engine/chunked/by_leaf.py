"""A plan leaf by leaf: read-outs of chunks of logits whose sums over columns are made of each leaf alone.

A leaf is to a read-out what a rank's shard is: it scans the leaf's columns, and what it makes of all shards it makes of
all ranks' leaves, which are the same ones for any number of ranks. `bits="tensor_parallel"` alone has several a rank.

Legend: T tokens, t of a chunk, K rows of statistics, R ranks, N leaves of all ranks.
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call.leaves import leaves_of
from megatron_ext.head.engine.plan import Plan
from megatron_ext.head.readouts.read_out import Chunk, Found


class Leaves:
    """Leaves of a plan, and its read-outs, each at its place `at`, as they take statistics of all leaves.

    Attributes:
        plans: the same for the leaf's columns alone.
    """

    def __init__(self, plan: Plan):
        self.plans = [copy.copy(plan) for _ in range(plan.leaf_count)]
        for number, (part, leaf) in enumerate(zip(self.plans, leaves_of(plan.call), strict=True)):
            part.call, part.target_T = replace(plan.call, vocab=leaf.vocab, leaf=number), leaf.columns(plan.target_T)
            part.labelled = False
            part.readouts = [r.of_leaf(part.call) for r in plan.readouts]
        self._whole = plan.readouts

    def scan(self, at: int, rows: slice, logits: Sequence[Sequence[Tensor]], stats_Kt: Tensor, own_Kt: Any) -> None:
        """Writes a read-out's rows, one leaf's after the other's. `logits`: of each leaf, those that it reads."""
        if not self._whole[at].by_leaf:
            whole = [torch.cat(each, 1) for each in zip(*logits, strict=True)]
            self._whole[at].scan(Chunk(rows, whole, stats_Kt, own_Kt))
            return
        count = len(self.plans)
        own = [None] * count if own_Kt is None else own_Kt.chunk(count)
        chunks = [Chunk(rows, *each) for each in zip(logits, stats_Kt.chunk(count), own, strict=True)]
        self._whole[at].scan_leaves([part.readouts[at] for part in self.plans], chunks)

    def results(self, at: int, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> Found:
        """Return the results as `ReadOut.results` does; each leaf's saved tensors follow, where leaves keep others."""
        if not self._whole[at].by_leaf:
            return self._whole[at].results(stats, stats_RKT, own_KT)
        count = len(self.plans)
        stats_NKT = stats_RKT.unflatten(1, (count, -1)).flatten(0, 1)
        each = [part.readouts[at] for part in self.plans]
        first, *others = zip(each, own_KT.chunk(count), strict=True)
        given, saved = first[0].results(stats, stats_NKT, first[1])
        if self._whole[at].keeps_own:
            saved = [*saved, *(x for leaf, own in others for x in leaf.results(stats, stats_NKT, own)[1])]
        return given, saved

    def saved_of(self, number: int, saved: Sequence[list[Tensor]]) -> list[list[Tensor]]:
        """Return of each read-out one leaf's part of what `results` has saved."""
        found = []
        for r, each in zip(self._whole, saved, strict=True):
            count = len(each) // len(self.plans) if r.by_leaf and r.keeps_own else 0
            found.append(each[number * count : (number + 1) * count] if count else each)
        return found

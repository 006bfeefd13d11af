"""Whole problems and this rank's part of them, for every way to arrange the ranks of a world.

Legend: B sequences, S tokens of each, V vocabulary; R tensor-parallel and W context-parallel ranks, R * W the world.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron_ext import reference
from megatron_ext.sequence.zigzag import split_zigzag
from tests.left_behind import cached_with_groups


@dataclass(frozen=True)
class Grid:
    """R x W ranks: those next to each other share the vocabulary."""

    tp: int
    cp: int
    tp_rank: int
    cp_rank: int
    tp_group: dist.ProcessGroup
    cp_group: dist.ProcessGroup

    @property
    def groups(self) -> dict[str, dist.ProcessGroup]:
        """Both, by NeMo-RL's names."""
        return {"tp_group": self.tp_group, "cp_group": self.cp_group}

    def own(self, logits: Tensor) -> Tensor:
        """This rank's shard and part of whole logits, padded where they must be."""
        return self.columns(self.part(self.padded(logits)))

    def columns(self, z: Tensor) -> Tensor:
        """This rank's shard of the last dim."""
        return z.chunk(self.tp, -1)[self.tp_rank]

    def vocab(self, size: int) -> dict[str, int]:
        """First and last of this rank's columns, by NeMo-RL's names."""
        columns = size // self.tp
        return {"vocab_start_index": columns * self.tp_rank, "vocab_end_index": columns * (self.tp_rank + 1)}

    def part(self, x: Tensor, dim: int = 1) -> Tensor:
        """This rank's zigzag part of a sequence dim."""
        return split_zigzag(x, self.cp, self.cp_rank, dim)

    def padded(self, x: Tensor) -> Tensor:
        """`x` with dim 1 padded behind to a multiple of 2W (W > 1) by numbers that must not matter."""
        multiple = 2 * self.cp if self.cp > 1 else 1
        return F.pad(x, (0, 0, 0, -x.shape[1] % multiple), value=3.0)

    def weights(self, shape) -> tuple[Tensor, Tensor]:
        """Upstream gradients of this context-parallel rank's loss, and the sum of those of all ranks."""
        every = torch.randn(self.cp, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
        return every[self.cp_rank], every.sum(0)


@cached_with_groups
def grid(tp: int) -> Grid:
    """The arrangement with `tp` ranks that share the vocabulary; all ranks ask for the same ones in the same order."""
    world, rank = dist.get_world_size(), dist.get_rank()
    rows = [dist.new_group(range(start, start + tp)) for start in range(0, world, tp)]
    columns = [dist.new_group(range(start, world, tp)) for start in range(tp)]
    return Grid(tp, world // tp, rank % tp, rank // tp, rows[rank // tp], columns[rank % tp])


def vocabulary_grid() -> Grid:
    return grid(dist.get_world_size())


def grids() -> Iterator[Grid]:
    for tp in range(1, dist.get_world_size() + 1):
        if dist.get_world_size() % tp == 0:
            yield grid(tp)


def grids_with_context() -> Iterator[Grid]:
    return (grid for grid in grids() if grid.cp > 1)


def problem(batch: int = 2, length: int = 7, vocabulary: int = 24, dtype=torch.float64, seed: int = 0):
    """Logits `[B, S, V]` and token ids `[B, S]`, the same on all ranks."""
    g = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(batch, length, vocabulary, dtype=torch.float64, generator=g)
    return logits.to(dtype), torch.randint(vocabulary, (batch, length), generator=g)


def next_log_probs(logits: Tensor, tokens: Tensor) -> Tensor:
    """`[B, S - 1]`: the truth, in one process."""
    return reference.log_probs(logits[:, :-1], tokens[:, 1:])


def gradient(results: Tensor, leaf: Tensor, weights: Tensor) -> Tensor:
    (grad,) = torch.autograd.grad(results, leaf, weights.to(results.dtype))
    return grad


def same(ours: Tensor, truth: Tensor) -> None:
    torch.testing.assert_close(ours, truth, rtol=1e-11, atol=1e-12)

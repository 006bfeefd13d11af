"""Draws of a case, the same on every rank: numbers from its seed, tensors, and a vocabulary sharded over ranks."""

import itertools
import random
from typing import Any

import torch
from torch import Tensor

from megatron_ext import VocabShard

DTYPES = (torch.float64, torch.float64, torch.float32, torch.float32, torch.bfloat16, torch.float16)


class Draw:
    """The draws of one case.

    Attributes:
        exact: tensors hold small integers, so that logits are exact in every dtype and many of them are equal.
        record: the drawn values by name, for messages.
    """

    def __init__(self, seed: int, number: int, ranks: int):
        self.random = random.Random(f"{seed} {number} {ranks}")
        self.ranks = ranks
        self.generator = torch.Generator().manual_seed(self.random.getrandbits(32))
        self.exact = self.chance(0.4)
        self.record: dict[str, Any] = {}

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def integer(self, low: int, high: int) -> int:
        """Draw from `[low, high]`, both included."""
        return self.random.randint(low, high)

    def one_of(self, name: str, *values: Any) -> Any:
        """Draw one of `values`, and record it under `name`."""
        self.record[name] = value = self.random.choice(values)
        return value

    def options(self, **values: tuple) -> dict[str, Any]:
        """Draw a value of each option: half of the time its first value, the default, which is left out."""
        found = {}
        for name, (_, *others) in values.items():
            if self.chance(0.5):
                found[name] = self.random.choice(others)
        self.record |= found
        return found

    def dtype(self, *among: torch.dtype) -> torch.dtype:
        return self.one_of("dtype", *(among or DTYPES))

    def leading(self, in_slices: bool = False, least_dims: int = 0) -> tuple[int, ...]:
        """Draw leading dims of tokens; `in_slices`: dim 0 is a multiple of the ranks."""
        dims = self.integer(max(least_dims, in_slices), 3)
        shape = [self.integer(1, 5) for _ in range(dims)]
        if dims and self.chance(0.06):
            shape[self.integer(0, dims - 1)] = 0
        if in_slices:
            shape[0] *= self.ranks
        self.record["tokens"] = tuple(shape)
        return tuple(shape)

    def normal(self, *shape: int, dtype: torch.dtype = torch.float64, size: float = 1.0) -> Tensor:
        """Draw numbers of about `size`, or (`exact`) integers from -2 to 2, in `dtype`."""
        if self.exact:
            return torch.randint(-2, 3, shape, generator=self.generator).to(dtype)
        return (size * torch.randn(shape, generator=self.generator, dtype=torch.float64)).to(dtype)

    def words(self, x: Tensor, dim: int = 0) -> Tensor:
        """Return `x` with the vocabulary along `dim`; if `exact`, fill its first word with 3, which no other word has.

        Shards of small integers may be permutations of each other, and the head takes these for one shard that all
        ranks pass.
        """
        if self.exact:
            x.select(dim, 0).fill_(3)
        return x

    def upstream(self, *shape: int) -> Tensor:
        """Draw a gradient in fp64 whose numbers are exact in fp32; about a fifth of them are 0."""
        found = torch.randn(shape, generator=self.generator).double()
        return found * (torch.rand(shape, generator=self.generator) < 0.8)

    def ids(self, shape: tuple[int, ...], size: int) -> Tensor:
        dtype = self.one_of("ids", torch.int64, torch.int64, torch.int32, torch.int16)
        return torch.randint(size, shape, generator=self.generator).to(dtype)

    def strided(self, x: Tensor) -> Tensor:
        """Return the same numbers, maybe in another order of memory."""
        if x.dim() < 2 or self.chance(0.6):
            return x
        a, b = self.random.sample(range(x.dim()), 2)
        return x.transpose(a, b).contiguous().transpose(a, b)

    def vocabulary(self, equal_width: bool = False, least: int = 1) -> "Vocabulary":
        return Vocabulary(self, equal_width, least)


class Vocabulary:
    """Columns, of which the first `size` count, sharded over ranks: evenly, unevenly, in any order, or some empty."""

    def __init__(self, draw: Draw, equal_width: bool, least: int):
        ranks = draw.ranks
        self.said = True  # whether shards are passed; else every rank guesses them
        kind = draw.one_of(
            "shards", "guessed", "equal", *([] if equal_width else ["uneven", "any order", "some empty"])
        )
        if kind in ("guessed", "equal"):
            width = draw.integer(max(1, -(-least // ranks)), 24)
            self.columns, self.said = width * ranks, kind == "equal"
            bounds = [width * rank for rank in range(ranks + 1)]
        else:
            self.columns = draw.integer(max(least, 2), 70)
            ends = (0, self.columns) if kind == "some empty" else range(self.columns + 1)
            cuts = sorted(draw.random.choices(ends, k=ranks - 1))
            bounds = [0, *cuts, self.columns]
        self.bounds = list(itertools.pairwise(bounds))
        if kind == "any order":
            draw.random.shuffle(self.bounds)
        padded = self.said and draw.chance(0.4)
        self.size = draw.integer(least, self.columns) if padded else self.columns
        draw.record |= {"columns": self.columns, "size": self.size, "bounds": self.bounds}

    def shard(self, rank: int) -> VocabShard:
        return VocabShard(*self.bounds[rank], self.size)

    def argument(self, rank: int) -> VocabShard | None:
        return self.shard(rank) if self.said else None

    def rows(self, x: Tensor, rank: int) -> Tensor:
        start, stop = self.bounds[rank]
        return x[start:stop]

    def last(self, x: Tensor, rank: int) -> Tensor:
        start, stop = self.bounds[rank]
        return x[..., start:stop]

"""Cases of `bits="batch"` and "tensor_parallel": the same tokens read in other arrangements have the same bits.

Arrangements differ in the other tokens, the order and leading dims, the layout, the chunks, the cache, and for
"tensor_parallel" the number of ranks. Results are not compared with fp64, which `heads.read` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext import VocabShard
from megatron_ext.distributed.groups import UNSHARDED
from megatron_ext.head import LmHead, Teacher
from megatron_ext.numerics import fixed_order
from tests.fuzz import drawn_read_outs
from tests.fuzz.case import Case
from tests.fuzz.draw import Draw, Vocabulary
from tests.fuzz.drawn_read_outs import Made, Tokens
from tests.fuzz.heads import Side
from tests.model_utils.sharded import grid

DTYPES = (torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)


@dataclass
class _Arrangement:
    """The order, layout and ranks in which tokens are read.

    Attributes:
        at: `[N]`, the indices of the tokens among all tokens, in order.
        ranks: the number of ranks that share the vocabulary; further groups of ranks read the same.
        counts: `[N]` bool, False for tokens that are left out; None: none is.
    """

    at: Tensor
    leading: tuple[int, ...]
    ranks: int
    layout: str
    settings: dict[str, Any]
    counts: Tensor | None = None

    @property
    def group(self) -> Any:
        if self.ranks == 1:
            return UNSHARDED
        return dist.group.WORLD if self.ranks == dist.get_world_size() else grid(self.ranks).tp_group

    def of(self) -> Callable[[Tensor], Tensor]:
        """Make the function that arranges a tensor of all tokens, and returns one object for one tensor."""
        made: dict[int, Tensor] = {}

        def arranged(x: Tensor) -> Tensor:
            if id(x) not in made:
                made[id(x)] = x[self.at].reshape(*self.leading, *x.shape[1:])
            return made[id(x)]

        return arranged

    def slice(self, x: Tensor) -> Tensor:
        """Return this rank's part of the hidden states `x` of all tokens."""
        return x if self.layout == "replicated" or self.ranks == 1 else x.chunk(self.ranks)[dist.get_rank(self.group)]

    def joined(self, x: Tensor) -> Tensor:
        """Gather the slices of all ranks along dim 0."""
        if self.ranks == 1:
            return x
        parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(self.ranks)]
        dist.all_gather(parts, x.contiguous(), group=self.group)
        return torch.cat(parts)

    def __str__(self) -> str:
        left = "" if self.counts is None else f", {int(self.counts.sum())} count"
        return f"{len(self.at)} tokens {self.leading}{left}, {self.ranks} ranks, {self.layout}, {self.settings}"


@dataclass
class _Sharding:
    """The shard of this rank: of a drawn vocabulary, or, for any number of ranks, of one divided into eighths."""

    bits: str
    vocabulary: Vocabulary

    def shard(self, ranks: int) -> VocabShard:
        if self.bits == "batch":
            return self.vocabulary.shard(dist.get_rank())
        columns = -(-self.vocabulary.size // 8) * 8 // ranks
        start = 0 if ranks == 1 else columns * (dist.get_rank() % ranks)
        return VocabShard(start, start + columns, self.vocabulary.size)

    def rows(self, x: Tensor, ranks: int) -> Tensor:
        """Return this rank's rows of `[V, ...]`, padded by rows that do not count if the last eighths are shorter."""
        shard = self.shard(ranks)
        mine = x[shard.start : shard.stop]
        return torch.cat([mine, mine.new_ones(shard.stop - shard.start - len(mine), *mine.shape[1:])])


@dataclass
class _Problem:
    """Student, teacher and read-outs of a case, unsharded."""

    student: Side
    theirs: Side | None
    bits: str
    sharding: _Sharding
    made: list[Made]
    slopes: list[Tensor | None]

    def _head(self, side: Side, tensors: list[Tensor], way: _Arrangement, **options: Any) -> LmHead:
        shard = self.sharding.shard(way.ranks)
        return side.head(tensors, way.group, way.layout, vocab=shard, bits=self.bits, **options)

    def _mine(self, side: Side, way: _Arrangement, of: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """Return this rank's hidden states, and its parts of the head's tensors."""
        cuts = side.cuts(lambda x, _: self.sharding.rows(x, way.ranks))
        parts = [cut(x, way.ranks) for x, cut in zip(side.tensors, cuts, strict=True)]
        return [x.detach().clone() for x in (way.slice(of(side.hidden)), *parts)]

    def read(self, way: _Arrangement) -> tuple[list[Tensor], dict[str, Tensor]]:
        """Return results and dx, `[N, ...]` each, and the other gradients, unsharded for "tensor_parallel" bits."""
        of = way.of()
        hidden, *tensors = (x.requires_grad_() for x in self._mine(self.student, way, of))
        teacher = None
        if self.theirs is not None:
            their_hidden, *theirs = self._mine(self.theirs, way, of)
            teacher = Teacher(self._head(self.theirs, theirs, way), their_hidden)
        only = {} if way.counts is None else {"counts": way.counts.reshape(way.leading)}
        head = self._head(self.student, tensors, way, **way.settings)
        found = head.read(hidden, *(one.read_out(teacher, of) for one in self.made), **only)
        results = drawn_read_outs.flat(found, len(self.made) > 1)
        flows = [(y, of(g).to(y.dtype)) for y, g in zip(results, self.slopes, strict=True) if g is not None]
        if flows:
            torch.autograd.backward([y for y, _ in flows], [g for _, g in flows])
        dx, *grads = (torch.zeros_like(x) if x.grad is None else x.grad for x in (hidden, *tensors))
        dx = way.joined(dx) if way.layout == "sequence" else dx
        names = ["weight", *["bias"] * (self.student.bias is not None), *["A", "B"] * len(self.student.adapters)]
        tokens = len(way.at)
        return [y.detach().reshape(tokens, *y.shape[len(way.leading) :]) for y in results] + [
            dx.reshape(tokens, dx.shape[-1])
        ], self._of_all(dict(zip(names, grads, strict=True)), way)

    def _of_all(self, grads: dict[str, Tensor], way: _Arrangement) -> dict[str, Tensor]:
        if way.layout == "sequence" and way.ranks > 1:
            grads.pop("A", None)  # an all-reduce of the slices', whose order nobody promises
        if self.bits == "batch":
            return grads
        size, found = self.sharding.vocabulary.size, {}
        for name, grad in grads.items():
            every = grad if name == "A" else way.joined(grad)
            assert name == "A" or not every[size:].any(), f"padding of {name} has a gradient"
            found[name] = every if name == "A" else every[:size]
        return found


def _side(draw: Draw, tokens: int, columns: int, dtype: torch.dtype) -> Side:
    width = draw.one_of("width", 5, 16, 40)
    hidden, weight = (draw.normal(rows, width, dtype=dtype) for rows in (tokens, columns))
    bias = draw.normal(columns, dtype=dtype) if draw.chance(0.3) else None
    pair = draw.normal(3, width, dtype=dtype), draw.normal(columns, 3, dtype=dtype)
    adapters = [(*pair, 0.5)] if draw.chance(0.3) else []
    draw.record |= {"bias": bias is not None, "lora": len(adapters)}
    return Side(hidden, weight, bias, adapters, draw.options(logit_scale=(1.0, 0.7), softcap=(None, 3.0, 30.0)))


def read(draw: Draw) -> Case:
    draw.exact = False
    some = [n for n in (1, 2, 4) if draw.ranks % n == 0]
    bits = draw.one_of("bits", "batch", "tensor_parallel") if draw.ranks in some else "batch"
    dtype = draw.dtype(*DTYPES)
    names = drawn_read_outs.names(draw)
    vocabulary = draw.vocabulary(equal_width="sampled" in names or bits == "tensor_parallel")
    tokens = draw.one_of("tokens", 1, 6, 18, 66) * 4 * (3 if draw.ranks == 3 else 1)
    columns = vocabulary.size if bits == "tensor_parallel" else vocabulary.columns
    student = _side(draw, tokens, columns, dtype)
    student.facts |= draw.options(temperature=(1.0, 1.3))
    if dtype.itemsize == 2:
        student.facts |= draw.options(logit_dtype=(None, dtype))
    shared = Tokens(draw, (tokens,), vocabulary, student.facts.get("temperature", 1.0))
    made, taught, slopes = drawn_read_outs.read(shared, names)
    theirs = _side(draw, tokens, columns, dtype) if taught else None
    problem = _Problem(student, theirs, bits, _Sharding(bits, vocabulary), made, slopes)

    def arrangement(at: Tensor, counts: Tensor | None = None) -> _Arrangement:
        ranks = draw.random.choice(some) if bits == "tensor_parallel" else draw.ranks
        layout = draw.random.choice(["replicated", "sequence"]) if len(at) % ranks == 0 else "replicated"
        slices = ranks if layout == "sequence" else 1
        ways = [(n, len(at) // n) for n in (slices, 2 * slices) if len(at) % n == 0 and len(at)]
        leading = draw.random.choice([(len(at),), *ways])
        settings = draw.options(cache=("bounded", 0, 0.4, 1, 5000), chunk_tokens=(None, 1, 7, 64))
        return _Arrangement(at, leading, ranks, layout, settings, counts)

    everyone = torch.arange(tokens)
    whole = [arrangement(everyone) for _ in range(2)]
    at = torch.randint(tokens, (draw.one_of("others", 1, 4, 12, 65),), generator=draw.generator)
    counts = torch.rand(len(at), generator=draw.generator) < 0.6 if draw.chance(0.4) else None
    other = arrangement(at, counts)
    draw.record["arrangements"] = [str(way) for way in (*whole, other)]

    # Else no vocabulary here is wide enough for several blocks of columns.
    block = mock.patch.object(fixed_order, "COLUMNS", draw.one_of("columns of a product", 512, 16))

    @block
    def ours(mine: list[Tensor], rank: int) -> Sequence[Tensor]:
        (found, grads), (again, grads_again) = (problem.read(way) for way in whole)
        labels = [*(f"result {i}" for i in range(len(slopes))), "dx"]
        for label, x, y in zip(labels, found, again, strict=True):
            _same(label, x, y, whole[1])
        for name in grads.keys() & grads_again.keys():
            _same(f"gradient of {name}", grads[name], grads_again[name], whole[1])
        for label, x, y in zip(labels, found, problem.read(other)[0], strict=True):
            kept = torch.ones(len(at), dtype=torch.bool) if counts is None else counts
            _same(label, x[at[kept]], y[kept], other)
            assert not y[~kept].any(), f"{label} of a token that does not count"
        return []

    return Case(f'bits="{bits}" of {names}', [], list, ours, [])


def _same(label: str, x: Tensor, y: Tensor, way: _Arrangement) -> None:
    if torch.equal(x, y):
        return
    differ = (x != y).flatten(1).any(1) if x.dim() > 1 else x != y
    raise AssertionError(
        f"{label} has other bits in {int(differ.sum())} of {len(x)} rows, the first {int(differ.nonzero()[0])}, "
        f"read as {way}"
    )

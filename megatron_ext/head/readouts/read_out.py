"""Read-outs: numbers per token that one pass over logits gives, and the gradient of the first of them.

`LmHead.read` and `Logits.read` take any set of read-outs. The engine knows none by name. It asks each one

    which sums over rows it wants of the shared pass (`mean`, `expected`, `labels_T`, `hits`), and how many rows of
        statistics of its own it fills from each chunk of logits (`scan`): all ranks' come back from one exchange;
    what the statistics of all shards together mean (`results`);
    what its gradient is: in the form that every function of a row's softmax has (`basis`), at a few chosen columns
        (`at_columns`), or anything else of a chunk of logits (`pull`). The engine adds those of all read-outs.

Tensors that need a gradient are never hidden in a read-out: those of labels, ids and teachers need none.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K rows of statistics or columns, R ranks.
"""

import copy
from collections.abc import Callable, Sequence
from dis import get_instructions
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from megatron_ext.distributed.groups import Group, group_rank
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head.call import resolved_head, statistics
from megatron_ext.head.call.logit_gradient import Basis
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import REFUSAL, REFUSED, Statistics, check_agreement
from megatron_ext.head.row_passes.dispatch import passes_of
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.readable_values import has_values, raise_if

# Per-token results, and what the gradient wants of forward: nothing of vocabulary size in either.
Found = tuple[list[Tensor], list[Tensor]]
Flatten = Callable[[Tensor], Tensor]


# Before 2.13 torch's compiler traced no `copy.copy` of an object, and not its `__dict__`.
TRACES_COPIES = TorchVersion(torch.__version__) >= "2.13"

# Attributes that are no options: they follow from labels, of which each rank says more than what these hold, and from
# options.
_OF_THE_CALL = ("labels", "all_count", "counts_T", "masked_later", "begins", "candidates")


class AtColumns(NamedTuple):
    """A gradient of a few logits of each token, added to what the others give.

    Attributes:
        ids_tK: int64 token ids, of any rank; one may come twice.
        grad_tK: the gradient of their logits after the temperature, beside that of the softmax.
    """

    ids_tK: Tensor
    grad_tK: Tensor


class AtPlaces(NamedTuple):
    """A gradient of some logits of each token, as many as each has, added to what the others give.

    Attributes:
        token_n: the tokens, counted from the first of the chunk.
        column_n: int64 columns of this rank's shard; one comes once at a token.
        grad_n: the gradient of these logits after the temperature, beside that of the softmax.
    """

    token_n: Tensor
    column_n: Tensor
    grad_n: Tensor


class Chunk(NamedTuple):
    """The logits of some tokens, as bias and softcap leave them, and where the read-out's rows for them are.

    Attributes:
        rows: the tokens.
        logits: `[t, V]`, of the head that is read, and then of the read-out's teacher if it has one.
        stats_Kt: `[rows, t]`, to be written: what all ranks get.
        own_Kt: `[own_rows, t]`, to be written: what this rank keeps to itself. There if it has such rows.
    """

    rows: slice
    logits: Sequence[Tensor]
    stats_Kt: Tensor
    own_Kt: Any


class ReadOut:
    """The base class; what a class does not say is nothing."""

    softmax: ClassVar[bool] = True  # the maximum and sum of exponentials of the whole row are wanted
    mean: bool = False  # the mean logit is
    expected: bool = False  # E_p[z] is
    hits: bool = False  # whether the label has the largest logit is
    in_step: ClassVar[bool] = False  # `scan` communicates: all ranks must cut the tokens alike
    needs_logits: bool = False  # the gradient is not of `Basis` alone
    # Whether bits other than "fast" can be had: True: of a leaf's columns alone, with `row_sums` of them and `added` of
    # all shards'; False: of this rank's columns together, in whose sums the ranks have no part; None: they cannot.
    by_leaf: ClassVar[bool | None] = None
    keeps_own: ClassVar[bool] = False  # what `results` saves is of this rank's columns, not the same on all ranks
    by_factor: ClassVar[bool] = False  # it is `pull`'s alone, of a number a token, in which what is given is a factor
    differentiable: ClassVar[bool] = True  # the first result
    count: int = 1  # results
    rows: int = 0  # of statistics of its own
    own_rows: int = 0  # of which nothing is sent
    begins: bool = False  # `begin` communicates at several ranks
    exchanges: bool = True  # its statistics, or the shared ones, are sent
    reads_labels: ClassVar[bool] = False  # the shared pass reads the logits of `labels`
    labels: Any = None
    ignore_index: int = -100
    labels_T: Tensor | None = None  # token ids that it asks for
    counts_T: Tensor | None = None  # bool: tokens that count; None: all
    numbers_T: Tensor | None = None  # further integers that all ranks must pass alike
    teacher: Any = None  # a `Teacher`, or other `Logits`

    call: ResolvedHead
    parts: list[slice]  # how all ranks cut the tokens
    all_count: bool = False  # all labels were seen to be ids of the vocabulary that count
    masked_later: bool  # gradients through the softmax are taken at `counts_T` alone
    _written: ClassVar[tuple[str, ...]] = ()  # the attributes that methods of the class write

    def __init_subclass__(cls) -> None:
        """Finds the attributes that its methods write: see `copied`."""
        functions = [x for x in vars(cls).values() if isinstance(x, FunctionType)]
        written = {each.argval for f in functions for each in get_instructions(f) if each.opname == "STORE_ATTR"}
        cls._written = tuple(sorted(written.union(cls._written)))

    def per_token(self) -> tuple[str, Tensor] | None:
        """The name and the value of an argument that has one entry for each token of all ranks."""
        return None

    def copied(self) -> Self:
        """A copy for one call, whose tensors are the same ones: nothing is written onto the caller's object."""
        if torch.compiler.is_compiling() and TRACES_COPIES:
            return copy.copy(self)
        found = object.__new__(type(self))
        if not torch.compiler.is_compiling():
            found.__dict__.update(self.__dict__)
            return found
        for name in self._written:  # its class's own are copied with them, which does no harm
            if hasattr(self, name):
                setattr(found, name, getattr(self, name))
        return found

    def flatten(self, flat: Flatten) -> None:
        """Makes the read-out's per-token tensors `[T, ...]`, of a copy that has its `call`."""

    def options(self) -> dict[str, Any]:
        """The read-out's numbers and names, which must be the same on all ranks."""
        plain = int | float | str | bool | None
        found = {}
        for name, x in sorted(vars(self).items()):
            if name not in _OF_THE_CALL and isinstance(x, plain):
                found[name] = x
        return found

    def check(self, size: int, vocab: VocabShard | None, group: Group) -> ValueError | None:
        """Raises what every rank sees wrong with its arguments, returns what this rank alone may see. Of a copy.

        Args:
            size: of the vocabulary; where `vocab` is None a guess from this rank's columns, as if shards were equal.
            group: the ranks that share it.
        """
        return None

    def columns(self) -> Tensor | None:
        """Return the columns of this rank's shard that it reads, in any order; None: all. It may wait for the
        device."""
        return None

    def begin(self, device: torch.device, words: str, ids: Sequence[Tensor]) -> None:
        """Agree over several ranks before the first chunk, where the read-out `begins`.

        `words`, `ids`: the options of the call, and the token ids that it asks for.

        Communicates: 1 all-gather of a few numbers.
        """
        words = f"{words}, chunks {len(self.parts)}" if self.in_step else words
        numbers = [self.call.vocab.size, *self.agreed()]
        found_RN = statistics.gathered_numbers(numbers, words, ids, self.call.group, device)
        if has_values(found_RN):
            size_R = found_RN[:, 0]
            raise_if((size_R == int(REFUSED)).any(), REFUSAL)
            raise_if(
                (size_R != size_R[0]).any(),
                "vocab: the ranks of tp_group must agree on the vocabulary's size; pass the same vocab.size on each",
            )
            self.check_agreed(found_RN)
            check_agreement(found_RN[:, -2:], words)

    def agreed(self) -> list[int]:
        """Further numbers that `begin` sends."""
        return []

    def check_agreed(self, found_RN: Tensor) -> None:
        """Raises on every rank what every rank's `agreed`, from column 1 on, shows."""

    def refuse(self, device: torch.device) -> None:
        """Take part in what `begin` sends, telling the others that this rank refused its arguments. Those raise there:
        it is called only where it `begins`."""
        numbers = [int(REFUSED)] * (1 + len(self.agreed()))
        statistics.gathered_numbers(numbers, "", [], self.call.group, device)

    def chunks(self, tokens: int, on_gpu: bool) -> list[slice] | None:
        """Return the cut of the tokens on all ranks, where `in_step`; None: any cut that they all share."""
        return None

    def scan(self, chunk: Chunk) -> None:
        """Write the statistics of this rank's columns."""

    def of_leaf(self, call: ResolvedHead) -> Self:
        """Return this read-out for the columns of one leaf, those of `call`."""
        part = self.copied()
        part.call = call
        return part

    def scan_leaves(self, of_leaves: "Sequence[ReadOut]", chunks: Sequence[Chunk]) -> None:
        """`scan` of all leaves of this rank, each with its chunk; where `by_leaf`."""
        for leaf, chunk in zip(of_leaves, chunks, strict=True):
            leaf.scan(chunk)

    def row_sums(self, x_tV: Tensor) -> Tensor:
        """The sum of each row, with the bits that the call asks for."""
        return passes_of(x_tV).row_sums(x_tV) if self.call.fixed else x_tV.sum(1)

    @property
    def multiply(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Makes products of rows, with the bits that the call asks for."""
        return fixed_order.mm if self.call.fixed else torch.mm

    @property
    def shard_index(self) -> int:
        """Return the index of these columns among the shards, or leaves of all ranks, that `results` is given."""
        rank, leaf = group_rank(self.call.group), self.call.leaf
        return rank if leaf is None else rank * resolved_head.leaf_count(self.call) + leaf

    def added(self, x_RT: Tensor) -> Tensor:
        """The sum of all shards' numbers, with the bits that the call asks for."""
        return resolved_head.added(x_RT, self.call)

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> Found:
        """Return what is read out, and what the gradient wants of it.

        Args:
            stats: the `Statistics` of the shared pass; None where no read-out wanted the softmax.
            stats_RKT: all ranks' rows, `[R, rows, T]`.
            own_KT: this rank's: those that stay here, `[own_rows, T]`, where it has any, else `[rows, T]`.
        """
        raise NotImplementedError

    def counted_gradient(self, grad: Tensor) -> Tensor:
        """`grad`, 0 where a token does not count; as it is where all read-outs count the same, as is seen to later."""
        return grad if self.masked_later else counted(grad, self.counts_T)

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis | None:
        """The gradient in the form of every function of the softmax, given that of the first result."""
        return None

    def at_columns(self, saved: list[Tensor], rows: slice, grad: Tensor) -> AtColumns | None:
        """Further gradients at a few columns of the tokens `rows`."""
        return None

    def at_places(self, saved: list[Tensor], rows: slice, grad: Tensor) -> AtPlaces | None:
        """Further gradients at some columns of the tokens `rows`, of which each has as many as it likes."""
        return None

    def reads_logits(self, saved: list[Tensor], rows: slice) -> bool:
        """Return whether `pull`, if a read-out has one, adds anything for the tokens `rows`."""
        return type(self).pull is not ReadOut.pull

    def pull(
        self, saved: list[Tensor], rows: slice, logits: Sequence[Tensor], grad: Tensor, out_tV: Tensor, first: bool
    ) -> None:
        """Add the rest of the gradient of a chunk's logits to `out_tV`; `first`: write it, nothing is there yet."""


def counted(x_T: Tensor, counts_T: Tensor | None) -> Tensor:
    """0 where a token does not count."""
    return x_T if counts_T is None else x_T.masked_fill(~counts_T, 0.0)


def put(out: Tensor, value: Tensor, first: bool) -> None:
    """`out = value` where it is the `first`, else `out += value`."""
    if first:
        out.copy_(value)
    else:
        out.add_(value)

"""The base class of read-outs, and the read-outs of one label per token: log-probability and cross entropy. A read-out
is one or more numbers per token that a pass over logits gives; the first number is differentiable.

`LmHead.read` and `Logits.read` take any set of read-outs. The engine knows none by name. It asks each read-out for

    the sums over rows that it wants of the shared pass (`mean`, `expected`, `labels_T`, `hits`), and its own rows of
        statistics, which it writes from each chunk of logits (`scan`): one exchange returns the rows of all ranks;
    its results, given the statistics of all shards (`results`);
    its gradient: in the form that every function of a row's softmax has (`basis`), at a few chosen columns
        (`at_columns`), or any other function of a chunk of logits (`pull`). The engine adds the gradients.

A read-out holds no tensor that gets a gradient: labels, ids and teachers get none.

Legend: T tokens, t of a chunk, V columns of this rank's vocabulary shard, K rows of statistics or columns, R ranks.
"""

import copy
from collections.abc import Callable, Sequence
from dis import get_instructions
from types import FunctionType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

from megatron_ext.distributed.groups import Group, VocabShard, group_rank
from megatron_ext.head import checks
from megatron_ext.head.call import resolved_head, statistics
from megatron_ext.head.call.logit_gradient import Basis
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import REFUSAL, REFUSED, Statistics, check_agreement
from megatron_ext.head.row_passes.passes import passes_of
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.tensors import OutsideVocabulary, has_values, raise_if

# Per-token results, and the tensors that the gradient needs; neither has vocabulary size.
ReadOutResults = tuple[list[Tensor], list[Tensor]]
Flatten = Callable[[Tensor], Tensor]


# Before 2.13 torch's compiler traced neither `copy.copy` of an object nor its `__dict__`.
TRACES_COPIES = TorchVersion(torch.__version__) >= "2.13"

# Attributes that are no options: they follow from options, or from labels, whose checksum the ranks compare.
_OF_THE_CALL = ("labels", "all_count", "counts_T", "masked_later", "begins", "candidates")


class ReadOut:
    """The base class of read-outs. A method or attribute that a class does not define adds nothing.

    Args:
        counts: `[...]`, bool: tokens that count; others get 0 and no gradient. None: all tokens. A class with labels
            has no `counts`: the tokens count whose label is not `ignore_index`.
    """

    softmax: ClassVar[bool] = True  # wants the maximum and the sum of exponentials of the whole row
    mean: bool = False  # wants the mean logit
    expected: bool = False  # wants E_p[z]
    hits: bool = False  # wants to know whether the label has the largest logit
    in_step: ClassVar[bool] = False  # `scan` communicates: all ranks must cut the tokens alike
    needs_logits: bool = False  # the gradient is more than `Basis` can say
    # Whether `bits` other than "fast" are supported. True: `scan` takes one leaf's columns and sums by `row_sums`, and
    # `results` adds shards by `added`. False: `scan` takes all columns of a rank, and ranks add nothing up. None: no.
    by_leaf: ClassVar[bool | None] = None
    keeps_own: ClassVar[bool] = False  # `results` saves numbers of this rank's columns, not the same on all ranks
    by_factor: ClassVar[bool] = False  # the whole gradient is `pull`'s, with the upstream gradient as a factor
    differentiable: ClassVar[bool] = True  # the first result is
    count: int = 1  # number of results
    rows: int = 0  # number of its own rows of statistics, which are sent
    own_rows: int = 0  # number of rows that stay on this rank
    begins: bool = False  # `begin` communicates at several ranks
    exchanges: bool = True  # its statistics, or the shared ones, are sent
    reads_labels: ClassVar[bool] = False  # the shared pass reads the logits of `labels`
    labels: Any = None
    ignore_index: int = -100
    counts: Any = None
    labels_T: Any = None  # the token ids that the read-out asks for
    counts_T: Any = None  # bool: tokens that count; None: all
    numbers_T: Tensor | None = None  # further integers that must be the same on all ranks
    teacher: Any = None  # a `Teacher`, or other `Logits`

    call: ResolvedHead
    parts: list[slice]  # the chunks into which all ranks cut the tokens
    all_count: bool = False  # a check saw that every label is an id of the vocabulary and counts
    masked_later: bool  # the engine sets the gradient through the softmax to 0 where `counts_T` is False
    # The attributes that methods of the class, or the `Plan` of a call, write.
    _written: ClassVar[tuple[str, ...]] = ("all_count", "call", "counts", "counts_T", "labels_T", "masked_later")

    def __init_subclass__(cls) -> None:
        """Find the attributes that the subclass's methods write, for `copied`."""
        functions = [x for x in vars(cls).values() if isinstance(x, FunctionType)]
        written = {each.argval for f in functions for each in get_instructions(f) if each.opname == "STORE_ATTR"}
        cls._written = tuple(sorted(written.union(cls._written)))

    def __init__(self, counts: Tensor | None = None):
        self.counts = counts

    def per_token(self) -> tuple[str, Tensor] | None:
        """Return name and value of an argument with an entry for each token of all ranks: labels, counts or None."""
        if self.labels is not None:
            return "labels", self.labels
        return None if self.counts is None else ("counts", self.counts)

    def copied(self) -> Self:
        """Return a shallow copy for one call, so that nothing is written to the caller's object."""
        found = object.__new__(type(self))
        if not torch.compiler.is_compiling():
            found.__dict__.update(self.__dict__)
            return found
        if TRACES_COPIES:
            return copy.copy(self)
        for name in self._written:  # this also copies class attributes, which does no harm
            if hasattr(self, name):
                setattr(found, name, getattr(self, name))
        return found

    def flatten(self, flat: Flatten) -> None:
        """Make the per-token tensors `[T, ...]` by `flat`: labels, and which count. `self` is a copy with a `call`."""
        if self.labels is not None:
            self.labels_T = flat(self.labels).long()
            if not self.reads_labels:  # else the plan has a copy
                self.labels_T = self.labels_T.clone()  # the caller may overwrite labels before backward
            self.counts_T = None if self.all_count and self.softmax else self.labels_T != self.ignore_index
        elif self.counts is not None:
            self.counts_T = flat(self.counts).clone()

    def options(self) -> dict[str, Any]:
        """Return the attributes that are numbers, strings or None: they must be the same on all ranks."""
        plain = int | float | str | bool | None
        found = {}
        for name, x in sorted(vars(self).items()):
            if name not in _OF_THE_CALL and isinstance(x, plain):
                found[name] = x
        return found

    def check(self, size: int, vocab: VocabShard | None, group: Group) -> ValueError | None:
        """Raise a fault of the arguments that every rank sees; return a fault that maybe this rank alone sees. `self`
        is a copy for this call.

        Args:
            size: the vocabulary's size; if `vocab` is None, a guess from this rank's columns, as if shards were equal.
            group: the ranks that share the vocabulary.
        """
        if self.labels is not None or self.reads_labels:
            try:
                self.all_count = checks.check_labels(self.labels, self.ignore_index, size, _ids_exist)
            except OutsideVocabulary as fault:
                return OutsideVocabulary(f"{fault}{checks.forgotten_group(group, vocab)}")
        elif self.counts is not None:
            checks.check_counts(self.counts, self.counts.shape)
        return None

    def columns(self) -> Tensor | None:
        """Return the columns of this rank's shard that the read-out reads, in any order; None: all. The host may wait
        for the device."""
        return None

    def begin(self, device: torch.device, words: str, ids: Sequence[Tensor]) -> None:
        """Check over several ranks, before the first chunk, that they agree; called if the read-out `begins`.

        `words`, `ids`: the options of the call, and its token ids.

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
        """Return further numbers that `begin` sends."""
        return []

    def check_agreed(self, found_RN: Tensor) -> None:
        """Raise, on every rank, faults that the ranks' `agreed` numbers show: `found_RN` has them from column 1 on."""

    def refuse(self, device: torch.device) -> None:
        """Take part in the all-gather of `begin`, telling the other ranks that this rank refused its arguments, so that
        they raise in `begin`. Called only if the read-out `begins`."""
        numbers = [int(REFUSED)] * (1 + len(self.agreed()))
        statistics.gathered_numbers(numbers, "", [], self.call.group, device)

    def chunks(self, tokens: int, on_gpu: bool) -> list[slice] | None:
        """Return the chunks of tokens, the same on all ranks, for a read-out `in_step`; None: any common chunks do."""
        return None

    def scan(self, rows: slice, logits: Sequence[Tensor], stats_Kt: Tensor, own_Kt: Any) -> None:
        """Write the statistics of this rank's columns for the tokens `rows`.

        Args:
            logits: `[t, V]` after bias and softcap, before the temperature: of the head, and then of the read-out's
                teacher if it has one.
            stats_Kt: `[rows, t]`, written: statistics that all ranks get.
            own_Kt: `[own_rows, t]`, written: statistics that stay on this rank; None without such rows.
        """

    def of_leaf(self, call: ResolvedHead) -> Self:
        """Return a copy of this read-out for one leaf of the vocabulary, whose columns are those of `call`."""
        part = self.copied()
        part.call = call
        return part

    def scan_leaves(self, of_leaves: "Sequence[ReadOut]", chunks: Sequence[Any]) -> None:
        """Call `scan` for each leaf of this rank with its arguments, an entry of `chunks`; for read-outs `by_leaf`."""
        for leaf, chunk in zip(of_leaves, chunks, strict=True):
            leaf.scan(*chunk)

    def row_sums(self, x_tV: Tensor) -> Tensor:
        """Return the sum of each row, in the order that the `bits` of the call ask for."""
        return passes_of(x_tV).row_sums(x_tV) if self.call.fixed else x_tV.sum(1)

    @property
    def multiply(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the matrix product that the `bits` of the call ask for."""
        return fixed_order.mm if self.call.fixed else torch.mm

    @property
    def shard_index(self) -> int:
        """Return the index of these columns in the first dim of `stats_RKT`, among all ranks' shards or leaves."""
        rank, leaf = group_rank(self.call.group), self.call.leaf
        return rank if leaf is None else rank * resolved_head.leaf_count(self.call) + leaf

    def added(self, x_RT: Tensor) -> Tensor:
        """Return the sum over shards, in the order that the `bits` of the call ask for."""
        return statistics.added(x_RT, self.call)

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        """Return the results, and the tensors that the gradient needs.

        Args:
            stats: the `Statistics` of the shared pass; None if no read-out wants the softmax.
            stats_RKT: all ranks' rows, `[R, rows, T]`.
            own_KT: this rank's rows: `[own_rows, T]` if the read-out has rows that are not sent, else `[rows, T]`.
        """
        raise NotImplementedError

    def results_of(self, value_T: Tensor, own_KT: Tensor) -> ReadOutResults:
        """Return `value_T`, 0 where a token does not count, as `results` that save nothing for the gradient."""
        return [counted(value_T.to(own_KT.dtype), self.counts_T)], []

    def counted_gradient(self, grad: Tensor) -> Tensor:
        """Return `grad`, 0 where a token does not count, but `grad` as it is with `masked_later`: the engine masks."""
        return grad if self.masked_later else counted(grad, self.counts_T)

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis | None:
        """Return the gradient through the softmax, in the form of `Basis`; `grad`: the gradient of the first result."""
        return None

    def at_columns(self, saved: list[Tensor], rows: slice, grad: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return further gradients at a few columns of the tokens `rows`, beside that of `basis`: int64 token ids
        `[t, K]` of any rank's columns, in which an id may come twice, and the gradient of their logits after the
        temperature."""
        return None

    def at_places(self, saved: list[Tensor], rows: slice, grad: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return further gradients of n logits, any number for each of the tokens `rows`, beside that of `basis`: each
        logit's token, counted from the first of `rows`; its int64 column of this rank's shard, no column twice for a
        token; and the gradient of the logit after the temperature."""
        return None

    def reads_logits(self, saved: list[Tensor], rows: slice) -> bool:
        """Return whether `pull`, if the class defines it, may add anything for the tokens `rows`."""
        return type(self).pull is not ReadOut.pull

    def pull(
        self, saved: list[Tensor], rows: slice, logits: Sequence[Tensor], grad: Tensor, out_tV: Tensor, first: bool
    ) -> None:
        """Add the rest of the gradient of a chunk's logits to `out_tV`; if `first`, overwrite `out_tV` instead."""


def _ids_exist(ids: Tensor, size: int, spared: int | None) -> Tensor:
    return passes_of(ids).ids_exist(ids, size, spared)


def counted(x_T: Tensor, counts_T: Tensor | None) -> Tensor:
    """Return `x_T`, 0 where a token does not count."""
    return x_T if counts_T is None else x_T.masked_fill(~counts_T, 0.0)


def put(out: Tensor, value: Tensor, first: bool) -> None:
    """Write `value` to `out` if it is the `first`, else add it."""
    if first:
        out.copy_(value)
    else:
        out.add_(value)


class OfLabels(ReadOut):
    """Base of read-outs of a label per token.

    Args:
        labels: `[...]`, integers: global token ids, of all ranks' tokens.
        ignore_index: tokens with this label get 0 and no gradient.
    """

    reads_labels = True

    def __init__(self, labels: Tensor, ignore_index: int = -100):
        if type(ignore_index) is not int:
            checks.check_ignore_index(ignore_index)
        self.labels, self.ignore_index = labels, ignore_index


class LogProbs(OfLabels):
    """Log-probability of each label: `[...]`, fp32 (fp64 for fp64), 0 where the label is `ignore_index`."""

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        return [counted((stats.target - stats.log_sum).to(own_KT.dtype), self.counts_T)], []

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis:
        return Basis(log_prob=self.counted_gradient(grad))


class IsArgmax(OfLabels):
    """Read-out of whether each label has the largest logit: `[...]`, bool, no gradient; False where it does not count.

    Among equal logits the lowest id wins.
    """

    hits = True
    differentiable = False

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        return [stats.hits.clone() if self.counts_T is None else stats.hits & self.counts_T], []


_OFF = {"label_smoothing": 0.0, "z_loss": 0.0}


class CrossEntropy(OfLabels):
    """Cross entropy of each label, `(1 - e) nll - e mean_log_prob + z_loss lse^2`: `[...]`, fp32 (fp64 for fp64). The
    first two terms are those of `torch.nn.functional.cross_entropy`.

    Args:
        labels, ignore_index: as for `LogProbs`.
        label_smoothing: e, in [0, 1).
        z_loss: factor of `lse^2`, at least 0.
        smooth_others: e is the probability of all other tokens, as in Megatron-Core: e becomes `e V / (V - 1)`.
        z_apart: `z_loss lse^2` is a second result, without a gradient; the gradient of the first is that of their sum.
    """

    def __init__(
        self,
        labels: Tensor,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        smooth_others: bool = False,
        z_apart: bool = False,
    ):
        super().__init__(labels, ignore_index)
        self.label_smoothing, self.z_loss, self.smooth_others = label_smoothing, z_loss, smooth_others
        if not type(label_smoothing) is type(z_loss) is float or label_smoothing or z_loss:
            checks.check_options(self, _OFF)
        self.z_apart, self.count = z_apart, 1 + z_apart
        self.mean = label_smoothing > 0

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        value = stats.log_sum - stats.target
        if self.mean:
            assert stats.mean is not None
            e = self._smoothing(stats)
            value = (1 - e) * value - e * (stats.mean - stats.log_sum)
        found = [value]
        if self.z_loss:
            z_loss = self.z_loss * statistics.lse(stats).square()
            found = [value, z_loss] if self.z_apart else [value + z_loss]
        elif self.z_apart:
            found = [value, torch.zeros_like(value)]
        if self.counts_T is None and len(found) == 1:
            return [found[0].to(own_KT.dtype)], []
        return [counted(x_T.to(own_KT.dtype), self.counts_T) for x_T in found], []

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis:
        g = self.counted_gradient(grad)
        if not self.mean and not self.z_loss:
            return Basis(log_prob=-g)
        g = g.double()
        log_prob, lse, mean = -g, None, None
        if self.mean:
            e = self._smoothing(stats)
            log_prob, lse, mean = (e - 1) * g, e * g, -e * g
        if self.z_loss:
            of_square = g * (2 * self.z_loss) * counted(statistics.lse(stats), self.counts_T)
            lse = of_square if lse is None else lse + of_square
        return Basis(log_prob=log_prob, lse=lse, mean=mean)

    def _smoothing(self, stats: Statistics) -> Tensor | float:
        """Return e of `(1 - e) nll - e mean_log_prob`."""
        if not self.smooth_others:
            return self.label_smoothing
        assert stats.columns is not None
        return self.label_smoothing * stats.columns / (stats.columns - 1).clamp(min=1)

"""Read-outs: numbers per token that one pass over logits gives, and the gradient of the first of them; and those of
a label per token, log-probabilities and cross entropy, which every loss is made of.

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

# Per-token results, and what the gradient wants of forward: nothing of vocabulary size in either.
ReadOutResults = tuple[list[Tensor], list[Tensor]]
Flatten = Callable[[Tensor], Tensor]


# Before 2.13 torch's compiler traced no `copy.copy` of an object, and not its `__dict__`.
TRACES_COPIES = TorchVersion(torch.__version__) >= "2.13"

# Attributes that are no options: they follow from labels, of which each rank says more than what these hold, and from
# options.
_OF_THE_CALL = ("labels", "all_count", "counts_T", "masked_later", "begins", "candidates")


class ReadOut:
    """The base class of read-outs. A method or attribute that a class does not define adds nothing.

    Args:
        counts: `[...]`, bool: tokens that count; others get 0 and no gradient. None: all tokens. A class with labels
            has no `counts`: the tokens count whose label is not `ignore_index`.
    """

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
    counts: Any = None
    labels_T: Any = None  # token ids that it asks for
    counts_T: Any = None  # bool: tokens that count; None: all
    numbers_T: Tensor | None = None  # further integers that all ranks must pass alike
    teacher: Any = None  # a `Teacher`, or other `Logits`

    call: ResolvedHead
    parts: list[slice]  # how all ranks cut the tokens
    all_count: bool = False  # all labels were seen to be ids of the vocabulary that count
    masked_later: bool  # gradients through the softmax are taken at `counts_T` alone
    # The attributes that methods of the class, or the `Plan` of a call, write.
    _written: ClassVar[tuple[str, ...]] = ("all_count", "call", "counts", "counts_T", "labels_T", "masked_later")

    def __init_subclass__(cls) -> None:
        """Finds the attributes that its methods write: see `copied`."""
        functions = [x for x in vars(cls).values() if isinstance(x, FunctionType)]
        written = {each.argval for f in functions for each in get_instructions(f) if each.opname == "STORE_ATTR"}
        cls._written = tuple(sorted(written.union(cls._written)))

    def __init__(self, counts: Tensor | None = None):
        self.counts = counts

    def per_token(self) -> tuple[str, Tensor] | None:
        """The name and the value of an argument that has one entry for each token of all ranks: labels, or counts."""
        if self.labels is not None:
            return "labels", self.labels
        return None if self.counts is None else ("counts", self.counts)

    def copied(self) -> Self:
        """A copy for one call, whose tensors are the same ones: nothing is written onto the caller's object."""
        found = object.__new__(type(self))
        if not torch.compiler.is_compiling():
            found.__dict__.update(self.__dict__)
            return found
        if TRACES_COPIES:
            return copy.copy(self)
        for name in self._written:  # its class's own are copied with them, which does no harm
            if hasattr(self, name):
                setattr(found, name, getattr(self, name))
        return found

    def flatten(self, flat: Flatten) -> None:
        """Makes the read-out's per-token tensors `[T, ...]`, of a copy that has its `call`: labels, and which count."""
        if self.labels is not None:
            self.labels_T = flat(self.labels).long()
            if not self.reads_labels:  # else the plan has a copy
                self.labels_T = self.labels_T.clone()  # the caller may write them before backward
            self.counts_T = None if self.all_count and self.softmax else self.labels_T != self.ignore_index
        elif self.counts is not None:
            self.counts_T = flat(self.counts).clone()

    def options(self) -> dict[str, Any]:
        """The read-out's numbers and names, which must be the same on all ranks."""
        plain = int | float | str | bool | None
        found = {}
        for name, x in sorted(vars(self).items()):
            if name not in _OF_THE_CALL and isinstance(x, plain):
                found[name] = x
        return found

    def check(self, size: int, vocab: VocabShard | None, group: Group) -> ValueError | None:
        """Raise a fault of labels or counts that every rank sees; return one that this rank alone may see. It is called
        on a copy of the read-out.

        Args:
            size: of the vocabulary; if `vocab` is None, a guess from this rank's columns, as if shards were equal.
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

    def scan(self, rows: slice, logits: Sequence[Tensor], stats_Kt: Tensor, own_Kt: Any) -> None:
        """Write the statistics of this rank's columns for the tokens `rows`.

        Args:
            logits: `[t, V]`, as bias and softcap leave them: of the head that is read, and then of the read-out's
                teacher if it has one.
            stats_Kt: `[rows, t]`, written: what all ranks get.
            own_Kt: `[own_rows, t]`, written: what this rank keeps to itself; None without such rows.
        """

    def of_leaf(self, call: ResolvedHead) -> Self:
        """Return this read-out for the columns of one leaf, those of `call`."""
        part = self.copied()
        part.call = call
        return part

    def scan_leaves(self, of_leaves: "Sequence[ReadOut]", chunks: Sequence[Any]) -> None:
        """`scan` of all leaves of this rank, each with its arguments, which are `chunks`; where `by_leaf`."""
        for leaf, chunk in zip(of_leaves, chunks, strict=True):
            leaf.scan(*chunk)

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
        return statistics.added(x_RT, self.call)

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        """Return the results, and the tensors that the gradient needs.

        Args:
            stats: the `Statistics` of the shared pass; None if no read-out wants the softmax.
            stats_RKT: all ranks' rows, `[R, rows, T]`.
            own_KT: this rank's rows: `[own_rows, T]`, which were not sent, if the read-out has any, else `[rows, T]`.
        """
        raise NotImplementedError

    def results_of(self, value_T: Tensor, own_KT: Tensor) -> ReadOutResults:
        """Return `results` of one number a token whose gradient needs nothing: 0 where a token does not count."""
        return [counted(value_T.to(own_KT.dtype), self.counts_T)], []

    def counted_gradient(self, grad: Tensor) -> Tensor:
        """Return `grad`, 0 where a token does not count. If all read-outs count the same tokens, this is done later."""
        return grad if self.masked_later else counted(grad, self.counts_T)

    def basis(self, stats: Statistics, saved: list[Tensor], grad: Tensor) -> Basis | None:
        """The gradient in the form of every function of the softmax, given that of the first result."""
        return None

    def at_columns(self, saved: list[Tensor], rows: slice, grad: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return further gradients at a few columns of the tokens `rows`, beside that of the softmax: int64 token ids
        `[t, K]` of any rank's columns, in which an id may come twice, and the gradient of their logits after the
        temperature."""
        return None

    def at_places(self, saved: list[Tensor], rows: slice, grad: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Return further gradients at n places, any number for each of the tokens `rows`, beside that of the softmax:
        each place's token, counted from the first of `rows`; its int64 column of this rank's shard, which a token has
        once; and the gradient of its logit after the temperature."""
        return None

    def reads_logits(self, saved: list[Tensor], rows: slice) -> bool:
        """Return whether `pull`, if a read-out has one, adds anything for the tokens `rows`."""
        return type(self).pull is not ReadOut.pull

    def pull(
        self, saved: list[Tensor], rows: slice, logits: Sequence[Tensor], grad: Tensor, out_tV: Tensor, first: bool
    ) -> None:
        """Add the rest of the gradient of a chunk's logits to `out_tV`; `first`: write it, nothing is there yet."""


def _ids_exist(ids: Tensor, size: int, spared: int | None) -> Tensor:
    return passes_of(ids).ids_exist(ids, size, spared)


def counted(x_T: Tensor, counts_T: Tensor | None) -> Tensor:
    """0 where a token does not count."""
    return x_T if counts_T is None else x_T.masked_fill(~counts_T, 0.0)


def put(out: Tensor, value: Tensor, first: bool) -> None:
    """`out = value` where it is the `first`, else `out += value`."""
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

    Among equal logits the lowest id is the largest.
    """

    hits = True
    differentiable = False

    def results(self, stats: Any, stats_RKT: Tensor, own_KT: Tensor) -> ReadOutResults:
        return [stats.hits.clone() if self.counts_T is None else stats.hits & self.counts_T], []


_OFF = {"label_smoothing": 0.0, "z_loss": 0.0}


class CrossEntropy(OfLabels):
    """`(1 - e) nll - e mean_log_prob + z_loss lse^2` of each label, as `torch.nn.functional.cross_entropy` has it.

    Args:
        labels, ignore_index: as for `LogProbs`.
        label_smoothing: e, in [0, 1).
        z_loss: factor of `lse^2`.
        smooth_others: e is the mass of the other tokens alone, as in Megatron-Core: `e V / (V - 1)` stands for e.
        z_apart: the last term is a second result, without a gradient; the gradient of the first one is that of both.
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
        """e of `(1 - e) nll - e mean_log_prob`."""
        if not self.smooth_others:
            return self.label_smoothing
        assert stats.columns is not None
        return self.label_smoothing * stats.columns / (stats.columns - 1).clamp(min=1)

"""Row statistics: of one rank, signed with its options and labels, exchanged, checked, and combined into those of the
whole vocabulary.

Legend: T tokens, K statistics of a shard (see `passes.py`), R ranks, N ids of tokens, or parts of the vocabulary.
Everything here is `[T]` or `[K, T]`: nothing of vocabulary size.

Shards' statistics are fp32 (fp64 for fp64 input). What is made of them is fp64, a few numbers per token, and is rounded
once, where it leaves this module or `logit_gradient.py`: in fp32 `(z_y - M) - log S` would round three times, as
PyTorch's log_softmax does, and the gradient of the label's logit as often. M and log S stay apart and sums are taken of
z - m: at logits near 1000 the lse in fp32 is off by 6e-5.

Statistics of ranks that disagree would be combined into wrong numbers without a word: two numbers that travel with them
tell of options and labels. They are checksums below 2^23, exact in fp32, odd, and alike in every process; 0 stands for
one that is not known. What the statistics of all ranks show to be wrong is raised on every rank alike.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, reduce
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group, VocabShard
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.numerics.tensors import accumulation_dtype, has_values, part_of, raise_unless
from megatron_ext.numerics.tree_sums import in_tree

MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # of Fibonacci hashing (Knuth, The Art of Computer Programming 3)
_MASK = (1 << 23) - 1
_more: ContextVar[str] = ContextVar("_more", default="")


def in_words(options: dict[str, Any]) -> str:
    """Names and values; of equal numbers the same words."""
    words = []
    for name, value in options.items():
        plain = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        words.append(f"{name} {plain}")
    return ", ".join(words)


def options_checksum(words: str) -> int:
    """A number for options in words."""
    return zlib.crc32((words + _more.get()).encode()) & _MASK | 1


@contextmanager
def agreeing_on(words: str) -> Iterator[None]:
    """Calls within must agree on these words, too: a rank that alone has them is told as one of other options is."""
    token = _more.set(_more.get() + words)
    try:
        yield
    finally:
        _more.reset(token)


def labels_checksum(ids: Sequence[Tensor], places_T: Tensor | None = None) -> Tensor | int:
    """A number for ids `[T]` or `[T, N]`, whatever their order in memory; 0 of none. On CUDA it is int64 without dims.

    `places_T`: where the tokens are in the order that all ranks know, if they are in another one.
    """
    sums: list[Tensor] = []
    for x in ids:
        places = torch.arange(x.shape[0], device=x.device) if places_T is None or not len(x) else places_T
        if x.dim() == 2:
            places = places.unsqueeze(1) * x.shape[1] + torch.arange(x.shape[1], device=x.device)
        sums.append(scrambled(torch.add(x, places, alpha=MULTIPLIER)).sum())
    if not sums:
        return 0
    total = reduce(torch.add, sums)
    return (total if total.is_cuda else int(total)) & _MASK | 1


def scrambled(x: Tensor) -> Tensor:
    """int64 numbers as others; only the upper half, which depends on all bits below it."""
    mixed = x * MULTIPLIER
    mixed = (mixed ^ (mixed >> 29)) * MULTIPLIER
    return mixed >> 32


def gathered_numbers(
    numbers: Sequence[int], words: str, ids: Sequence[Tensor], group: Group, device: torch.device
) -> Tensor:
    """Every rank's `numbers`, and behind them those of its options and its labels, int64 `[R, N + 2]`.

    Communicates: 1 all-gather.
    """
    own = torch.zeros(1, len(numbers) + 2, dtype=torch.int64, device=device)
    for i, number in enumerate(numbers):
        own[:, i] = number
    if has_values(own):
        own[:, -2], own[:, -1] = options_checksum(words), labels_checksum(ids)
    return collectives.all_gather(own, group)


# Rows of the statistics tensor. The first three are always there; the others follow in this order where asked for.
MAX, SUM_EXP, TARGET = 0, 1, 2

# Rows of one more column that a rank sends beside its statistics: how large it takes the vocabulary to be (REFUSED if
# it refused its arguments), how many columns of it are its own, the first of them, and what `agreement` says of options
# and labels.
SIZE, COUNTED, START, OPTIONS, LABELS = range(5)
REFUSED = -1.0


# Shared rows that every call sends, the softcap's slope aside: a rank with other options is told so then.
SENT = 7


class Statistics(NamedTuple):
    """Numbers for each token, of the whole vocabulary and in fp64; `shift` is this rank's alone.

    This rank's exponentials are `exp(z - shift)`. `shift` is about the maximum of its shard, 0 where all of that is
    -inf, and has the dtype of the passes over logits.
    """

    largest: Tensor  # M = max z
    log_sum: Tensor  # log S, S = sum exp(z - M)
    target: Tensor  # z_y - M
    shift: Tensor  # finite
    mean: Tensor | None  # mean of z - M over the columns that count
    columns: Tensor | None  # how many those are
    expected: Tensor | None  # E_p[z - M]
    hits: Tensor | None  # bool: the label has the largest logit, the lowest id among equals
    bend: Tensor | None  # the softcap's slope at the label, 0 where another rank owns it


def own_rows(call: ResolvedHead) -> int:
    """Number of rows K that `row_statistics` writes."""
    return 3 + 2 * call.mean + call.expected + call.hits + (call.softcap is not None)


def new_statistics(
    tokens: int, shared: int, ranks: int, dtype: torch.dtype, device: torch.device, more: int = 0
) -> Tensor:
    """`[K, T + 1]`: room for the `shared` rows and `more`, and the column that says whose it is."""
    stats_KT = torch.empty(shared + more, tokens + 1, dtype=dtype, device=device)
    if ranks == 1:  # nothing is sent, and nobody reads that column
        return stats_KT
    part_of(stats_KT, slice(0, shared)).zero_()  # not all of them are written
    if more:
        stats_KT[shared:, -1] = 0
    return stats_KT


def sign(stats_KT: Tensor, vocab: VocabShard, *checksums: int | Tensor) -> None:
    """Makes the last column of `stats_KT` say whose it is, and with `checksums` of what options and labels.

    Tensors without values have no checksums.
    """
    numbers = vocab.size, vocab.counted, vocab.start, *checksums
    if checksums and not stats_KT.is_cuda:
        stats_KT[: len(numbers), -1] = torch.tensor(numbers, dtype=stats_KT.dtype)
        return
    for row, number in enumerate(numbers):
        if isinstance(number, Tensor):
            stats_KT[row, -1].copy_(number)
        else:
            stats_KT[row, -1].fill_(number)  # on CUDA an assignment of a number is a copy that waits


def gathered(stats_KT: Tensor, call: ResolvedHead, places_T: Tensor | None, tokens: int) -> Tensor:
    """Every rank's statistics, `[R, K, T + 1]`. Communicates: 1 all-gather.

    Args:
        places_T: where this rank's tokens are in the order that all ranks know, if they are in another one.
        tokens: how many there are in that order, if more than this rank has.
    """
    if call.softcap is not None:
        stats_KT = stats_KT[:SENT]  # its slope at the label is nobody else's
    if places_T is None:
        return collectives.all_gather(stats_KT.unsqueeze(0), call.group)
    places_T = F.pad(places_T, (0, 1), value=tokens)
    sent_KT = stats_KT.new_zeros(stats_KT.shape[0], tokens + 1).index_copy_(1, places_T, stats_KT)
    stats_RKT = collectives.all_gather(sent_KT.unsqueeze(0), call.group)
    found_T = stats_RKT.flatten(0, 1).index_select(1, places_T)  # of 3 dims it is 10 times slower
    return found_T.view(*stats_RKT.shape[:2], -1)


def combine(stats_RKT: Tensor, own_KT: Tensor, shift_T: Tensor, call: ResolvedHead) -> Statistics:
    """The statistics of all shards together; `own_KT` are this rank's. The last column of both is left out.

    `shift_T`: what this rank's exponentials are relative to.
    """
    whole: Sequence[Tensor]
    if stats_RKT.shape[0] == 1:
        whole = stats_RKT[0, :, :-1].double().unbind()
    elif call.bits == "tensor_parallel":
        whole = joined(stats_RKT, call)[:, :-1].double().unbind()
    else:
        whole = _merged(stats_RKT[..., :-1].double(), stats_RKT[:, START, -1:], call)
    peaks, total, target, *rows = whole
    total = total.clamp(min=1.0)  # less only in a row of -inf: its label has -inf, and nothing NaN
    more = iter(rows)
    mean = columns = expected = hits = bend = None
    if call.mean:
        sums, columns = next(more), next(more).clone()
        mean = sums / columns
    if call.expected:
        expected = next(more) / total
    if call.hits:
        hits = next(more) > 0
    if call.softcap is not None:
        bend = own_KT[own_rows(call) - 1, :-1].clone()
    # Copies of what is kept for backward, which would keep all rows otherwise, and which torch's compiler needs apart.
    return Statistics(peaks.clone(), total.log(), target - _finite(peaks), shift_T, mean, columns, expected, hits, bend)


def joined(stats_NKT: Tensor, call: ResolvedHead) -> Tensor:
    """The statistics of neighbouring parts of the vocabulary as those of one part, `[K, T]`, by twos in the tree's
    order and rounded at each step: so ranks may join theirs, or send them first.

    The softcap's slope at the label is none of them.
    """
    own_NKT = stats_NKT[:, : own_rows(call) - (call.softcap is not None)]
    return in_tree(own_NKT.unbind(0), lambda one_KT, other_KT: _joined(one_KT, other_KT, call))


def _joined(one_KT: Tensor, other_KT: Tensor, call: ResolvedHead) -> Tensor:
    both_2KT = torch.stack([one_KT, other_KT]).double()
    order_21 = torch.arange(2.0, dtype=one_KT.dtype, device=one_KT.device).unsqueeze(1)
    return torch.stack(_merged(both_2KT, order_21, call)).to(one_KT.dtype)


def _merged(stats_RKT: Tensor, start_R1: Tensor, call: ResolvedHead) -> list[Tensor]:
    """The rows of several parts of the vocabulary as those of one part, fp64; `start`: the first column of each."""
    peaks_RT, sums_RT = stats_RKT[:, MAX], stats_RKT[:, SUM_EXP]
    largest = peaks_RT.amax(0)
    # Below the common maximum by this much; a part without a finite column weighs nothing.
    below_RT = peaks_RT - _finite(largest)
    weight_RT = below_RT.exp()
    if call.mean or call.expected:
        below_RT = below_RT.where(peaks_RT > -torch.inf, 0.0)  # and adds nothing, at any distance
    rows = [largest, added(sums_RT * weight_RT, call), stats_RKT[:, TARGET].amax(0)]
    if call.mean:
        of_all_RT, columns_RT = stats_RKT[:, len(rows)], stats_RKT[:, len(rows) + 1]
        rows += [added(of_all_RT + columns_RT * below_RT, call), columns_RT.sum(0)]
    if call.expected:
        rows.append(added(weight_RT * (stats_RKT[:, len(rows)] + sums_RT * below_RT), call))
    if call.hits:
        first = start_R1.where(peaks_RT == largest, torch.inf).argmin(0, keepdim=True)
        rows.append(stats_RKT[:, len(rows)].gather(0, first).squeeze(0))
    return rows


def added(x_RT: Tensor, call: ResolvedHead) -> Tensor:
    """The sum of all shards' numbers, in the tree's order where bits are fixed."""
    return in_tree(x_RT.unbind(0), torch.add) if call.bits != "fast" else x_RT.sum(0)


def fingerprint(z_TV: Tensor, counted: int) -> Tensor:
    """`[2, T]`: a logit and the sum of a few, by which the same logits on every rank show, instead of all of them."""
    if not counted:
        return z_TV.new_zeros(2, z_TV.shape[0], dtype=accumulation_dtype(z_TV.dtype))
    few_TN = z_TV[:, : counted : max(1, counted // 16)].to(accumulation_dtype(z_TV.dtype))
    return torch.stack([few_TN[:, 0], few_TN.sum(1)])


def lse(stats: Statistics) -> Tensor:
    """`log sum exp z`."""
    return stats.largest + stats.log_sum


def _finite(peak_T: Tensor) -> Tensor:
    """0 where a row has no finite logit: a reference point that can be subtracted."""
    return peak_T.nan_to_num(0.0, torch.inf, 0.0)


REFUSAL = "another rank of tp_group refused its arguments (its own error says which): they must fit on every rank"
SHARDS = (
    "vocab: the shards of the ranks of tp_group must cover one vocabulary once, and agree on its size; pass "
    "vocab=VocabShard(start, stop, size) on each rank, or shards of equal width without it. Over gloo a rank also sees "
    "this of others that passed fewer tokens: pass the same tokens on each"
)
SATURATED = 0.99  # of the softcap: a shard's largest logit that is above tells nothing about the shard


def check_exchange(stats_RKT: Tensor, labels_T: Tensor, call: ResolvedHead, words: str = "") -> None:
    """Raises on every rank alike what only the statistics of all ranks together show.

    Without a host sync, as `raise_unless`; not looked at while compiling or on fake tensors. `words`: this rank's
    options.
    """
    if stats_RKT.shape[0] == 1 or not has_values(stats_RKT):
        return
    said_RN = stats_RKT[:, : LABELS + 1, -1]
    if not said_RN.is_cuda:
        said = [*map(tuple, said_RN.tolist())]
        if len(said[0]) > LABELS and len({each[LABELS] for each in said}) == 1:
            said = [(*each[:LABELS], 0.0) for each in said]  # alike: which labels they are is no matter
        _check_said_on_host(tuple(said), words)
    else:
        _check_said(said_RN, words)
    check_apart(stats_RKT[:, MAX : SUM_EXP + 1, :-1], labels_T, call)


@lru_cache(maxsize=256)
def _check_said_on_host(said: tuple[tuple[float, ...], ...], words: str) -> None:
    """Check once what ranks say call after call."""
    _check_said(torch.tensor(said, dtype=torch.float64), words)


def _check_said(said_RN: Tensor, words: str) -> None:
    """Check what the last column of statistics, from its first row on, shows for `check_exchange`."""
    size_R, counted_R, start_R = (said_RN[:, row] for row in (SIZE, COUNTED, START))
    raise_unless((size_R != REFUSED).all(), REFUSAL)
    if said_RN.shape[1] > LABELS:
        check_agreement(said_RN[:, OPTIONS : LABELS + 1], words)
    stop_R, size = start_R + counted_R, size_R[0]
    begin_RR, end_RR = torch.maximum(start_R, start_R.unsqueeze(1)), torch.minimum(stop_R, stop_R.unsqueeze(1))
    common_RR = (end_RR - begin_RR).clamp_(min=0)  # columns of each two shards: of one with itself, all of them
    raise_unless((size_R == size).all() & (counted_R.sum() == size) & (common_RR.sum() == size), SHARDS)


class OptionsDiffer(ValueError):
    """The options of a call, or the words that go with them, are not the same on every rank."""


def check_agreement(numbers_R2: Tensor, words: str) -> None:
    """Raises on every rank, as `check_exchange` does, where ranks passed different options or labels.

    `numbers_R2`: what `agreement` makes of these on each rank; 0 where it does not say. `words`: this rank's options.
    """
    same_2 = ((numbers_R2 == numbers_R2.amax(0)) | (numbers_R2 == 0)).all(0)
    if same_2.is_cuda or not same_2.all():
        raise_unless_same(same_2[0], same_2[1], words)


def raise_unless_same(options: Tensor, labels: Tensor, words: str) -> None:
    """Raises on every rank unless the `options`, this rank's in `words`, and the `labels` are the same on all."""
    raise_unless(
        options,
        f"the options are not the same on every rank of tp_group; this rank's: {words}. Pass the same on each; also "
        f"return_entropy and return_hits, where one rank alone logs them: they change what is computed and sent",
        OptionsDiffer,
    )
    raise_unless(
        labels,
        "labels are not the same on every rank of tp_group (or the token ids asked for, or which of them loss_mask and "
        "ignore_index leave): the ranks share the vocabulary, and each must pass the labels of all tokens. If sequence "
        'parallelism cut the hidden states, pass hidden_layout="sequence" and whole labels; else give all of them the '
        "same batch",
    )


def check_apart(sums_RKT: Tensor, labels_T: Tensor, call: ResolvedHead) -> None:
    """Raises on every rank, as `check_exchange` does, where each holds the whole vocabulary and not a shard of it.

    Then the sums of all ranks are equal, and no label is past the first rank's columns. Shards of one vocabulary do not
    look like that, unless all tokens are alike (a weight of zeros), or the shards hold the same rows in another order.
    """
    if sums_RKT.shape[2] == 0:
        return
    if not sums_RKT.is_cuda and call.largest is None and not torch.equal(sums_RKT[1:], sums_RKT[:-1]):
        return
    differ, columns = sums_RKT != sums_RKT[:1], call.vocab.columns
    if call.largest is None:
        alike = sums_RKT == sums_RKT[..., :1]
    else:  # where logits reach the softcap, those of different shards are alike
        tells = (sums_RKT[:, :1].abs() < SATURATED * call.largest).any(0, keepdim=True)
        first = tells.byte().argmax(2, keepdim=True).expand_as(sums_RKT[..., :1])
        differ, alike = differ & tells, (sums_RKT == sums_RKT.gather(2, first)) | ~tells
    apart = differ.any() | (labels_T >= columns).any() | alike.all()
    if apart.is_cuda or not apart:
        raise_unless_apart(apart, columns)


def raise_unless_apart(apart: Tensor, columns: int) -> None:
    """Raises on every rank unless the ranks' shards, of `columns` columns each, are not all the same ones."""
    raise_unless(
        apart,
        f"every rank of tp_group passed the same {columns} columns: each must pass its own shard of the "
        f"vocabulary; scatter gathered logits (or the weight) over the group, or call without a group",
    )

"""Checks of the statistics that all ranks have sent: what they show is raised on every rank alike.

Legend: T tokens, K statistics, R ranks, N numbers of each.
"""

from functools import lru_cache

import torch
from torch import Tensor

from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import COUNTED, LABELS, MAX, OPTIONS, REFUSED, SIZE, START, SUM_EXP
from megatron_ext.numerics.readable_values import has_values, raise_unless

REFUSAL = "another rank of tp_group refused its arguments (its own error says which): they must fit on every rank"
_SATURATED = 0.99  # of the softcap: a shard's largest logit that is above tells nothing about the shard


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
    raise_unless(
        (size_R == size).all() & (counted_R.sum() == size) & (common_RR.sum() == size),
        "vocab: the shards of the ranks of tp_group must cover one vocabulary once, and agree on its size; pass "
        "vocab=VocabShard(start, stop, size) on each rank, or shards of equal width without it",
    )


class OptionsDiffer(ValueError):
    """The options of a call, or the words that go with them, are not the same on every rank."""


def check_agreement(numbers_R2: Tensor, words: str) -> None:
    """Raises on every rank, as `check_exchange` does, where ranks passed different options or labels.

    `numbers_R2`: what `agreement` makes of these on each rank; 0 where it does not say. `words`: this rank's options.
    """
    same_options, same_labels = ((numbers_R2 == numbers_R2.amax(0)) | (numbers_R2 == 0)).all(0)
    raise_unless(
        same_options,
        f"the options are not the same on every rank of tp_group; this rank's: {words}. Pass the same on each; also "
        f"return_entropy and return_hits, where one rank alone logs them: they change what is computed and sent",
        OptionsDiffer,
    )
    raise_unless(
        same_labels,
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
    if not has_values(sums_RKT) or sums_RKT.shape[2] == 0:
        return
    if not sums_RKT.is_cuda and call.largest is None and not torch.equal(sums_RKT[1:], sums_RKT[:-1]):
        return
    differ = sums_RKT != sums_RKT[:1]
    if call.largest is None:
        alike = sums_RKT == sums_RKT[..., :1]
    else:  # where logits reach the softcap, those of different shards are alike
        tells = (sums_RKT[:, :1].abs() < _SATURATED * call.largest).any(0, keepdim=True)
        first = tells.byte().argmax(2, keepdim=True).expand_as(sums_RKT[..., :1])
        differ, alike = differ & tells, (sums_RKT == sums_RKT.gather(2, first)) | ~tells
    raise_unless(
        differ.any() | (labels_T >= call.vocab.columns).any() | alike.all(),
        f"every rank of tp_group passed the same {call.vocab.columns} columns: each must pass its own shard of the "
        f"vocabulary; scatter gathered logits (or the weight) over the group, or call without a group",
    )

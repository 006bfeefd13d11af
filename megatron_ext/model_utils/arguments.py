"""Conversion of the arguments that this package's functions share to those of head/.

Legend: B sequences, S positions on this rank, V vocabulary, R ranks of the tensor-parallel group.
"""

import numbers
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ext import head
from megatron_ext.distributed.groups import UNSHARDED, Group, VocabShard, check_group, group_rank, group_size
from megatron_ext.head.checks import NO_SIZE, filters, or_refuse
from megatron_ext.sequence.targets import IGNORE_INDEX, Targets


@dataclass(frozen=True)
class TrainingSamplingParams:
    """Parameters with which the tokens were sampled. Any object with these attributes will do.

    Logits are divided by the temperature, then the k largest are kept, then of these the fewest whose probabilities
    add up to p. See `megatron_ext.head.sampled_log_probs` for ties and for labels that are not kept.

    Functions that take logits do not read the temperature: the caller divides the logits before the call, as all of
    NeMo-RL does. Functions that take hidden states divide the logits themselves.

    Attributes:
        top_k: at least 1; more than the vocabulary keeps all of it; None, -1 or 0: off.
        top_p: in (0, 1]; None or 1: off.
        temperature: above 0.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0


PADDING = -1  # a token id that stands for no token: its result is 0


def padding_ignored(labels: Any) -> Any:
    """Replace `PADDING` by `IGNORE_INDEX` in labels; leave labels that are no integers for the head to refuse."""
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype in (torch.bool, torch.complex64):
        return labels
    labels = labels.long()
    return labels.masked_fill(labels == PADDING, IGNORE_INDEX)


def without_padding(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Return token ids with 0 for `PADDING`, and a bool mask of those that were no padding."""
    there = indices.long() != PADDING  # a byte of 255 would be equal
    return indices.where(there, 0), there


def number(value: Any) -> Any:
    """Convert a number of numpy to Python's; return anything else as it is."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return value


def sampling_of(params: Any) -> TrainingSamplingParams:
    """Make the parameters from any object with the attributes; None: nothing is filtered or scaled."""
    if params is None:
        return TrainingSamplingParams()
    top_k, top_p = number(params.top_k), 1.0 if params.top_p is None else number(params.top_p)
    off = isinstance(top_k, int) and not isinstance(top_k, bool) and top_k == 0
    return TrainingSamplingParams(None if off else top_k, top_p, number(getattr(params, "temperature", 1.0)))


Columns = tuple[int, int] | VocabShard | None
"""This rank's columns: `[start, stop)` as a caller gives them, or a shard known to be right; None: equal shards."""


def log_probs(
    logits_BSV: Tensor,
    labels_BS: Tensor,
    columns: Columns,
    tp_group: Group,
    chunk_size: int | None,
    sampling_params: Any = None,
) -> Tensor:
    """Return log-probabilities `[B, S]` of the labels, in the filtered distribution if `sampling_params` are given.

    `PADDING` as a label gives 0.
    """
    sampling = sampling_of(sampling_params)
    vocab = shard(*columns, logits_BSV.shape[-1], tp_group) if isinstance(columns, tuple) else columns
    return head.sampled_log_probs(
        logits_BSV,
        padding_ignored(labels_BS),
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        tp_group=whole_if_none(tp_group),
        vocab=vocab,
        chunk_tokens=chunk_tokens(chunk_size, logits_BSV.shape[:-2].numel()),
    )


def check_call(chunk_size: int | None, sampling_params: Any) -> None:
    """Raise ValueError for faults of these two arguments, which every rank of every group can see."""
    chunk_tokens(chunk_size, 1)
    sampling = sampling_of(sampling_params)
    filters(sampling.top_k, sampling.top_p)


def whole_results(targets: Targets, compute: Callable[[Tensor], Any], like: Tensor) -> Any:
    """Return what `compute` makes of this rank's labels `[B, P]`, a tensor or a tuple, as results of whole
    sequences."""
    labels = targets.labels()
    found, fault = or_refuse(lambda: compute(labels), labels.shape, like)
    if isinstance(found, tuple):
        return tuple(targets.results(x) for x in found)
    return targets.results(found, fault)


def next_log_probs(
    logits: Tensor,
    targets: Targets,
    columns: Columns,
    tp_group: Group,
    chunk_size: int | None,
    sampling_params: Any,
    inference_only: bool = False,
) -> Tensor:
    """Return `[B, S - 1]`, the `log_probs` of the token that follows each token of whole sequences."""
    check_call(chunk_size, sampling_params)

    def compute(labels: Tensor) -> Tensor:
        return log_probs(logits, labels, columns, tp_group, chunk_size, sampling_params)

    with saving(not inference_only):
        return whole_results(targets, compute, logits)


def local(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor."""
    return x.to_local() if isinstance(x, DTensor) else x


def saving(wanted: bool) -> AbstractContextManager:
    """Return a context in which autograd saves what backward needs, if `wanted` and not switched off outside."""
    return torch.set_grad_enabled(torch.is_grad_enabled() and wanted)


def shard(start: int, stop: int, columns: int, tp_group: Group) -> VocabShard | None:
    """Return None, which means equal shards to the head, if `[start, stop)` is this rank's range of equal shards.

    If it is not, return a shard of a vocabulary size that no other rank has: the head then raises on every rank, in the
    exchange that it makes anyway.
    """
    rank, ranks = group_rank(check_group(tp_group)), group_size(tp_group)
    fits = (start, stop) == (rank * columns, (rank + 1) * columns)
    if ranks == 1 and not fits:
        raise ValueError(
            f"vocab_start_index is {start} and vocab_end_index {stop} for {columns} columns of the vocabulary on one "
            f"rank: they must be 0 and {columns}; pass the tp_group whose ranks hold the rest"
        )
    return None if fits else VocabShard(rank * columns, (rank + 1) * columns, NO_SIZE)


def whole_if_none(tp_group: Group) -> Group:
    """Return `UNSHARDED` for None, by which NeMo-RL means whole logits, whatever ranks Megatron was set up on."""
    return UNSHARDED if tp_group is None else tp_group


def chunk_tokens(chunk_size: int | None, sequences: int) -> int | None:
    """Count the tokens of a chunk of `chunk_size` positions of all sequences; None: the head chooses."""
    if chunk_size is None:
        return None
    chunk_size = number(chunk_size)
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int) or chunk_size < 1:
        raise ValueError(
            f"chunk_size is {chunk_size!r}: it must be a positive number of sequence positions, or None for the head "
            f"to choose; it changes memory, not results"
        )
    return chunk_size * max(sequences, 1)


def check_dims(what: str, x: Any, dims: int, rule: str) -> None:
    """Raise ValueError, which begins with `what` and ends in the `rule`, unless `x` is a tensor of `dims` dims."""
    if not isinstance(x, Tensor) or x.dim() != dims:
        raise ValueError(f"{what} {tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__}: {rule}")


def check_logits(logits: Tensor) -> None:
    """Raise ValueError unless the logits are `[B, S, V/R]`."""
    rule = "they must be [batch, sequence, vocabulary shard]; add the dims of size 1"
    check_dims("logits are", logits, 3, rule)


def columns_of(logits: Tensor, rank: int | None, tp_group: Group) -> tuple[int, int]:
    """Return the first of this rank's columns and the one past the last; `rank` None: its rank in the group."""
    if tp_group is None and rank:
        raise ValueError(
            f"vocab_parallel_rank is {rank} and vocab_parallel_group None: without a group the logits are whole, and "
            f"no rank has a shard of them; pass the group whose ranks share the vocabulary, or no rank"
        )
    columns = logits.shape[-1]
    start = columns * (group_rank(tp_group) if rank is None else rank)
    return start, start + columns

"""Check every rank's statistics in one launch, where the plain checks take 33 small ones."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.call import statistics
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.numerics.launches import launch
from megatron_ext.numerics.tensors import raise_unless

_TOKENS = 256  # tokens that the program compares at a time; real shards differ in the first ones already


@triton.jit
def exchange_checks_kernel(
    stats_ptr,
    labels_ptr,
    fine_ptr,
    tokens,
    labels,
    columns,
    largest,
    stride_r,
    stride_k,
    stride_t,
    RANKS: tl.constexpr,
    ROWS: tl.constexpr,
    CAPPED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write five bools to `fine`: no rank refused its arguments; the shards cover one vocabulary; options agree; labels
    agree; the shards are not all the same columns. A single program runs.

    Args:
        stats_ptr: `[RANKS, K, tokens + 1]`, fp32 or fp64: maxima, sums of exponentials, ...; signed in the last column.
        labels_ptr: `[labels]`, integers, token ids; `labels` need not be the number of `tokens`.
        fine_ptr: `[5]`, written.
        columns: number of columns of this rank's shard. largest: with CAPPED, maxima from it on tell nothing.
        tokens: number of tokens that are compared. ROWS: RANKS rounded up to a power of two.
    """
    rank = tl.arange(0, ROWS).to(tl.int64)  # a rank's statistics may be 2^31 numbers away
    live = rank < RANKS
    said = stats_ptr + rank * stride_r + tokens * stride_t
    size = tl.load(said, mask=live, other=0.0).to(tl.int64)
    counted = tl.load(said + stride_k, mask=live, other=0.0).to(tl.int64)
    start = tl.load(said + 2 * stride_k, mask=live, other=0.0).to(tl.int64)
    whole = tl.sum(tl.where(rank == 0, size, 0), 0)
    stop = start + counted
    common = tl.minimum(stop[:, None], stop[None, :]) - tl.maximum(start[:, None], start[None, :])
    common = tl.sum(tl.sum(tl.where((common > 0) & live[:, None] & live[None, :], common, 0), 1), 0)
    same = tl.max(tl.where(live & (size != whole), 1, 0), 0) == 0
    tl.store(fine_ptr, tl.max(tl.where(live & (size == -1), 1, 0), 0) == 0)
    tl.store(fine_ptr + 1, same & (tl.sum(counted, 0) == whole) & (common == whole))
    for number in tl.static_range(2):
        own = tl.load(said + (3 + number) * stride_k, mask=live, other=0.0).to(tl.int64)
        agreed = tl.max(tl.where(live & (own != 0) & (own != tl.max(own, 0)), 1, 0), 0) == 0
        tl.store(fine_ptr + 2 + number, agreed)

    # Shards of one vocabulary differ in their sums, or a label is past one shard's columns: mostly at the first tokens.
    at, apart, unalike = 0, 0, 0
    first = tokens  # the first token whose sums tell something; the others are compared with this token
    while (at < tokens) & (apart == 0):
        token = at + tl.arange(0, BLOCK)
        inside = token < tokens
        place = stats_ptr + rank[:, None] * stride_r + token[None, :] * stride_t
        both = live[:, None] & inside[None, :]
        peak = tl.load(place, mask=both, other=0.0)
        total = tl.load(place + stride_k, mask=both, other=0.0)
        tells = inside
        if CAPPED:
            tells = inside & (tl.max(tl.where(both & (tl.abs(peak) < largest), 1, 0), 0) > 0)
        of_first = stats_ptr + token * stride_t
        peak_0 = tl.load(of_first, mask=inside, other=0.0)
        total_0 = tl.load(of_first + stride_k, mask=inside, other=0.0)
        compared = live[:, None] & tells[None, :]
        differ = compared & ((peak != peak_0[None, :]) | (total != total_0[None, :]))
        label = tl.load(labels_ptr + token, mask=inside & (token < labels), other=-1)
        apart = tl.max(tl.max(differ.to(tl.int32), 1), 0) | tl.max((label >= columns).to(tl.int32), 0)
        first = tl.minimum(first, tl.min(tl.where(tells, token, tokens), 0))
        base = stats_ptr + rank * stride_r + first * stride_t
        known = live & (first < tokens)
        peak_1 = tl.load(base, mask=known, other=0.0)
        total_1 = tl.load(base + stride_k, mask=known, other=0.0)
        other = compared & ((peak != peak_1[:, None]) | (total != total_1[:, None]))
        unalike |= tl.max(tl.max(other.to(tl.int32), 1), 0)
        at += BLOCK
    tl.store(fine_ptr + 4, (apart != 0) | (unalike == 0))


def exchange_checks(stats_RKT: Tensor, labels_T: Tensor, call: ResolvedHead) -> Tensor:
    """Return `[5]`, int8, 1 where all is well: refusal, vocabulary, options, labels, shards that are not the same."""
    ranks, _, tokens = stats_RKT.shape
    fine = torch.empty(5, dtype=torch.int8, device=stats_RKT.device)
    launch(
        exchange_checks_kernel,
        (1,),
        stats_RKT,
        labels_T.contiguous(),
        fine,
        tokens - 1,
        labels_T.numel(),
        call.vocab.columns,
        statistics.SATURATED * (call.largest or 0.0),
        *stats_RKT.stride(),
        RANKS=ranks,
        ROWS=triton.next_power_of_2(ranks),
        CAPPED=call.largest is not None,
        BLOCK=_TOKENS,
        num_warps=4,
    )
    return fine


def check_exchange(stats_RKT: Tensor, labels_T: Tensor, call: ResolvedHead, words: str = "") -> None:
    """Raise what all ranks' statistics show. See `megatron_ext.head.call.statistics.check_exchange`."""
    if stats_RKT.shape[0] == 1:
        return
    refused, shards, options, labels, apart = exchange_checks(stats_RKT, labels_T, call).unbind()
    raise_unless(refused, statistics.REFUSAL)
    statistics.raise_unless_same(options, labels, words)
    raise_unless(shards, statistics.SHARDS)
    statistics.raise_unless_apart(apart, call.vocab.columns)

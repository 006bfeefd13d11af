"""Token ids in one launch each: whether all exist, their columns in a shard, their checksum. The first and the last
run in one program; for many ids, where torch's dozen launches are faster, they call the functions in PyTorch.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.call import statistics
from megatron_ext.head.kernels.logits import packed
from megatron_ext.numerics import tensors
from megatron_ext.numerics.launches import launch

_IDS = 8192  # ids that `ids_exist_kernel` reads in a step
_MOST = 1 << 17  # ids that one program reads at most: 16 steps
_COLUMNS = 1024  # ids of a program of `columns_kernel`


@triton.jit
def ids_exist_kernel(ids_ptr, fine_ptr, count, size, spared, BLOCK: tl.constexpr):
    """Write to fine_ptr: `[]` whether each id of ids_ptr: `[count]` is in [0, size), or is `spared`. One program."""
    wrong = tl.zeros([BLOCK], tl.int32)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        ids = tl.load(ids_ptr + at, mask=inside, other=0).to(tl.int64)
        outside = inside & ((ids < 0) | (ids >= size))
        if spared is not None:
            outside = outside & (ids != spared)
        wrong |= outside.to(tl.int32)
    tl.store(fine_ptr, tl.max(wrong, 0) == 0)


@triton.jit
def columns_kernel(ids_ptr, counts_ptr, out_ptr, tokens, start, stop, BLOCK: tl.constexpr):
    """Write the shard's column of each id in `[start, stop)`; -1 for other ids, and where `counts` is False.

    ids_ptr: `[T]`, int64, T the `tokens`; counts_ptr: `[T]`, bool; out_ptr: `[T]`, int64, written.
    """
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < tokens
    ids = tl.load(ids_ptr + at, mask=inside, other=-1)
    own = (ids >= start) & (ids < stop)
    if counts_ptr is not None:
        own = own & (tl.load(counts_ptr + at, mask=inside, other=0) != 0)
    tl.store(out_ptr + at, tl.where(own, ids - start, -1), mask=inside)


@triton.jit
def ids_checksum_kernel(ids_ptr, before_ptr, out_ptr, count, multiplier, LAST: tl.constexpr, BLOCK: tl.constexpr):
    """Write `before`, or 0, plus the sum of `count` scrambled ids; for the LAST tensor of ids the checksum made of this
    sum. One program. ids_ptr: `[count]`; before_ptr: `[]`; out_ptr: `[]`, written; multiplier: of the hash."""
    total = tl.zeros([BLOCK], tl.int64)
    for start in range(0, count, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < count
        mixed = (tl.load(ids_ptr + at, mask=inside, other=0).to(tl.int64) + at * multiplier) * multiplier
        mixed = (mixed ^ (mixed >> 29)) * multiplier
        total += tl.where(inside, mixed >> 32, 0)
    found = tl.sum(total, 0)
    if before_ptr is not None:
        found += tl.load(before_ptr)
    if LAST:
        found = (found & ((1 << 23) - 1)) | 1
    tl.store(out_ptr, found)


def ids_exist(ids: Tensor, size: int, spared: int | None) -> Tensor:
    """Return whether all ids exist, int8 up to 2^17 ids. See `megatron_ext.numerics.tensors.ids_exist`."""
    if ids.numel() > _MOST:
        return tensors.ids_exist(ids, size, spared)
    fine = torch.empty((), dtype=torch.int8, device=ids.device)
    launch(ids_exist_kernel, (1,), ids.contiguous(), fine, ids.numel(), size, spared, BLOCK=_IDS, num_warps=16)
    return fine


def columns_of(ids_T: Tensor, counts_T: Tensor | None, start: int, stop: int) -> Tensor:
    """Return each id's column in a shard. See `megatron_ext.head.row_passes.passes.columns_of`."""
    out_T, tokens = torch.empty_like(ids_T, memory_format=torch.contiguous_format), len(ids_T)
    given = ids_T.contiguous(), packed(counts_T), out_T
    launch(columns_kernel, (triton.cdiv(tokens, _COLUMNS),), *given, tokens, start, stop, BLOCK=_COLUMNS)
    return out_T


def labels_checksum(ids: Sequence[Tensor], places_T: Tensor | None = None) -> Tensor | int:
    """Return a checksum of ids. See `megatron_ext.head.call.statistics.labels_checksum`."""
    if not ids or places_T is not None or max(x.numel() for x in ids) > _MOST:
        return statistics.labels_checksum(ids, places_T)
    before, found = None, torch.empty(len(ids), dtype=torch.int64, device=ids[0].device)
    for x, out in zip(ids, found, strict=True):
        given = x.contiguous(), before, out, x.numel(), statistics.MULTIPLIER
        launch(ids_checksum_kernel, (1,), *given, LAST=x is ids[-1], BLOCK=_IDS // 4, num_warps=8)
        before = out
    return found[-1]

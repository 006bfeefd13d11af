"""Numbers of tokens and vocabulary columns that the head works on at a time, and of kept exponentials.

On the CPU sizes were found by measurement. On CUDA the sizes of the linear head follow from the device's figures and
the shape: of the chunks that memory allows, the smallest whose products take about the least time. The sizes of
read-outs that need chunks of logits follow from memory alone.
"""

import functools
import os
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call.gpu_properties import TILE_M, TILE_N, Device, device_of, product_seconds
from megatron_ext.head.call.matmul import Operand, SideBySide
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.numerics import fixed_order
from megatron_ext.numerics.tensors import has_values, logit_dtype, on_tensor_cores, widens

# Logits of one chunk: on CUDA, where a read-out has dozens of launches per chunk, so many that the host keeps up; on
# CPU fewer, but the product has 256 rows if it can. Chunks whose logits are all kept need no extra memory: larger ones.
_CHUNK, _CUDA_CHUNK = 1 << 24, 1 << 27
_CPU_CHUNK, _CPU_CHUNK_ROWS = 1 << 22, 256
_CPU_KEPT_CHUNK = 1 << 27
_CPU_BLOCK_BYTES, _CPU_BLOCK_SHARE = 4 << 20, 32

# On CUDA a block of the gradient matrix takes a 10th of the matrix's bytes, at least 64 MiB; its logits as much again.
_CUDA_BLOCK_BYTES, _CUDA_BLOCK_SHARE = 64 << 20, 10

# Chunks are compared by the estimated time of their products. _HIDDEN_TRAFFIC: the share of a product's memory traffic
# that its arithmetic does not hide. _AS_GOOD: a smaller chunk is taken if it is at most 1 % slower than the best, as it
# takes less memory. _BLOCK_SECONDS: the dozen small launches of a block of columns.
_HIDDEN_TRAFFIC, _AS_GOOD, _BLOCK_SECONDS = 0.1, 1.01, 24e-6

# The fewest tokens of a chunk that is added to dW.
_FEWEST_SUMMED = 256


def _seconds(device: Device, m: int, n: int, k: int, result_bytes: int) -> float:
    """Estimate a product's time as `product_seconds`, plus a share of its memory traffic, so that less traffic is
    better also where arithmetic bounds the time."""
    nbytes = 2 * (m + n) * k + result_bytes
    return product_seconds(device, m, n, k, result_bytes) + _HIDDEN_TRAFFIC * nbytes / device.bytes_per_s


def chunks(span: slice, chunk_tokens: int | None, columns: int, on_gpu: bool) -> list[slice]:
    """Cut `span` into pieces for passes over logits."""
    most = _CUDA_CHUNK if on_gpu else _CHUNK
    return _stepped(span, chunk_tokens or _rounded(most // max(columns, 1), 64))


def product_chunks(
    span: slice, chunk_tokens: int | None, columns: int, x_TD: Tensor, room: int, kept: bool = False
) -> list[slice]:
    """Cut `span` into pieces whose logits are made by a product with `x_TD`'s rows.

    On CUDA the logits of 16-bit operands take at most `room` bytes, or 64 MiB if that is more; within this bound pieces
    are large enough to read the weight seldom, in whole waves of tiles. `kept`: what is kept overwrites the logits.
    """
    tokens = span.stop - span.start
    if chunk_tokens or tokens <= 0 or columns == 0 or not x_TD.is_cuda or not on_tensor_cores(x_TD):
        if chunk_tokens or x_TD.is_cuda:
            return chunks(span, chunk_tokens, columns, on_gpu=False)
        most = max(columns, 1)
        if kept:
            rows = max(64, _CPU_KEPT_CHUNK // most // 64 * 64)
            return [span] if 0 < tokens <= rows else _stepped(span, rows)
        rows = max(64, _CPU_CHUNK // most, min(_CPU_CHUNK_ROWS, _CHUNK // most))
        return [span] if 0 < tokens <= rows // 64 * 64 else _stepped(span, rows // 64 * 64)
    most = max(TILE_M, max(room, _CUDA_BLOCK_BYTES) // (4 * columns))
    steps = _product_steps(device_of(x_TD), tokens, columns, x_TD.shape[1], most)
    stops = accumulate(steps, initial=span.start)
    return [slice(stop, stop + step) for stop, step in zip(stops, steps, strict=False)]


@functools.lru_cache(maxsize=1024)
def _product_steps(device: Device, tokens: int, columns: int, width: int, most: int) -> tuple[int, ...]:
    """Return the tokens of each chunk, at most `most`, or a tile's rows if these are more."""

    def split(step: int) -> tuple[int, ...]:
        whole, rest = divmod(tokens, step)
        if whole and 0 < 2 * rest < step:  # a small rest joins the last chunk
            return (*(step,) * (whole - 1), step + rest)
        return (*(step,) * whole, *((rest,) if rest else ()))

    def seconds(steps: tuple[int, ...]) -> float:
        each = {step: _seconds(device, step, columns, width, 4 * step * columns) for step in steps}
        return sum(each[step] for step in steps)

    tried = [split(step) for step in range(TILE_M, min(most, tokens + TILE_M) + 1, TILE_M)]
    found = [(seconds(steps), steps) for steps in tried if max(steps) <= most] or [(0.0, tried[0])]
    least = min(found)[0]
    return next(steps for time, steps in found if time <= least * _AS_GOOD)  # smaller ones come first


def column_blocks(
    tokens: int, columns: int, chunk_tokens: int | None, like: Tensor, width: int | None = None, alone: bool = False
) -> list[slice]:
    """Cut columns into blocks, for passes over all tokens at once; with `chunk_tokens` as many as chunks of tokens.

    `width`: the hidden size, if each block is in three matrix products. `alone`: no logits are made beside a block.
    """
    whole = slice(0, columns)
    if chunk_tokens:
        return _stepped(whole, -(-columns // max(1, -(-tokens // chunk_tokens))))
    row = max(tokens, 1) * like.element_size()
    if not like.is_cuda:
        return _stepped(whole, _rounded(max(_CPU_BLOCK_BYTES, row * columns // _CPU_BLOCK_SHARE) // row, 128))
    most = _rounded((2 + alone) * max(_CUDA_BLOCK_BYTES, row * columns // _CUDA_BLOCK_SHARE) // (2 * row), TILE_N)
    fewest = max(1, -(-columns // most))
    if width is None or not on_tensor_cores(like):
        return even_blocks(columns, fewest)
    return even_blocks(columns, _block_count(device_of(like), tokens, columns, width, fewest))


@functools.lru_cache(maxsize=1024)
def _block_count(device: Device, tokens: int, columns: int, width: int, fewest: int) -> int:
    def seconds(blocks: list[slice]) -> float:
        total = _BLOCK_SECONDS * len(blocks)
        for n in (block.stop - block.start for block in blocks):
            total += _seconds(device, tokens, n, width, 4 * tokens * n)
            total += _seconds(device, tokens, width, n, 8 * tokens * width)
            total += _seconds(device, n, width, tokens, 2 * n * width)
        return total

    tried = [seconds(even_blocks(columns, n)) for n in range(fewest, 2 * fewest + 1)]
    return fewest + tried.index(min(tried))


def even_blocks(columns: int, number: int) -> list[slice]:
    """Cut columns into about `number` blocks of a multiple of a tile's columns; the last may be narrower."""
    tiles = -(-columns // TILE_N)
    step = -(-tiles // number) * TILE_N
    return _stepped(slice(0, columns), step)


def block_room(tokens: int, columns: int, like: Tensor) -> int:
    """Return the bytes that a block's logits may take while the block is recomputed."""
    return max(_CUDA_BLOCK_BYTES, tokens * columns * like.element_size() // _CUDA_BLOCK_SHARE)


def blocks(z_TV: Tensor, more: float = 1) -> list[slice]:
    """Return blocks of rows whose fp32 temporaries are small; `more` times as many rows as by default."""
    tokens, columns = z_TV.shape
    step = max(1, int(more * (1 << (24 if z_TV.is_cuda else 16))) // max(columns, 1))
    if 0 < tokens <= step:
        return [slice(0, tokens)]
    return [slice(at, min(at + step, tokens)) for at in range(0, tokens, step)]


def summed_tokens(w_VD: Operand) -> int:
    """Return the tokens of a chunk on CUDA if dW is summed chunk by chunk: so many that their fp32 logits take half of
    a 16-bit weight's memory, or 64 MiB. The sums take twice the weight's memory; each chunk reads and writes them."""
    columns, width = w_VD.shape
    return _rounded(max(width // 4, _CUDA_BLOCK_BYTES // (4 * max(columns, 1))), TILE_M)


def summed_chunks(tokens: int, chunk_tokens: int | None, like: Tensor, as_logits: bool) -> list[slice]:
    """Cut tokens into chunks of about equal size, each of which is added to dW; `like`: the hidden states.

    A chunk has at most as many tokens as the hidden size (at least 256): in 16 bits their exponentials take half of an
    fp32 dW's memory, which each chunk reads and writes; half as many if fp32 logits are in memory beside them
    (`as_logits`). The size does not depend on the number of columns, in which ranks may differ.
    """
    if chunk_tokens:
        return _stepped(slice(0, tokens), chunk_tokens)
    most = max(like.shape[1] // (1 + as_logits), _FEWEST_SUMMED)
    return _stepped(slice(0, tokens), -(-tokens // -(-tokens // most) // TILE_M) * TILE_M)


def tiles(
    like: Tensor,
    tokens: int,
    columns: int,
    cached: int,
    as_kept: bool,
    all_at_once: bool,
    head: ResolvedHead,
    multiple: int,
) -> list[tuple[slice, list[slice]]]:
    """Return the parts of a leaf's gradient matrix that backward makes one by one: tokens, and blocks of columns.

    No block crosses `cached`, the number of kept columns; with `as_kept` the gradient matrix itself is kept, as one
    block. With `all_at_once` a part is all tokens, and blocks begin at a `multiple`: each row of dW is written once,
    without an accumulator, and dx is summed in fp32. Else parts are chunks of tokens, for dx. `like`: hidden states.
    """
    whole = slice(0, tokens)
    if not columns or (as_kept and cached == columns):
        return [(whole, [slice(0, columns)])]
    parts = [part for part in (slice(0, cached), slice(cached, columns)) if part.stop > part.start]
    if not all_at_once and tokens:
        room = block_room(tokens, columns, like)
        return [(rows, parts) for rows in product_chunks(whole, head.chunk_tokens, columns, like, room)]
    found = []
    for part in parts:
        if as_kept and part.stop <= cached:
            found.append(part)
            continue
        blocks = column_blocks(
            tokens, part.stop - part.start, head.chunk_tokens, like, like.shape[1], head.fused_epilogue
        )
        if multiple > 1 and len(blocks) > 1:
            blocks = _stepped(slice(0, part.stop - part.start), -(-blocks[0].stop // multiple) * multiple)
        found += [slice(part.start + block.start, part.start + block.stop) for block in blocks]
    return [(whole, found)]


def cached_columns(call: ResolvedHead, tokens: int, columns: int, like: Tensor, later: int = 0) -> int:
    """Count the first columns whose exponentials are kept for backward, of hidden states `[T, D]` like `like`.

    "bounded" keeps as many eighths of the columns as take no more memory than the weight and its fp32 gradient. Their
    number follows from the shapes alone, so it is the same in every call and on every rank, and so are the bits. "auto"
    looks at the memory that is free at the first call of a shape, leaves half of it free, or the `later` bytes that
    backward will need if these are more, and keeps to that number; on fake tensors and while compiling it keeps all.
    """
    cache = call.cache
    if cache == "bounded":
        return columns * _bounded_eighths(tokens, like) // 8
    column = max(tokens * like.element_size(), 1)
    if cache == "auto":
        return _columns_that_fit(like.device, like.is_cuda, column, columns, later) if has_values(like) else columns
    return int(cache * columns) if cache <= 1 else min(columns, int(cache) // column)


def kept_columns(call: ResolvedHead, tokens: int, weight_VD: Operand, hidden_TD: Tensor, keep: bool) -> tuple[int, int]:
    """Return the bytes that backward will need for dx and dW, which forward may use for logits (without a backward
    those of the weight, which each chunk reads); and the number of columns whose exponentials are kept."""
    parts = weight_VD.parts if isinstance(weight_VD, SideBySide) else [weight_VD]
    if not keep:
        return sum(part.nbytes for part in parts), 0
    later = (4 + 2 * parts[0].element_size()) * tokens * weight_VD.shape[1]
    for part in parts:
        if part.requires_grad and not (call.fuse_main_grad and part is parts[0]):
            later += part.nbytes
    return later, cached_columns(call, tokens, weight_VD.shape[0], hidden_TD, later)


def keeps_logits(call: ResolvedHead, x_TD: Tensor) -> bool:
    """Return whether forward keeps the logits instead of their exponentials.

    Backward needs the softcap's slope, `1 - tanh^2`, and where that is small it cannot be computed from rounded
    exponentials. The exception is a softcap of 16 or more with 16-bit operands on CUDA: there fp32 logits would be
    rounded to 16 bits, which costs such large logits more of the probabilities than the slope gains. With fixed bits
    logits are kept, unrounded, for an entropy too: exponentials would not give the bits of logits that are made again.
    """
    if call.bits != "fast":
        return call.softcap is not None or call.expected
    return call.softcap is not None and (not widens(x_TD, call.rounds) or call.softcap < 16)


def kept_of_leaf(share: float, columns: int, call: ResolvedHead, x_TD: Tensor) -> int:
    """Return the number of a leaf's columns that are kept; `share`: the fraction whose exponentials memory is for."""
    if keeps_logits(call, x_TD):
        share *= x_TD.element_size() / logit_dtype(x_TD, call.rounds).itemsize
    multiple = fixed_order.multiple(x_TD)
    return columns if share >= 1 else int(columns * share) // multiple * multiple


def kept_tokens(call: ResolvedHead, tokens: int, columns: int, like: Tensor) -> int:
    """Count the first tokens whose logits' gradient is kept, if forward can make this gradient.

    "bounded" keeps two chunks of `_CHUNK` elements on CPU, and nothing on CUDA or with the caller's `chunk_tokens`;
    other values of `cache` are as for `cached_columns`.
    """
    if call.cache == "bounded":
        room = 0 if like.is_cuda or call.chunk_tokens else 2 * _CHUNK
        return min(tokens, room // max(columns, 1))
    return tokens * cached_columns(call, tokens, columns, like) // max(columns, 1)


def keeps_all(call: ResolvedHead, tokens: int, like: Tensor) -> bool:
    """Return whether every rank keeps all of its columns for certain, so that all ranks return the same."""
    return call.cache == 1 or (call.cache == "bounded" and _bounded_eighths(tokens, like) == 8)


def _bounded_eighths(tokens: int, like: Tensor) -> int:
    """Return the most eighths with which `eighths / 8 * T * V` elements take at most `(element + 4) * V * D` bytes."""
    kept, allowed = tokens * like.element_size(), 8 * like.shape[1] * (like.element_size() + 4)
    return min(8, allowed // kept) if kept else 8


@functools.cache
def _columns_that_fit(device: torch.device, on_gpu: bool, column: int, columns: int, later: int) -> int:
    """Return the number of columns, of `column` bytes each, that fit; cached, since recomputation must keep as many."""
    free = _free_bytes(device, on_gpu)
    return max(0, min(columns, min(free // 2, free - later) // column))


def _free_bytes(device: torch.device, on_gpu: bool) -> int:
    """Return the bytes that a new tensor may take."""
    if not on_gpu:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free, _ = torch.cuda.mem_get_info(device)
    # `torch.cuda.memory_stats` would make a flat table of all these numbers. The free rest of blocks that are partly in
    # use does not serve a large tensor, and is not counted.
    stats: dict[str, Any] = torch.cuda.memory_stats_as_nested_dict(device)

    def now(name: str) -> int:
        return stats[name]["all"]["current"] if name in stats else 0

    return free + max(0, now("reserved_bytes") - now("active_bytes") - now("inactive_split_bytes"))


def _stepped(span: slice, step: int) -> list[slice]:
    if 0 < span.stop - span.start <= step:
        return [span]
    return [slice(at, min(at + step, span.stop)) for at in range(span.start, span.stop, max(step, 1))]


def _rounded(n: int, multiple: int) -> int:
    return max(multiple, n // multiple * multiple)

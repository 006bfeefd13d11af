"""`product_statistics` in Triton: statistics and exponentials of rows of logits that are never written.

For each of its rows a tile of logits writes a few numbers, relative to the row's maximum in the tile; a second launch
combines the numbers of all tiles of a row. The numbers take 12 bytes for 256 logits, and 4 more each for entropy, hits.

Exponentials are written before a row's maximum is known: relative to a sample, the maximum of its first 256 columns,
which in a language model's vocabulary are the common tokens. A last launch makes the exponentials of those rows again
whose maximum differs from the sample by more than `_REACH`; mostly there is none. bf16 has fp32's exponents, so
exponentials up to e^40 are as precise as those below 1, and so are factors scaled down by e^-40.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels.epilogues import tiles
from megatron_ext.head.kernels.epilogues.gradient import product_gradient_kernel
from megatron_ext.head.kernels.logits import FAR, exp, writable
from megatron_ext.numerics.fixed_order_kernels import place
from megatron_ext.numerics.launches import launch

_TOKENS, _PARTS = 32, 32  # that a program of `joined_parts_kernel` takes at a time
_NONE = tl.constexpr(1 << 30)  # a number past every column
_REACH = tl.constexpr(40.0)


@triton.jit
def product_statistics_kernel(
    x,
    w,
    kept,
    target_ptr,
    sample_ptr,
    parts_ptr,
    bias_ptr,
    tokens,
    columns,
    width,
    counted,
    factor,
    together,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    with_entropy: tl.constexpr = False,
    with_hits: tl.constexpr = False,
):
    """Write each tile's statistics to `parts`, rows as in `row_statistics`, but the label's logit only in the tile that
    has the label's column; and `exp(z - sample)`, 0 at the label, to the columns that `kept` has.

    Args:
        x: `[T, D]`, w: `[V, D]`, kept: `[T, columns]`, written: descriptors of tiles that TMA moves; T is `tokens`, V
            `columns`, of which `counted` count, D `width`.
        target_ptr: `[T]`, int64, the label's column. sample_ptr: `[T]`, a reference of each row. bias_ptr: `[V]`.
        parts_ptr: `[V / N, rows, T]`, written.
        factor: 1 over the temperature. together: number of tiles of the same columns that follow each other.
        M, N, K: the size of a tile, and what a step sums; with_entropy, with_hits: whether their rows are wanted.
    """
    ROWS: tl.constexpr = 3 + with_entropy + with_hits
    down, across = tl.cdiv(tokens, M), tl.cdiv(columns, N)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0)):
        m, n = place(tile, down, across, together)
        z = tiles.product(x, w, m * M, n * N, width, M, N, K)
        at, column = m * M + tl.arange(0, M), n * N + tl.arange(0, N)
        z = tiles.bent(z, bias_ptr, column, counted, factor)
        inside = at < tokens
        target = tl.load(target_ptr + at, mask=inside, other=-1).to(tl.int32)
        out_ptr = parts_ptr + n.to(tl.int64) * ROWS * tokens + at
        peak = tl.max(z, 1)
        tl.store(out_ptr, peak, mask=inside)
        mine = target // N == n
        labelled = tl.max(mine.to(tl.int32), 0) > 0
        if labelled:
            label = tl.max(tl.where(column[None, :] == target[:, None], z, float("-inf")), 1)
            tl.store(out_ptr + 2 * tokens, label, mask=inside & mine)
        if with_hits:
            first = tl.min(tl.where(z == peak[:, None], column[None, :], _NONE), 1)
            tl.store(out_ptr + (ROWS - 1) * tokens, (first == target).to(tl.float32), mask=inside)
        reference = tl.where(peak > float("-inf"), peak, 0.0)
        e = tiles.exp(z, reference)
        tl.store(out_ptr + tokens, tl.sum(e, 1), mask=inside)
        if with_entropy:
            inner = tl.sum(e * tl.maximum(z - reference[:, None], FAR), 1)
            tl.store(out_ptr + 3 * tokens, inner, mask=inside)
        if kept is not None:  # noqa: SIM102, None has no shape
            if n * N < kept.shape[1]:
                sample = tl.load(sample_ptr + at, mask=inside, other=0.0)
                sample = tl.where(sample > float("-inf"), sample, 0.0)
                e *= exp(reference - sample)[:, None]
                if labelled:
                    e = tl.where(column[None, :] == target[:, None], 0.0, e)
                kept.store([m * M, n * N], e.to(kept.dtype))


@triton.jit
def joined_parts_kernel(
    parts_ptr,
    target_ptr,
    sample_ptr,
    stats_ptr,
    shift_ptr,
    tokens,
    count,
    stats_stride,
    N: tl.constexpr,
    PARTS: tl.constexpr,
    TOKENS: tl.constexpr,
    with_entropy: tl.constexpr = False,
    with_hits: tl.constexpr = False,
):
    """Combine the statistics of a row's `count` parts into the statistics of the row, for some of `tokens`.

    Args:
        parts_ptr: `[count, rows, T]`, as `product_statistics_kernel` writes them. target_ptr: `[T]`, int64.
        sample_ptr: `[T]`, the reference of exponentials; -inf is overwritten by 0. stats_ptr: `[K, T]`, written.
        shift_ptr: `[T]`, written: the sample, or the row's maximum if the sample is too far from the maximum.
        with_entropy, with_hits: whether `parts` has their rows.
    """
    ROWS: tl.constexpr = 3 + with_entropy + with_hits
    at = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    inside = at < tokens
    largest = tl.full([TOKENS], float("-inf"), tl.float32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        there = (part < count)[:, None] & inside[None, :]
        part_ptr = parts_ptr + part.to(tl.int64)[:, None] * ROWS * tokens + at[None, :]
        largest = tl.maximum(largest, tl.max(tl.load(part_ptr, mask=there, other=float("-inf")), 0))
    reference = tl.where(largest > float("-inf"), largest, 0.0)
    total = tl.zeros([TOKENS], tl.float32)
    expected = total
    first = tl.full([TOKENS], _NONE, tl.int32)
    for start in range(0, count, PARTS):
        part = start + tl.arange(0, PARTS)
        there = (part < count)[:, None] & inside[None, :]
        part_ptr = parts_ptr + part.to(tl.int64)[:, None] * ROWS * tokens + at[None, :]
        peak = tl.load(part_ptr, mask=there, other=float("-inf"))
        more = tl.load(part_ptr + tokens, mask=there, other=0.0)
        if with_hits:
            first = tl.minimum(first, tl.min(tl.where(peak == largest[None, :], part[:, None], _NONE), 0))
        below = tl.where(peak > float("-inf"), peak - reference[None, :], 0.0)  # a part without a finite logit adds 0
        weight = tl.exp(below)
        total += tl.sum(more * weight, 0)
        if with_entropy:
            expected += tl.sum(weight * (tl.load(part_ptr + 3 * tokens, mask=there, other=0.0) + more * below), 0)
    target = tl.load(target_ptr + at, mask=inside, other=-1).to(tl.int32)
    owned = inside & (target >= 0)
    label_ptr = parts_ptr + (target // N).to(tl.int64) * ROWS * tokens + at
    stats_ptr += at
    tl.store(stats_ptr, largest, mask=inside)
    tl.store(stats_ptr + stats_stride, total, mask=inside)
    label = tl.load(label_ptr + 2 * tokens, mask=owned, other=float("-inf"))
    tl.store(stats_ptr + 2 * stats_stride, label, mask=inside)
    if sample_ptr is not None:
        sample = tl.load(sample_ptr + at, mask=inside, other=0.0)
        sample = tl.where(sample > float("-inf"), sample, 0.0)
        tl.store(sample_ptr + at, sample, mask=inside)
        reference = tl.where(tl.abs(reference - sample) <= _REACH, sample, reference)
    tl.store(shift_ptr + at, reference, mask=inside)
    stats_ptr += 3 * stats_stride
    if with_entropy:
        tl.store(stats_ptr, expected, mask=inside)
        stats_ptr += stats_stride
    if with_hits:
        hit = tl.load(label_ptr + (ROWS - 1) * tokens, mask=owned, other=0.0)
        tl.store(stats_ptr, tl.where(first == target // N, hit, 0.0), mask=inside)


def product_statistics(
    x_TD: Tensor,
    w_VD: Tensor,
    target_T: Tensor,
    stats_KT: Tensor,
    shift_T: Tensor,
    exp_TV: Tensor | None = None,
    bias_V: Tensor | None = None,
    *,
    counted: int,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_hits: bool = False,
    sm_margin: int = 0,
) -> None:
    """Write each row's statistics in two launches, with exponentials in four. See `row_passes/passes.py`."""
    tokens, columns, target_T = x_TD.shape[0], w_VD.shape[0], target_T.contiguous()
    if tokens == 0:
        return
    sums = {"with_entropy": with_entropy, "with_hits": with_hits}

    def run(kernel: Any, columns: int, **given: Any) -> None:
        bends: dict[str, Any] = {"bias_V": None if bias_V is None else bias_V[:columns], "temperature": temperature}
        given |= {"target_ptr": target_T, "counted": min(counted, columns), "sm_margin": sm_margin}
        tiles.launch(kernel, x_TD, w_VD[:columns], **bends, **given)

    def scan(columns: int, sample_T: Tensor | None, **sums: bool) -> Tensor:
        parts = stats_KT.new_empty(triton.cdiv(columns, tiles.TILE_N), 3 + sum(sums.values()), tokens)
        given = {"kept": None if sample_T is None else written, "sample_ptr": sample_T, "parts_ptr": parts, **sums}
        run(product_statistics_kernel, columns, by_rows=False, **given)
        return parts

    sample_T = kept_TV = written = None
    if exp_TV is not None:
        kept_TV = tiles.room(writable(exp_TV))
        written = tiles.descriptor(kept_TV, tiles.TILE_M, tiles.TILE_N)
        sample_T = scan(min(columns, tiles.TILE_N), None)[0, 0]
    parts = scan(columns, sample_T, **sums)
    launch(
        joined_parts_kernel,
        (triton.cdiv(tokens, _TOKENS),),
        parts,
        target_T,
        sample_T,
        stats_KT,
        shift_T,
        tokens,
        parts.shape[0],
        stats_KT.stride(0),
        N=tiles.TILE_N,
        PARTS=_PARTS,
        TOKENS=_TOKENS,
        num_warps=4,
        **sums,
    )
    if exp_TV is not None and kept_TV is not None:
        given = {"out": written, "shift_ptr": shift_T, "sample_ptr": sample_T}
        run(product_gradient_kernel, exp_TV.shape[1], by_rows=True, **given)
        if kept_TV is not exp_TV:
            exp_TV.copy_(kept_TV)

"""Matrix products whose rows have the same bits whatever other rows are multiplied with them.

On CUDA they are Triton kernels, with tiles of one size and serial sums (`fixed_order_kernels.py`), and logits are
fp32. The rest of this text is about CPUs, where logits have the operands' dtype.

A library picks its order of additions by the shape of a product: in fp32 a row multiplied alone often differs in its
last bits from the same row among 64 others, and where K or N fills no vector register, a row from an equal one beside
it. So rows are multiplied in tiles of 64, the last one padded with zeros, by matrices padded with zeros to multiples of
16. Columns come in blocks that follow from their number alone, and so do the blocks over which a product is summed.
No library promises that a row then has the same bits at any place, and in taller tiles: `heights` tries a few shapes
once, and if it sees other bits such products are refused. The bits are those of one machine, one build of torch and one
number of threads.

Legend: M rows, K the length that a product sums over, N columns; T tokens, V vocabulary columns, D hidden size.
"""

import functools
import importlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.numerics import cpu_products, tensors
from megatron_ext.numerics.tensors import accumulation_dtype, has_values

TILE = 64  # rows
_TALLER = (512, 128)
_MULTIPLE = 16  # of K and N
# Products that `heights` tries: [K, N], and by how many rows a tile's are moved.
_SHAPES, _SHIFTS = ((16, 16), (48, 208), (528, 80), (304, 528)), (0, 1, 6, 27, 32)

# Vocabulary columns that one product takes or sums over: a rounded 16-bit product errs less the fewer terms it has.
COLUMNS = 512
CPU_ROWS = COLUMNS  # of dW at a time
# Columns that a launch sums at a time on CUDA: a sum that ends at a multiple of it goes on in the next launch.
CUDA_STEP = 64

TOKENS = 256  # tokens over which one product of dW sums
_SUMMED = 32 * TOKENS  # tokens that are multiplied by factors at a time on CUDA


def aligned(x_MK: Tensor) -> Tensor:
    """Return `x` without gaps and from a cache line on, copied if it is not so: its place in memory may change bits."""
    x_MK = x_MK.contiguous()
    return x_MK if not has_values(x_MK) or x_MK.data_ptr() % tensors.LINE_BYTES == 0 else x_MK.clone()


def logits(x_TD: Tensor, w_VD: Tensor, out_TV: Tensor | None = None, rounds: bool = False) -> Tensor:
    """Compute `x @ W.T`: fp32 on CUDA for 16-bit operands unless it `rounds`, else in their dtype, in `out` if any."""
    x_TD = aligned(x_TD)
    if out_TV is None or tensors.widens(x_TD, rounds):
        out_TV = tensors.new_matrix(x_TD, x_TD.shape[0], w_VD.shape[0], tensors.logit_dtype(x_TD, rounds))
    if x_TD.is_cuda:
        _kernels().product(x_TD, w_VD.t(), out_TV)
        return out_TV
    for block in column_blocks(w_VD.shape[0]):
        _rows_times(x_TD, w_VD[block].t(), out_TV[:, block])
    return out_TV


def add_product(total_TD: Tensor | None, g_TV: Tensor, w_VD: Tensor) -> Tensor:
    """Compute `total + G @ W` in fp32 (fp64 for fp64), in place, over blocks of columns, one after the other.

    `total`: the sum over earlier columns, whose number is a multiple of `COLUMNS` (on CUDA of `CUDA_STEP`); None: these
    columns are the first.
    """
    goes_on = total_TD is not None
    if total_TD is None:
        total_TD = g_TV.new_empty(g_TV.shape[0], w_VD.shape[1], dtype=accumulation_dtype(g_TV.dtype))
    if g_TV.is_cuda:
        _kernels().product(g_TV, w_VD, total_TD, goes_on=goes_on)
        return total_TD
    if not (goes_on or g_TV.shape[1]):
        return total_TD.zero_()
    part_TD = g_TV.new_empty(total_TD.shape)
    for block in column_blocks(w_VD.shape[0]):
        _rows_times(g_TV[:, block], w_VD[block], part_TD)
        total_TD = total_TD.add_(part_TD) if goes_on or block.start else total_TD.copy_(part_TD)
    return total_TD


def add_transposed(total_VD: Tensor, g_TV: Tensor, x_TD: Tensor) -> None:
    """Add `G.T @ x` to `total`, token after token. On CUDA `total` has the dtype of sums, and all calls but the last
    take a multiple of `CUDA_STEP` tokens; on a CPU tokens come in blocks, the last one padded with zeros."""
    if g_TV.is_cuda:
        _kernels().product(g_TV.t(), x_TD, total_VD, goes_on=True)
        return
    for g_tV, x_tD in zip(g_TV.split(TOKENS), x_TD.split(TOKENS), strict=True):
        g_tV, x_tD = _padded(g_tV, TOKENS), _padded(x_tD, TOKENS)
        for block in column_blocks(g_TV.shape[1]):
            # Not into the total itself: the address of a leaf's rows depends on the ranks, and changes bits.
            total_VD[block] += _mm(g_tV[:, block].t(), x_tD)


def add_column_sums(total_V: Tensor, g_TV: Tensor, factor_T: Tensor | None = None) -> None:
    """Add `(factor * G).sum(0)` to `total`, token after token as in `add_transposed`; products have the total's dtype.

    On a CPU the order in which torch adds a column depends on the number of columns, so `COLUMNS` are always added at a
    time.
    """
    step = _SUMMED if g_TV.is_cuda else TOKENS
    for at in range(0, g_TV.shape[0], step):
        g_tV = g_TV[at : at + step]
        if factor_T is not None:
            g_tV = g_tV.to(total_V.dtype) * factor_T[at : at + step].unsqueeze(1)
        if g_TV.is_cuda:
            _kernels().product(g_tV.t(), g_tV.new_ones(g_tV.shape[0], 1), total_V.unsqueeze(1), goes_on=True)
            continue
        for block in column_blocks(g_tV.shape[1]):
            whole_tV = g_tV.new_zeros(TOKENS, COLUMNS, dtype=total_V.dtype)
            whole_tV[: g_tV.shape[0], : block.stop - block.start] = g_tV[:, block]
            total_V[block] += whole_tV.sum(0)[: block.stop - block.start]


def transposed(g_TV: Tensor, x_TD: Tensor) -> Tensor:
    """Compute `G.T @ x` on a CPU, in fp32 (fp64 for fp64)."""
    total_VD = g_TV.new_zeros(g_TV.shape[1], x_TD.shape[1], dtype=accumulation_dtype(g_TV.dtype))
    add_transposed(total_VD, g_TV, x_TD)
    return total_VD


def write_transposed(out_VD: Tensor, g_TV: Tensor, x_TD: Tensor, accumulate: bool = False) -> None:
    """Compute `G.T @ x` on CUDA, rounded once to the dtype of `out`; `accumulate`: add it to `out`."""
    _kernels().product(g_TV.t(), x_TD, out_VD, adds=accumulate)


def column_sums(g_TV: Tensor, factor_T: Tensor) -> Tensor:
    """Compute `(factor * G).sum(0)` in the factor's dtype; on CUDA the factor is first rounded to the dtype of G."""
    if not g_TV.is_cuda:
        return weighed_sum(g_TV, factor_T)
    total_V = factor_T.new_zeros(g_TV.shape[1])
    write_transposed(total_V.unsqueeze(1), g_TV, factor_T.to(g_TV.dtype).unsqueeze(1))
    return total_V


def weighed_sum(x_TD: Tensor, factor_T: Tensor) -> Tensor:
    """Compute `(factor * x).sum(0)` in the factor's dtype."""
    total_D = factor_T.new_zeros(x_TD.shape[1])
    add_column_sums(total_D, x_TD, factor_T)
    return total_D


def _kernels() -> Any:
    return importlib.import_module("megatron_ext.numerics.fixed_order_kernels")


def multiple(x_TD: Tensor) -> int:
    """Return the number of columns at whose multiples parts of a leaf begin that are computed one after the other."""
    return CUDA_STEP if x_TD.is_cuda else COLUMNS


def column_blocks(columns: int) -> list[slice]:
    """Cut vocabulary columns into blocks; the first one is a leaf's first, or a multiple of `COLUMNS` behind that."""
    return [slice(at, min(at + COLUMNS, columns)) for at in range(0, columns, COLUMNS)]


def whole_blocks(chunk: slice) -> int:
    """Round the size of a chunk down to a multiple of `TOKENS`, and up to `TOKENS` if it is less."""
    return max(TOKENS, (chunk.stop - chunk.start) // TOKENS * TOKENS)


def mm(a_MK: Tensor, b_KN: Tensor, added_N: Tensor | None = None) -> Tensor:
    """Compute `a @ b + added`, rounded once to the operands' dtype: a row's bits depend on no other row of `a`."""
    a_MK = aligned(a_MK)
    b_KN = aligned(b_KN.t()).t() if b_KN.stride(0) == 1 else aligned(b_KN)
    out_MN = a_MK.new_empty(a_MK.shape[0], b_KN.shape[1])
    if a_MK.is_cuda and added_N is not None:
        wide_MN = out_MN.to(accumulation_dtype(out_MN.dtype))
        _kernels().product(a_MK, b_KN, wide_MN)
        return out_MN.copy_(wide_MN.add_(added_N))
    if a_MK.is_cuda:
        _kernels().product(a_MK, b_KN, out_MN)
    elif a_MK.shape[1]:
        _rows_times(a_MK, b_KN, out_MN, added_N)
    else:
        out_MN.copy_(added_N) if added_N is not None else out_MN.zero_()
    return out_MN


def _rows_times(a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, added_N: Tensor | None = None) -> None:
    (rows, inner), columns = a_MK.shape, b_KN.shape[1]
    allowed = _heights_of(a_MK)
    fault = products_fault(a_MK)
    if fault is not None:
        raise fault
    more_k, more_n = -inner % _MULTIPLE, -columns % _MULTIPLE
    if more_k or more_n:
        transposed = b_KN.stride(0) == 1 and columns != 1
        b_KN = F.pad(b_KN.t(), (0, more_k, 0, more_n)).t() if transposed else F.pad(b_KN, (0, more_n, 0, more_k))
        a_MK = F.pad(a_MK, (0, more_k)) if more_k else a_MK
        added_N = F.pad(added_N, (0, more_n)) if added_N is not None else None
    for tile in _tiles(rows, allowed):
        if tile.stop <= rows and not more_n:
            cpu_products.mm(a_MK[tile], b_KN, out_MN[tile], added_N)
        else:
            whole = aligned(_padded(a_MK[tile], tile.stop - tile.start))
            out_MN[tile] = _mm(whole, b_KN, added_N)[: rows - tile.start, :columns]


def _mm(left_MK: Tensor, right_KN: Tensor, added_N: Tensor | None = None) -> Tensor:
    """Multiply into given memory, by `aten::mm.out`: `aten::mm` may be replaced by the products of this module."""
    return cpu_products.mm(left_MK, right_KN, left_MK.new_empty(left_MK.shape[0], right_KN.shape[1]), added_N)


def _padded(x_MK: Tensor, rows: int) -> Tensor:
    """Append rows of zeros to `x`, as far apart in memory as its own."""
    if x_MK.shape[0] == rows:
        return x_MK
    whole = (
        x_MK.new_empty(rows, x_MK.shape[1]) if x_MK.is_contiguous() else tensors.new_matrix(x_MK, rows, x_MK.shape[1])
    ).zero_()
    whole[: x_MK.shape[0]] = x_MK
    return whole


def _tiles(rows: int, heights: tuple[int, ...]) -> Iterator[slice]:
    at = 0
    while at < rows:
        height = next(height for height in heights if height <= max(rows - at, heights[-1]))
        yield slice(at, at + height)
        at += height


def products_fault(like: Tensor) -> ValueError | None:
    """Return the fault if, on a CPU, a row of a product of such matrices depends on its place."""
    if _heights_of(like):
        return None
    return _not_here(f"a row of a {like.dtype} product with {torch.get_num_threads()} threads depends on its place")


def _heights_of(like: Tensor) -> tuple[int, ...]:
    if like.is_cuda or not has_values(like):
        return (*_TALLER, TILE)
    by_torch = like.dtype not in cpu_products.QUESTIONS or cpu_products.has_sixteen_bit_products(like.dtype)
    return heights(like.dtype, torch.get_num_threads(), by_torch)


@functools.cache
def heights(dtype: torch.dtype, threads: int, by_torch: bool) -> tuple[int, ...]:
    """Return the numbers of rows, descending, that products may have: a row has the same bits in all, at any place.
    Empty: there are none here. 16-bit products of widened operands are tried before they are rounded."""
    own = torch.Generator().manual_seed(0)  # the caller's random numbers stay as they are
    sums = dtype if by_torch else torch.float32

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=own, dtype=torch.float64).to(dtype)

    def product(left_MK: Tensor, right_KN: Tensor, gaps: bool = False) -> Tensor:
        shape = left_MK.shape[0], right_KN.shape[1]
        if not gaps:
            return cpu_products.mm(left_MK, right_KN, left_MK.new_empty(shape, dtype=sums))
        apart_MK = tensors.new_matrix(left_MK, left_MK.shape[0], left_MK.shape[1]).copy_(left_MK)
        return cpu_products.mm(apart_MK, right_KN, tensors.new_matrix(left_MK, shape[0], shape[1], sums))

    def keeps(height: int, tile_MK: Tensor, right_KN: Tensor, wanted_MN: Tensor) -> bool:
        def moved(x: Tensor, shift: int) -> Tensor:
            return x.roll(shift, 0).repeat(height // TILE, 1)

        return all(
            product(moved(tile_MK, shift), right_KN, gaps).equal(moved(wanted_MN, shift))
            for shift in (_SHIFTS if height == TILE else (0,))
            for gaps in (False, True)
        )

    found = [*_TALLER, TILE]
    with torch.no_grad():
        for k, n in _SHAPES:
            for right_KN in (drawn(k, n), drawn(n, k).t()):
                tile_MK = drawn(TILE, k)
                wanted_MN = product(tile_MK, right_KN)
                found = [height for height in found if keeps(height, tile_MK, right_KN, wanted_MN)]
    return tuple(found) if TILE in found else ()


@functools.cache
def functions_fault(threads: int) -> ValueError | None:
    """Return the fault if exponentials and their kin, or sums of rows, depend on where an element is in memory."""
    with torch.no_grad():
        number = torch.tensor(-0.731)
        places = number.expand(1 << 16).contiguous()
        row_V = torch.linspace(-3.0, 0.0, 1001)
        for name in ("exp", "expm1", "log1p", "tanh"):
            function = getattr(torch, name)
            if any((function(places[at:end]) != function(number)).any() for at in (0, 1, 5) for end in (9, 77, None)):
                return _not_here(f"{name} depends on an element's place")
        sums_T = row_V.repeat(77, 1).sum(1)
        if (sums_T != row_V.unsqueeze(0).sum(1)).any():
            return _not_here("the sum of a row depends on its place")
    return None


def _not_here(what: str) -> ValueError:
    return ValueError(
        f'bits: {what}, on this processor with torch {torch.__version__}: only bits="fast" can be had here, and no '
        f"batch_invariant_mode"
    )

"""`nucleus` in Triton, with the arguments and results of `megatron_ext.head.row_passes.nucleus`.

Nothing is sorted. The bits of floats order as integers (keys), so the cut, the smallest logit that is kept, is searched
in an interval of keys: a pass over a row sums the exponentials above each of eight places in the interval, and keeps
the ninth part that has the cut. The first interval holds all logits whose exponential is not 0 relative to the largest,
with places dense near the largest; later places lie around the cut that the sums suggest. As soon as certainly few
logits are in the interval, one pass copies them to a list, and later passes read the list: of a row of 128256 normally
distributed logits, four passes read the row, and half a dozen a list of 2000 to 8000.

A program takes one row; its sums depend on nothing else. A lane adds eight numbers in fp32 and the rest in fp64: a
`top_p` nearer to 1 than that rounding, 1e-7, keeps all.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.call import chunk_sizes
from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import exp, lowest, over, rowwise
from megatron_ext.head.row_passes import nucleus as plain
from megatron_ext.numerics.launches import launch

_PLACES, _STEPS = tl.constexpr(8), tl.constexpr(8)
_NOT_THE_SIGN = tl.constexpr(0x7FFFFFFF)
_NOTHING = tl.constexpr(100.0)  # further below the largest logit an exponential is 0, or too small to change any sum


@triton.jit
def _in_order(bits):
    """Map the bits of fp32 numbers to integers that compare as the numbers do, or such integers back to bits."""
    return bits ^ ((bits >> 31) & _NOT_THE_SIGN)


@triton.jit
def key(z):
    return _in_order((z + 0.0).to(tl.int32, bitcast=True))  # -0.0 + 0.0 is 0.0


@triton.jit
def _number(key):
    return _in_order(key).to(tl.float32, bitcast=True)


@triton.jit
def _apart(low, high):
    """Return the difference of two keys, unsigned: from -inf to inf it is more than a signed integer holds."""
    return (high - low).to(tl.uint32, bitcast=True)


@triton.jit
def _over(z, temperature, inverse, HAS_TEMPERATURE: tl.constexpr):
    """Return `z / temperature`, rounded as IEEE has it if finite: the product with `inverse`, corrected once."""
    if HAS_TEMPERATURE:
        quotient = z * inverse
        return tl.fma(tl.fma(-quotient, temperature, z), inverse, quotient)
    return z


@triton.jit
def _largest(z_ptr, columns, LANES: tl.constexpr):
    """Return the largest of a row's numbers, and whether any number is NaN."""
    lane = tl.arange(0, LANES)
    largest, not_numbers = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.int32)
    for start in range(0, columns, LANES * _STEPS):
        for ahead in tl.static_range(_STEPS):
            here = start + ahead * LANES + lane
            z = tl.load(z_ptr + here, mask=here < columns, other=float("-inf")).to(tl.float32)
            largest = tl.maximum(largest, z)
            not_numbers |= (z != z).to(tl.int32)
    return tl.max(largest, 0), tl.max(not_numbers, 0) > 0


@triton.jit
def _mass_above(z_ptr, columns, places, peak, temperature, inverse, HAS_TEMPERATURE: tl.constexpr, LANES: tl.constexpr):
    """Return for each place the sum of the exponentials of a row's numbers above it; fp64."""
    lane, place = tl.arange(0, LANES)[None, :], _number(places)[:, None]
    above = tl.zeros([_PLACES, LANES], tl.float64)
    for start in range(0, columns, LANES * _STEPS):
        few = tl.zeros([_PLACES, LANES], tl.float32)
        for ahead in tl.static_range(_STEPS):
            here = start + ahead * LANES + lane
            z = tl.load(z_ptr + here, mask=here < columns, other=float("-inf")).to(tl.float32)
            few += tl.where(z > place, exp(_over(z, temperature, inverse, HAS_TEMPERATURE) - peak), 0.0)
        above += few.to(tl.float64)
    return tl.sum(above, 1)


@triton.jit
def _copy_between(z_ptr, list_ptr, columns, low, high, LANES: tl.constexpr):
    """Write a row's numbers in `(low, high]` to the list, without gaps, and return their count."""
    lane, found = tl.arange(0, LANES), 0
    for start in range(0, columns, LANES):
        z = tl.load(z_ptr + start + lane, mask=start + lane < columns, other=float("-inf"))
        inside = ((z.to(tl.float32) > low) & (z.to(tl.float32) <= high)).to(tl.int32)
        tl.store(list_ptr + found + tl.cumsum(inside, 0) - 1, z, mask=inside > 0)
        found += tl.sum(inside, 0)
    tl.debug_barrier()  # other threads read the list
    return found


@triton.jit
def _places_between(low, high, total, target, kept, beyond):
    """Return eight keys between `low` and `high`: six around the cut as interpolated, if the sum of what is below falls
    exponentially from one to the other; the middle; and the first quarter. A division would be a call in the loop."""
    low_z, high_z = _number(low), _number(high)
    least = 1e-9 * total
    below_low = tl.log(tl.maximum(total - kept, least).to(tl.float32))
    below_cut = tl.log(tl.maximum(total - target, least).to(tl.float32))
    below_high = tl.log(tl.maximum(total - beyond, least).to(tl.float32))
    from_high = (below_high - below_cut) * tl.exp2(-tl.log2(tl.maximum(below_high - below_low, 1e-6)))
    width, place = high_z - low_z, tl.arange(0, _PLACES)
    away = tl.exp2((place // 2).to(tl.float32) * 1.375 - 5.5)
    around = key(high_z + width * (tl.where(place % 2 == 0, away, -away) - from_high))
    halves = low + (_apart(low, high) >> tl.where(place == 6, 1, 2).to(tl.uint32)).to(tl.int32, bitcast=True)
    places = tl.where(place < 6, around, halves)
    return tl.minimum(tl.maximum(places, low + 1), high - 1)


@triton.jit
def nucleus_kernel(
    z_ptr,
    list_ptr,
    top_p_ptr,
    cut_ptr,
    peak_ptr,
    sum_ptr,
    z_stride,
    columns,
    room,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Find the smallest logit of a row that top-p keeps: first in the whole row, then in a list of candidates.

    Args:
        z_ptr: `[T, V]`, logits, V is `columns`, which the `temperature` divides. top_p_ptr: `[1]`, fp64.
        list_ptr: `[T, room]`, scratch memory.
        cut_ptr: `[T]`, peak_ptr: `[T]`, written: the logit, and the maximum over the temperature. sum_ptr: `[T]`, fp64,
            written: the sum of exponentials of all that is kept, relative to that maximum.
    """
    token = tl.program_id(0).to(tl.int64)
    row_ptr, list_ptr, length = z_ptr + token * z_stride, list_ptr + token * room, columns
    top, unknown = _largest(row_ptr, columns, LANES)
    peak = tl.maximum(over(top, temperature), lowest(tl.float32))
    inverse = over(tl.full([], 1.0, tl.float32), temperature)

    # The sum above `low` is at least what is wanted, the sum above `high` is less: the cut is in `(low, high]`.
    least, high = key(tl.full([], float("-inf"), tl.float32)), key(top)
    low = tl.maximum(key((peak - _NOTHING) * temperature) - 4, least)  # 4: rounding moves the key by less
    place = tl.arange(0, _PLACES)
    places = key((peak - 0.3 * (place * place).to(tl.float32)) * temperature)
    places = tl.where(place == 0, high - 1, tl.where(place == _PLACES - 1, low, tl.minimum(places, high - 1)))
    places = tl.maximum(places, least)
    top_p = tl.load(top_p_ptr)
    total, kept = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    listed, beyond, before = False, total, total  # `kept`: the sum above `low`; `beyond`: that above `high`
    searching = not unknown
    while searching:
        mass = before + _mass_above(row_ptr, length, places, peak, temperature, inverse, HAS_TEMPERATURE, LANES)
        if total == 0:
            total = tl.max(mass, 0) + (peak - peak).to(tl.float64)  # NaN where the largest is infinite
            kept = total
        enough = mass >= top_p * total
        kept = tl.minimum(kept, tl.min(tl.where(enough, mass, kept), 0))
        beyond = tl.maximum(beyond, tl.max(tl.where(enough, beyond, mass), 0))
        high = tl.where(total == total, tl.min(tl.where(enough, high, places), 0), high)
        low = tl.max(tl.where(enough, places, low), 0)
        searching = (_apart(low, high) > 1) & (total > 0) & (total < float("inf"))
        if searching:
            least_exp = exp(_over(_number(low), temperature, inverse, HAS_TEMPERATURE) - peak).to(tl.float64)
            if (kept - beyond < least_exp * (room - 1)) & (not listed):  # a logit adds at least that
                length = _copy_between(row_ptr, list_ptr, columns, _number(low), _number(high), LANES * _STEPS)
                listed, row_ptr, before = True, list_ptr, beyond
            places = _places_between(low, high, total, top_p * total, kept, beyond)
    kept = tl.where(unknown, float("nan"), kept)
    cut = tl.where(unknown, float("nan"), _number(high) + 0.0)
    tl.store(cut_ptr + token, cut.to(cut_ptr.dtype.element_ty))
    tl.store(peak_ptr + token, tl.where(unknown, float("nan"), peak))
    tl.store(sum_ptr + token, tl.where(kept == 0, 1.0, kept))


def nucleus(
    z_TV: Tensor, top_p: float, temperature: float, multiply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """Find each row's nucleus. See `row_passes/nucleus.py`, whose sort serves fp64: keys have 32 bits."""
    tokens, columns = z_TV.shape
    if z_TV.dtype == torch.float64 or z_TV.numel() == 0:
        return plain.nucleus(z_TV, top_p, temperature, multiply)
    z_TV = rowwise(z_TV)
    cut_T, peak_T = z_TV.new_empty(tokens), z_TV.new_empty(tokens, dtype=torch.float32)
    sum_T = z_TV.new_empty(tokens, dtype=torch.float64)
    top_p_1 = sum_T.new_full((1,), top_p)  # as a Python float it would arrive in fp32
    lanes = min(blocks.NUCLEUS, triton.next_power_of_2(columns))
    room = columns // 128 * 8 + 64  # of a row's list
    # The number of columns that a thread loads at a time decides the order of sums, and a row's bits must not depend on
    # its address: rows that do not begin at multiples of 16 bytes are copied. Blocks of rows bound copies and lists.
    aligned = z_TV.stride(0) % 16 == 0 and z_TV.data_ptr() % 16 == 0
    for rows in chunk_sizes.blocks(z_TV, 8 if aligned else 1):
        z_tV = z_TV[rows]
        if not aligned:
            z_tV = z_tV.new_empty(len(z_tV), columns + -columns % 16)[:, :columns].copy_(z_tV)
        launch(
            nucleus_kernel,
            (len(z_tV),),
            z_tV,
            sum_T.new_empty(len(z_tV) * room, dtype=z_TV.dtype),
            top_p_1,
            cut_T[rows],
            peak_T[rows],
            sum_T[rows],
            z_tV.stride(0),
            columns,
            room,
            temperature,
            HAS_TEMPERATURE=temperature != 1.0,
            LANES=lanes,
            num_warps=8,
            maxnreg=128,  # two programs fit on an SM
        )
    return cut_T, peak_T, sum_T

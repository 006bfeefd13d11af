"""`nucleus` in Triton: arguments and results as in `megatron_ext.head.row_passes.nucleus`.

Nothing is sorted. The bits of a float order as integers, so the smallest logit that is kept is found between two of
them: a pass over a row sums what lies above eight places between the two, and keeps the ninth in which it must be. The
first pass of sums begins with all that is above 0 beside the largest, its places dense near that one; further places
lie around where the sums say that the cut is. As soon as the logits between the two are certainly few, one pass copies
them to a list, and the passes that are left read the list: of a row of 128256 normally distributed logits, four passes
read the row, and half a dozen a list of 2000 to 8000.

One program takes a row; its sums depend on nothing else. They add eight numbers of a lane in fp32 and the rest in fp64:
a `top_p` nearer to 1 than that rounding, 1e-7, keeps all.
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
_NOTHING = tl.constexpr(100.0)  # so far below the largest an exponential is 0, or too small to change any sum


@triton.jit
def _in_order(bits):
    """The bits of fp32 as integers that compare as the numbers do, and the other way round."""
    return bits ^ ((bits >> 31) & _NOT_THE_SIGN)


@triton.jit
def key(z):
    return _in_order((z + 0.0).to(tl.int32, bitcast=True))  # -0.0 + 0.0 is 0.0


@triton.jit
def _number(key):
    return _in_order(key).to(tl.float32, bitcast=True)


@triton.jit
def _apart(low, high):
    """The count of numbers from one key to a higher one: from -inf to inf more than a signed integer holds."""
    return (high - low).to(tl.uint32, bitcast=True)


@triton.jit
def _over(z, temperature, inverse, HAS_TEMPERATURE: tl.constexpr):
    """`z / temperature`, rounded as IEEE has it where it is finite: the rest of the product is divided once more."""
    if HAS_TEMPERATURE:
        quotient = z * inverse
        return tl.fma(tl.fma(-quotient, temperature, z), inverse, quotient)
    return z


@triton.jit
def _largest(z_ptr, columns, LANES: tl.constexpr):
    """The largest of a row's numbers, and whether one is NaN."""
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
    """The sum of the exponentials of a row's numbers above each of the places; fp64."""
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
    """Writes a row's numbers above `low` that are not above `high`, one behind the other; returns how many they are."""
    lane, found = tl.arange(0, LANES), 0
    for start in range(0, columns, LANES):
        z = tl.load(z_ptr + start + lane, mask=start + lane < columns, other=float("-inf"))
        inside = ((z.to(tl.float32) > low) & (z.to(tl.float32) <= high)).to(tl.int32)
        tl.store(list_ptr + found + tl.cumsum(inside, 0) - 1, z, mask=inside > 0)
        found += tl.sum(inside, 0)
    tl.debug_barrier()  # other threads read it
    return found


@triton.jit
def _places_between(low, high, total, target, kept, beyond):
    """Six around where the cut should be, if what is below falls as an exponential from one number to the other, and
    two that halve the bits between them, and halve them again. No division: it would be a call in the loop."""
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
    token = tl.program_id(0).to(tl.int64)
    row_ptr, list_ptr, length = z_ptr + token * z_stride, list_ptr + token * room, columns
    top, unknown = _largest(row_ptr, columns, LANES)
    peak = tl.maximum(over(top, temperature), lowest(tl.float32))
    inverse = over(tl.full([], 1.0, tl.float32), temperature)

    # Above `low` lies as much as is wanted or more, above `high` less: the cut is in between, or `high` itself.
    least, high = key(tl.full([], float("-inf"), tl.float32)), key(top)
    low = tl.maximum(key((peak - _NOTHING) * temperature) - 4, least)  # rounded by less than four numbers
    place = tl.arange(0, _PLACES)
    places = key((peak - 0.3 * (place * place).to(tl.float32)) * temperature)
    places = tl.where(place == 0, high - 1, tl.where(place == _PLACES - 1, low, tl.minimum(places, high - 1)))
    places = tl.maximum(places, least)
    top_p = tl.load(top_p_ptr)
    total, kept = tl.zeros([], tl.float64), tl.zeros([], tl.float64)
    listed, beyond, before = False, total, total  # `kept` is what lies above `low`, `beyond` what lies above `high`
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
            if (kept - beyond < least_exp * (room - 1)) & (not listed):  # none of them is less
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
    """See `row_passes/nucleus.py`. fp64 has more numbers than its passes tell apart: it is sorted."""
    tokens, columns = z_TV.shape
    if z_TV.dtype == torch.float64 or z_TV.numel() == 0:
        return plain.nucleus(z_TV, top_p, temperature, multiply)
    z_TV = rowwise(z_TV)
    cut_T, peak_T = z_TV.new_empty(tokens), z_TV.new_empty(tokens, dtype=torch.float32)
    sum_T = z_TV.new_empty(tokens, dtype=torch.float64)
    top_p_1 = sum_T.new_full((1,), top_p)  # a number would arrive in fp32
    lanes = min(blocks.NUCLEUS, triton.next_power_of_2(columns))
    room = columns // 128 * 8 + 64  # of a row's list
    # How many columns a thread loads at a time decides the order of sums, and a row's bits must not depend on where it
    # lies: rows that do not begin at multiples of 16 bytes are copied. Some at a time, as the lists are.
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
            maxnreg=128,  # two programs an SM
        )
    return cut_T, peak_T, sum_T

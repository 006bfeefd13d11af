"""`nucleus` in Triton: arguments and results as in `megatron_ext.head.row_passes.nucleus`.

Nothing is sorted. The bits of a float order as integers, so the smallest logit that is kept is found between two of
them: each pass over a row sums what lies above eight places between the two, and keeps the ninth in which it must be,
so that eleven passes find it among all numbers of fp32. One program takes a row, which stays in the L2 cache meanwhile;
its sums depend on nothing else. They add eight numbers of a lane in fp32 and the rest in fp64: a `top_p` nearer to 1
than that rounding, 1e-7, keeps all.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import exp, over, rowwise
from megatron_ext.head.kernels.statistics.row_sums import lowest
from megatron_ext.head.row_passes import nucleus as plain
from megatron_ext.head.row_passes import row_blocks

_PLACES, _STEPS = tl.constexpr(8), tl.constexpr(8)
_NOT_THE_SIGN = tl.constexpr(0x7FFFFFFF)


@triton.jit
def _in_order(bits):
    """The bits of fp32 as integers that compare as the numbers do, and the other way round."""
    return bits ^ ((bits >> 31) & _NOT_THE_SIGN)


@triton.jit
def _key(z):
    return _in_order((z + 0.0).to(tl.int32, bitcast=True))  # -0.0 + 0.0 is 0.0


@triton.jit
def _over(z, temperature, HAS_TEMPERATURE: tl.constexpr):
    return over(z, temperature) if HAS_TEMPERATURE else z


@triton.jit
def nucleus_kernel(
    z_ptr,
    top_p_ptr,
    cut_ptr,
    peak_ptr,
    sum_ptr,
    z_stride,
    columns,
    temperature,
    HAS_TEMPERATURE: tl.constexpr,
    LANES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    z_ptr += token * z_stride
    lane = tl.arange(0, LANES)
    largest, not_numbers = tl.full([LANES], float("-inf"), tl.float32), tl.zeros([LANES], tl.int32)
    for at in range(0, columns, LANES):
        z = tl.load(z_ptr + at + lane, mask=at + lane < columns, other=float("-inf")).to(tl.float32)
        largest = tl.maximum(largest, z)
        not_numbers += (z != z).to(tl.int32)
    top = tl.max(largest, 0)
    peak = tl.maximum(_over(top, temperature, HAS_TEMPERATURE), lowest(tl.float32))
    sums = tl.zeros([LANES], tl.float64)
    for at in range(0, columns, LANES):
        z = tl.load(z_ptr + at + lane, mask=at + lane < columns, other=float("-inf")).to(tl.float32)
        sums += exp(_over(z, temperature, HAS_TEMPERATURE) - peak).to(tl.float64)
    total = tl.sum(sums, 0)
    target = tl.load(top_p_ptr) * total

    # Above `low` lies as much as is wanted or more, above `high` less: the cut is in between, or `high` itself.
    low = _key(tl.full([], float("-inf"), tl.float32)).to(tl.int64)
    high, kept = _key(top).to(tl.int64), total
    if (total > 0) & (total < float("inf")):
        step = tl.arange(0, _PLACES).to(tl.int64) + 1
        while high - low > 1:
            places = low + (high - low) * step // (_PLACES + 1)
            place = places.to(tl.int32)[:, None]
            above = tl.zeros([_PLACES, LANES], tl.float64)
            for start in range(0, columns, LANES * _STEPS):
                few = tl.zeros([_PLACES, LANES], tl.float32)
                for ahead in tl.static_range(_STEPS):
                    here = start + ahead * LANES + lane[None, :]
                    z = tl.load(z_ptr + here, mask=here < columns, other=float("-inf")).to(tl.float32)
                    few += tl.where(_key(z) > place, exp(_over(z, temperature, HAS_TEMPERATURE) - peak), 0.0)
                above += few.to(tl.float64)
            mass = tl.sum(above, 1)
            enough = mass >= target
            kept = tl.minimum(kept, tl.min(tl.where(enough, mass, kept), 0))
            high = tl.min(tl.where(enough, high, places), 0)
            low = tl.max(tl.where(enough, places, low), 0)
    cut = _in_order(high.to(tl.int32)).to(tl.float32, bitcast=True)
    unknown = tl.sum(not_numbers, 0) > 0
    cut, peak = tl.where(unknown, float("nan"), cut), tl.where(unknown, float("nan"), peak)
    tl.store(cut_ptr + token, cut.to(cut_ptr.dtype.element_ty))
    tl.store(peak_ptr + token, peak)
    tl.store(sum_ptr + token, tl.where(kept == 0, 1.0, kept))


def nucleus(
    z_TV: Tensor, top_p: float, temperature: float, multiply: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    """See `row_passes/nucleus.py`. fp64 has more numbers than eleven passes tell apart: it is sorted."""
    tokens, columns = z_TV.shape
    if z_TV.dtype == torch.float64 or z_TV.numel() == 0:
        return plain.nucleus(z_TV, top_p, temperature, multiply)
    z_TV = rowwise(z_TV)
    cut_T, peak_T = z_TV.new_empty(tokens), z_TV.new_empty(tokens, dtype=torch.float32)
    sum_T = z_TV.new_empty(tokens, dtype=torch.float64)
    top_p_1 = sum_T.new_full((1,), top_p)  # a number would arrive in fp32
    # How many columns a thread loads at a time decides the order of sums, and a row's bits must not depend on where it
    # lies: rows that do not begin at multiples of 16 bytes are copied, some at a time.
    aligned = z_TV.stride(0) % 16 == 0 and z_TV.data_ptr() % 16 == 0
    with torch.cuda.device_of(z_TV):  # Triton launches on the current device, wherever the tensors are
        for rows in [slice(0, tokens)] if aligned else row_blocks.blocks(z_TV):
            z_tV = z_TV[rows]
            if not aligned:
                z_tV = z_tV.new_empty(len(z_tV), columns + -columns % 16)[:, :columns].copy_(z_tV)
            nucleus_kernel[(len(z_tV),)](
                z_tV,
                top_p_1,
                cut_T[rows],
                peak_T[rows],
                sum_T[rows],
                z_tV.stride(0),
                columns,
                temperature,
                HAS_TEMPERATURE=temperature != 1.0,
                LANES=min(blocks.NUCLEUS, triton.next_power_of_2(columns)),
                num_warps=8,
            )
    return cut_T, peak_T, sum_T

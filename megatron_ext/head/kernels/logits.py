"""Transform of a logit in Triton before anything else: bias, softcap, temperature.

A number without a type would arrive in fp32, so softcap and temperature are told theirs.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
# exp of it is 0 in every dtype, and 0 times it is 0, where 0 * -inf would be NaN.
FAR = tl.constexpr(-1e4)
_LOWEST, _LOWEST_DOUBLE = tl.constexpr(-3.4028234663852886e38), tl.constexpr(-1.7976931348623157e308)


@triton.jit
def lowest(DTYPE: tl.constexpr):
    """The least finite number: it can be subtracted, and no logit's exponential is 0 relative to a larger one."""
    if tl.float64 == DTYPE:
        return tl.full([], _LOWEST_DOUBLE, DTYPE)
    return tl.full([], _LOWEST, DTYPE)


@triton.jit
def exp(x):
    """e^x. In fp32 by the hardware's 2^x, which takes what is below 2^-126 for 0: one instruction where `tl.exp`, which
    keeps it, takes four."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    return tl.exp2(x * LOG2_E)


@triton.jit
def tanh(x):
    """tanh, a series near 0, where the quotient cancels: to fp32's precision, and in fp64 to an absolute 1e-16."""
    e = exp(-2.0 * tl.abs(x))
    quotient = (1.0 - e) / (1.0 + e)
    s = x * x
    series = -1382.0 / 155925 + s * (21844.0 / 6081075 + s * (-929569.0 / 638512875))
    series = 1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835 + s * series))))
    return tl.where(tl.abs(x) < 0.15, x * series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def bend(x):
    """1 - tanh^2, to fp32's precision where tanh is near 1."""
    e = exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


# A row of logits, as these functions take it: the pointers to one token's logits and to the bias, if there is one, how
# many columns count, softcap and temperature, in the dtype of the arithmetic, and which of these two there are.


@triton.jit
def raw(row, columns, inside, MASKED: tl.constexpr):
    """The logits of some columns of one token with their bias; with MASKED -inf where not `inside`."""
    z_ptr, bias_ptr, _, _, temperature, _, _ = row
    if MASKED:
        z = tl.load(z_ptr + columns, mask=inside, other=float("-inf")).to(temperature.dtype)
        if bias_ptr is not None:
            z += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(temperature.dtype)
    else:
        z = tl.load(z_ptr + columns).to(temperature.dtype)
        if bias_ptr is not None:
            z += tl.load(bias_ptr + columns).to(temperature.dtype)
    return z


@triton.jit
def transformed(row, z):
    """`softcap * tanh(z / softcap) / temperature`."""
    _, _, _, softcap, temperature, HAS_SOFTCAP, HAS_TEMPERATURE = row
    if HAS_SOFTCAP:
        z = softcap * tanh(z / softcap)
    if HAS_TEMPERATURE:
        z = over(z, temperature)
    return z


@triton.jit
def over(z, temperature):
    """`z / temperature`, rounded as IEEE has it: Triton's own division of fp32 may be off by two units.

    In one expression: behind a return Triton would compile `div_rn` for fp64 too, which it does not take.
    """
    return z / temperature if z.dtype == tl.float64 else tl.div_rn(z, temperature)


@triton.jit
def logits(row, columns, MASKED: tl.constexpr):
    """The logits of some columns of one token, transformed; with MASKED -inf from the first that does not count on."""
    inside = columns < row[2]
    z = transformed(row, raw(row, columns, inside, MASKED))
    if MASKED and row[5]:
        z = tl.where(inside, z, float("-inf"))
    return z


def packed(x: Tensor | None) -> Tensor | None:
    """`x` without gaps in memory, if there is one."""
    return None if x is None else x.contiguous()


def bends(softcap: float | None, temperature: float) -> dict[str, Any]:
    """Softcap and temperature by the names that kernels have for them, and whether there are such."""
    flags = {"HAS_SOFTCAP": softcap is not None, "HAS_TEMPERATURE": temperature != 1.0}
    return {"softcap": 1.0 if softcap is None else softcap, "temperature": temperature, **flags}


def rowwise(x_ND: Tensor) -> Tensor:
    """`x_ND` with neighbouring columns next to each other in memory."""
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()


def writable(out_TV: Tensor) -> Tensor:
    """`out_TV`, which the head made itself with neighbouring columns next to each other."""
    assert out_TV.shape[1] <= 1 or out_TV.stride(1) == 1, "outputs are made by the head, columns next to each other"
    return out_TV

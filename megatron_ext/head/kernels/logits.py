"""The transform of a logit in Triton, which precedes all else: bias, softcap, temperature.

Triton passes a Python float in fp32, so kernels annotate softcap and temperature as fp64.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
# The lower bound of an exponent: exp(FAR) is 0 in every dtype, and so is 0 * FAR, where 0 * -inf would be NaN.
FAR = tl.constexpr(-1e4)
_LOWEST, _LOWEST_DOUBLE = tl.constexpr(-3.4028234663852886e38), tl.constexpr(-1.7976931348623157e308)


@triton.jit
def lowest(DTYPE: tl.constexpr):
    """Return the least finite number: subtracted from -inf it gives no NaN, and no finite maximum is less."""
    if tl.float64 == DTYPE:
        return tl.full([], _LOWEST_DOUBLE, DTYPE)
    return tl.full([], _LOWEST, DTYPE)


@triton.jit
def exp(x):
    """Return e^x. In fp32 it is the hardware's 2^x, which flushes results below 2^-126 to 0: one instruction, where
    `tl.exp`, which keeps them, takes four."""
    if x.dtype == tl.float64:
        return tl.exp(x)
    return tl.exp2(x * LOG2_E)


@triton.jit
def tanh(x):
    """Return tanh, near 0 by a series, as the quotient cancels there: to fp32's precision, in fp64 to 1e-16."""
    e = exp(-2.0 * tl.abs(x))
    quotient = (1.0 - e) / (1.0 + e)
    s = x * x
    series = -1382.0 / 155925 + s * (21844.0 / 6081075 + s * (-929569.0 / 638512875))
    series = 1.0 + s * (-1.0 / 3 + s * (2.0 / 15 + s * (-17.0 / 315 + s * (62.0 / 2835 + s * series))))
    return tl.where(tl.abs(x) < 0.15, x * series, tl.where(x < 0, -quotient, quotient))


@triton.jit
def bend(x):
    """Return 1 - tanh^2, to fp32's precision also where tanh is near 1."""
    e = exp(-2.0 * tl.abs(x))
    return 4.0 * e / ((1.0 + e) * (1.0 + e))


# The tuple `row` of these functions: pointer to one token's logits, pointer to the bias or None, number of columns that
# count, softcap and temperature in the dtype of the arithmetic, HAS_SOFTCAP, HAS_TEMPERATURE.


@triton.jit
def raw(row, columns, inside, MASKED: tl.constexpr):
    """Load the logits of some columns of one token and add the bias; with MASKED -inf where not `inside`."""
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
    """Return `softcap * tanh(z / softcap) / temperature`."""
    _, _, _, softcap, temperature, HAS_SOFTCAP, HAS_TEMPERATURE = row
    if HAS_SOFTCAP:
        z = softcap * tanh(z / softcap)
    if HAS_TEMPERATURE:
        z = over(z, temperature)
    return z


@triton.jit
def over(z, temperature):
    """Return `z / temperature`, rounded as IEEE has it: Triton's own division of fp32 may be off by two units.

    One expression selects: after an early return Triton would compile `div_rn` for fp64 too, which has no `div_rn`.
    """
    return z / temperature if z.dtype == tl.float64 else tl.div_rn(z, temperature)


@triton.jit
def logits(row, columns, MASKED: tl.constexpr):
    """Return transformed logits of some columns of one token; with MASKED -inf in columns that do not count."""
    inside = columns < row[2]
    z = transformed(row, raw(row, columns, inside, MASKED))
    if MASKED and row[5]:
        z = tl.where(inside, z, float("-inf"))
    return z


def packed(x: Tensor | None) -> Tensor | None:
    """Return `x` contiguous in memory, None for None."""
    return None if x is None else x.contiguous()


def bends(softcap: float | None, temperature: float) -> dict[str, Any]:
    """Return softcap and temperature as keyword arguments of a kernel, and the flags of whether each is set."""
    flags = {"HAS_SOFTCAP": softcap is not None, "HAS_TEMPERATURE": temperature != 1.0}
    return {"softcap": 1.0 if softcap is None else softcap, "temperature": temperature, **flags}


def rowwise(x_ND: Tensor) -> Tensor:
    """Return `x_ND`, or a copy whose neighbouring columns are adjacent in memory."""
    return x_ND if x_ND.stride(1) == 1 else x_ND.contiguous()


def writable(out_TV: Tensor) -> Tensor:
    """Return `out_TV`, after asserting that its neighbouring columns are adjacent in memory."""
    assert out_TV.shape[1] <= 1 or out_TV.stride(1) == 1, "outputs are made by the head, columns next to each other"
    return out_TV

"""`row_gradient` in Triton: the same arguments and results as in `megatron_ext.head.row_passes.passes`. A program takes
some columns of one token."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import FAR, bend, bends, exp, packed, raw, rowwise, transformed, writable
from megatron_ext.numerics.launches import launch


@triton.jit
def _row_gradient_kernel(
    source_ptr,
    target_ptr,
    shift_ptr,
    out_ptr,
    source_stride,
    out_stride,
    columns_all,
    tiny: tl.float64,
    counted,
    softcap: tl.float64,
    temperature: tl.float64,
    HAS_SOFTCAP: tl.constexpr,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCK_V: tl.constexpr,
    scale_T=None,
    slope_T=None,
    offset_T=None,
    value_T=None,
    bias_V=None,
    source_is_exp: tl.constexpr = False,
):
    """Write the gradient of some columns of one token; `row_passes/passes.py` has the formula.

    Args:
        source_ptr: `[T, V]`, logits, or exponentials if `source_is_exp`. bias_V: `[V]`.
        target_ptr: `[T]`, int64, the label's column. shift_ptr: `[T]`, subtracted from logits.
        out_ptr: `[T, V]`, written. columns_all: V, of which the first `counted` count.
        scale_T: `[T]`, slope_T: `[T]`, offset_T: `[T]`, coefficients; value_T: `[T]`, the gradient at the label.
        tiny: the dtype's least normal number; a logarithm takes no less. softcap, temperature: of all logits.
    """
    token = tl.program_id(0).to(tl.int64)
    DTYPE: tl.constexpr = shift_ptr.dtype.element_ty
    columns = tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)
    inside = columns < counted
    target = tl.load(target_ptr + token).to(tl.int32)
    shift = tl.load(shift_ptr + token)
    source_ptr += token * source_stride
    softcap, temperature = tl.full([], softcap, DTYPE), tl.full([], temperature, DTYPE)
    row = (source_ptr, bias_V, counted, softcap, temperature, HAS_SOFTCAP, HAS_TEMPERATURE)
    if source_is_exp:
        e = tl.load(source_ptr + columns, mask=inside, other=0.0).to(DTYPE)
        u = e
        if slope_T is not None or HAS_SOFTCAP:
            u = tl.log(tl.maximum(e, tl.full([], tiny, DTYPE)))
        if HAS_SOFTCAP:
            bent = (u + shift) * (temperature / softcap)
            slope_here = 1.0 - bent * bent
    else:
        z = raw(row, columns, inside, True)
        if HAS_SOFTCAP:
            slope_here = bend(z / softcap)
        u = transformed(row, z) - shift
        e = exp(u)
    grad = e
    if slope_T is not None:
        near = tl.maximum(u, FAR)
        grad = e * (tl.load(scale_T + token) + tl.load(slope_T + token) * near)
    elif scale_T is not None:
        grad = e * tl.load(scale_T + token)
    if offset_T is not None:
        offset = tl.load(offset_T + token)
        if source_is_exp:
            grad += offset
        else:
            grad += tl.where(u > float("-inf"), offset, 0.0)
    if HAS_SOFTCAP:
        grad = tl.where(u > float("-inf"), grad * slope_here, 0.0)
    value = tl.zeros([], DTYPE)
    if value_T is not None:
        value = tl.load(value_T + token)
    grad = tl.where(columns == target, value, grad)
    if offset_T is not None or HAS_SOFTCAP:
        grad = tl.where(inside, grad, 0.0)
    tl.store(out_ptr + token * out_stride + columns, grad.to(out_ptr.dtype.element_ty), mask=columns < columns_all)


def row_gradient(
    source_TV: Tensor,
    target_T: Tensor,
    shift_T: Tensor,
    out_TV: Tensor,
    scale_T: Tensor | None = None,
    slope_T: Tensor | None = None,
    offset_T: Tensor | None = None,
    value_T: Tensor | None = None,
    bias_V: Tensor | None = None,
    *,
    counted: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    source_is_exp: bool = False,
    labelled: bool = False,
) -> None:
    """Write the gradient of each logit, in one launch. See `megatron_ext.head.row_passes.passes.row_gradient`."""
    (tokens, columns), source_TV = source_TV.shape, rowwise(source_TV)
    block_v, warps = blocks.sizes(blocks.GRADIENT, columns, shift_T.dtype == torch.float64)
    launch(
        _row_gradient_kernel,
        (tokens, triton.cdiv(columns, block_v)),
        source_TV,
        target_T.contiguous(),
        shift_T.contiguous(),
        writable(out_TV),
        source_TV.stride(0),
        out_TV.stride(0),
        columns,
        torch.finfo(shift_T.dtype).tiny,
        BLOCK_V=block_v,
        num_warps=warps,
        scale_T=packed(scale_T),
        slope_T=packed(slope_T),
        offset_T=packed(offset_T),
        value_T=packed(value_T),
        bias_V=packed(bias_V),
        counted=counted,
        source_is_exp=source_is_exp,
        **bends(softcap, temperature),
    )

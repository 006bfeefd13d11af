"""Activations since 2.20: GLU, SwiGLU with an offset, SiTU-GLU, and those with a factor for each row.

Computed in fp32 and rounded once, as those before. With `glu_interleave_size` n the gate and its partner come in turns
of n columns each.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.emulation.transformer_engine.activations import (
    PLAIN,
    Function,
    backward_of,
    clamped,
    forward_of,
    gated,
)
from megatron_ext.emulation.transformer_engine.quantisation.tensors import quantize_into

_glu, _swiglu, _srelu = gated(torch.sigmoid), gated(PLAIN["silu"]), PLAIN["srelu"]


def _situ(beta1: float, beta2: float) -> Function:
    """The gate is capped at `beta1` and then multiplied by its sigmoid, its partner is capped at `beta2`."""

    def apply(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, dim=-1)
        return beta1 * torch.tanh(gate / beta1) * torch.sigmoid(gate) * beta2 * torch.tanh(linear / beta2)

    return apply


def glu(input: Tensor, quantizer: Any) -> Any:
    """`[..., 2 H]` to `[..., H]`: the first half's sigmoid times the second."""
    return forward_of(_glu)(input, quantizer)


def dglu(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
    """The gradient of `glu`."""
    return backward_of(_glu)(grad, fwd_input, quantizer)


def clamped_swiglu(
    input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
) -> Any:
    """SwiGLU with a clamped gate, of `[..., 2 H]`."""
    return forward_of(clamped(limit, alpha, glu_linear_offset))(input, quantizer)


def clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
) -> Any:
    """The gradient of `clamped_swiglu`."""
    return backward_of(clamped(limit, alpha, glu_linear_offset))(grad, fwd_input, quantizer)


def situglu(input: Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
    """SwiGLU whose halves are capped softly, of `[..., 2 H]`."""
    return forward_of(_situ(beta1, beta2))(input, quantizer)


def dsituglu(grad: Tensor, fwd_input: Tensor, quantizer: Any, beta1: float = 4.0, beta2: float = 25.0) -> Any:
    """The gradient of `situglu`."""
    return backward_of(_situ(beta1, beta2))(grad, fwd_input, quantizer)


def scaled_swiglu(input: Tensor, act_scales: Tensor, quantizer: Any, glu_interleave_size: int = 0) -> Any:
    """`swiglu` of `[..., 2 H]`, times a factor for each row."""
    return _scaled(_swiglu, input, act_scales, quantizer, glu_interleave_size)


def scaled_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, Tensor | None]:
    """Gradients of `scaled_swiglu`: of its input, and of its factors where they are wanted."""
    return _gradients(_swiglu, grad, fwd_input, act_scales, quantizer, glu_interleave_size, compute_scale_grad)


def scaled_clamped_swiglu(
    input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int = 0,
) -> Any:
    """`clamped_swiglu` of `[..., 2 H]`, times a factor for each row."""
    return _scaled(clamped(limit, alpha, glu_linear_offset), input, act_scales, quantizer, glu_interleave_size)


def scaled_clamped_dswiglu(
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    limit: float = 7.0,
    alpha: float = 1.702,
    glu_linear_offset: float = 1.0,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, Tensor | None]:
    """Gradients of `scaled_clamped_swiglu`."""
    function = clamped(limit, alpha, glu_linear_offset)
    return _gradients(function, grad, fwd_input, act_scales, quantizer, glu_interleave_size, compute_scale_grad)


def scaled_situglu(
    input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
) -> Any:
    """`situglu` of `[..., 2 H]`, times a factor for each row."""
    return _scaled(_situ(beta1, beta2), input, act_scales, quantizer, glu_interleave_size)


def scaled_dsituglu(
    grad: Tensor,
    fwd_input: Tensor,
    act_scales: Tensor,
    quantizer: Any,
    beta1: float = 4.0,
    beta2: float = 25.0,
    glu_interleave_size: int = 0,
    compute_scale_grad: bool = True,
) -> tuple[Any, Tensor | None]:
    """Gradients of `scaled_situglu`."""
    function = _situ(beta1, beta2)
    return _gradients(function, grad, fwd_input, act_scales, quantizer, glu_interleave_size, compute_scale_grad)


def scaled_srelu(input: Tensor, act_scales: Tensor, quantizer: Any) -> Any:
    """`srelu`, times a factor for each row."""
    return _scaled(_srelu, input, act_scales, quantizer)


def scaled_dsrelu(
    grad: Tensor, fwd_input: Tensor, act_scales: Tensor, quantizer: Any, compute_scale_grad: bool = True
) -> tuple[Any, Tensor | None]:
    """Gradients of `scaled_srelu`."""
    return _gradients(_srelu, grad, fwd_input, act_scales, quantizer, 0, compute_scale_grad)


def _rows(function: Function, x: Tensor, scales: Tensor, interleaved: int) -> Tensor:
    if interleaved:
        x = x.unflatten(-1, (-1, 2, interleaved)).transpose(-3, -2).flatten(-3)
    return function(x) * scales.view(*x.shape[:-1], 1)


def _scaled(function: Function, input: Tensor, scales: Tensor, quantizer: Any, interleaved: int = 0) -> Any:
    found = _rows(function, input.float(), scales.float(), interleaved)
    return quantize_into(found.to(input.dtype), None, quantizer)


def _gradients(
    function: Function,
    grad: Tensor,
    input: Tensor,
    scales: Tensor,
    quantizer: Any,
    interleaved: int,
    of_scales: bool,
) -> tuple[Any, Tensor | None]:
    with torch.enable_grad():
        wide, factors = (x.detach().float().requires_grad_() for x in (input, scales))
        out = _rows(function, wide, factors, interleaved)
        dx, dscales = torch.autograd.grad(out, (wide, factors), grad.float())
    return quantize_into(dx.to(input.dtype), None, quantizer), dscales.to(scales.dtype) if of_scales else None

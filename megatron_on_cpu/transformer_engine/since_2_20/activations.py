"""Activations since 2.20: GLU, SiTU-GLU, and those with a factor for each row.

Results are computed in fp32 and rounded once. With `glu_interleave_size` n the two halves of gated activations are
interleaved: n columns of the gate, n of the other half, and so on.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.transformer_engine.activations import (
    OF_CLAMPED,
    PLAIN,
    Function,
    backward_of,
    clamped,
    forward_of,
    gated,
    with_options,
)
from megatron_on_cpu.transformer_engine.parameters import taking
from megatron_on_cpu.transformer_engine.quantisation.tensors import quantize_into

_OF_CLAMPED = OF_CLAMPED | {"glu_linear_offset": 1.0}
_OF_SITU = {"beta1": 4.0, "beta2": 25.0}
_INTERLEAVED = {"glu_interleave_size": 0}


def _situ(x: Tensor, beta1: float, beta2: float) -> Tensor:
    """Multiply the gate capped at `beta1` by tanh, the gate's sigmoid, and the other half capped at `beta2`."""
    gate, linear = x.chunk(2, dim=-1)
    return beta1 * torch.tanh(gate / beta1) * torch.sigmoid(gate) * beta2 * torch.tanh(linear / beta2)


def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions by their names in the compiled module."""
    glu, swiglu, srelu = gated(torch.sigmoid), gated(PLAIN["silu"]), PLAIN["srelu"]
    return {
        "clamped_swiglu": forward_of(clamped, **_OF_CLAMPED),
        "clamped_dswiglu": backward_of(clamped, **_OF_CLAMPED),
        "glu": forward_of(glu),
        "dglu": backward_of(glu),
        "situglu": forward_of(_situ, **_OF_SITU),
        "dsituglu": backward_of(_situ, **_OF_SITU),
        "scaled_swiglu": _scaled_forward(swiglu, **_INTERLEAVED),
        "scaled_dswiglu": _scaled_backward(swiglu, **_INTERLEAVED),
        "scaled_clamped_swiglu": _scaled_forward(clamped, **_OF_CLAMPED, **_INTERLEAVED),
        "scaled_clamped_dswiglu": _scaled_backward(clamped, **_OF_CLAMPED, **_INTERLEAVED),
        "scaled_situglu": _scaled_forward(_situ, **_OF_SITU, **_INTERLEAVED),
        "scaled_dsituglu": _scaled_backward(_situ, **_OF_SITU, **_INTERLEAVED),
        "scaled_srelu": _scaled_forward(srelu),
        "scaled_dsrelu": _scaled_backward(srelu),
    }


def _rows(function: Function, x: Tensor, scales: Tensor, glu_interleave_size: int = 0, **options: Any) -> Tensor:
    if glu_interleave_size:
        x = x.unflatten(-1, (-1, 2, glu_interleave_size)).transpose(-3, -2).flatten(-3)
    return function(x, **options) * scales.view(*x.shape[:-1], 1)


def _scaled_forward(function: Function, **options: Any) -> Callable[..., Any]:
    """Return the forward function of the activation times a factor for each row."""

    @taking("input act_scales quantizer", **options)
    def forward(given: Any) -> Any:
        rows = with_options(partial(_rows, function), options, given)
        found = rows(given.input.float(), given.act_scales.float())
        return quantize_into(found.to(given.input.dtype), None, given.quantizer)

    return forward


def _scaled_backward(function: Function, **options: Any) -> Callable[..., Any]:
    """Return the backward function, which returns the gradients of the input, and of the factors or None."""

    @taking("grad fwd_input act_scales quantizer", **options, compute_scale_grad=True)
    def backward(given: Any) -> tuple[Any, Tensor | None]:
        rows = with_options(partial(_rows, function), options, given)
        with torch.enable_grad():
            wide, factors = (x.detach().float().requires_grad_() for x in (given.fwd_input, given.act_scales))
            dx, dscales = torch.autograd.grad(rows(wide, factors), (wide, factors), given.grad.float())
        of_factors = dscales.to(given.act_scales.dtype) if given.compute_scale_grad else None
        return quantize_into(dx.to(given.fwd_input.dtype), None, given.quantizer), of_factors

    return backward

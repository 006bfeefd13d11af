"""Activations, gated and not, their gradients, and these together with the gradient of a bias.

Computed in fp32 and rounded once, to the dtype of the input; quantised where a quantiser is given. Gated ones take
`[..., 2 H]`: the first half is activated, the second multiplied to it.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.emulation.transformer_engine.quantisation.tensors import quantize_into

_Function = Callable[[Tensor], Tensor]

_PLAIN: dict[str, _Function] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
_GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
_WITH_BIAS = ("gelu", "silu", "relu", "qgelu", "srelu")


def _gated(activation: _Function) -> _Function:
    def apply(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, dim=-1)
        return activation(gate) * linear

    return apply


def _clamped(limit: float, alpha: float, offset: float = 1.0) -> _Function:
    """The gate of GPT-OSS: clamped from above, its partner from both sides and moved by `offset`."""

    def apply(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, dim=-1)
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (linear + offset)

    return apply


def _forward_of(function: _Function) -> Callable[..., Any]:
    def forward(input: Tensor, quantizer: Any) -> Any:
        return quantize_into(function(input.float()).to(input.dtype), None, quantizer)

    return forward


def _gradient(function: _Function, grad: Tensor, x: Tensor) -> Tensor:
    with torch.enable_grad():
        wide = x.detach().float().requires_grad_()
        return torch.autograd.grad(function(wide), wide, grad.float())[0].to(x.dtype)


def _backward_of(function: _Function) -> Callable[..., Any]:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        return quantize_into(_gradient(function, grad, fwd_input), None, quantizer)

    return backward


def _backward_with_bias(function: _Function) -> Callable[..., Any]:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        dx = _gradient(function, grad, fwd_input)
        dbias = dx.float().reshape(-1, dx.shape[-1]).sum(0).to(grad.dtype)
        return [dbias, quantize_into(dx, None, quantizer)]

    return backward


def clamped_swiglu(input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702) -> Any:
    """SwiGLU with a clamped gate, of `[..., 2 H]`."""
    return _forward_of(_clamped(limit, alpha))(input, quantizer)


def clamped_dswiglu(grad: Tensor, fwd_input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702) -> Any:
    """The gradient of `clamped_swiglu`."""
    return _backward_of(_clamped(limit, alpha))(grad, fwd_input, quantizer)


def _since_2_20() -> dict[str, Callable[..., Any]]:
    def clamped_swiglu(
        input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702, glu_linear_offset: float = 1.0
    ) -> Any:
        return _forward_of(_clamped(limit, alpha, glu_linear_offset))(input, quantizer)

    def clamped_dswiglu(
        grad: Tensor,
        fwd_input: Tensor,
        quantizer: Any,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> Any:
        return _backward_of(_clamped(limit, alpha, glu_linear_offset))(grad, fwd_input, quantizer)

    glu = _gated(torch.sigmoid)
    return {
        "glu": _forward_of(glu),
        "dglu": _backward_of(glu),
        "clamped_swiglu": clamped_swiglu,
        "clamped_dswiglu": clamped_dswiglu,
    }


def functions(version: tuple[int, int]) -> dict[str, Callable[..., Any]]:
    """By the names of the compiled module of this version."""
    all_functions = _PLAIN | {name: _gated(_PLAIN[gate]) for name, gate in _GATED.items()}
    found: dict[str, Callable[..., Any]] = {
        "clamped_swiglu": clamped_swiglu,
        "clamped_dswiglu": clamped_dswiglu,
    }
    for name, function in all_functions.items():
        found[name] = _forward_of(function)
        found["d" + name] = _backward_of(function)
    for name in _WITH_BIAS:
        found["dbias_d" + name] = _backward_with_bias(_PLAIN[name])
    return found | _since_2_20() if version >= (2, 20) else found

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

Function = Callable[[Tensor], Tensor]

PLAIN: dict[str, Function] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
_GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
_WITH_BIAS = ("gelu", "silu", "relu", "qgelu", "srelu")


def gated(activation: Function) -> Function:
    """Of `[..., 2 H]`, the gate first."""

    def apply(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, dim=-1)
        return activation(gate) * linear

    return apply


def clamped(limit: float, alpha: float, offset: float = 1.0) -> Function:
    """The gate of GPT-OSS: clamped from above, its partner from both sides and moved by `offset`."""

    def apply(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, dim=-1)
        gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
        return gate * torch.sigmoid(alpha * gate) * (linear + offset)

    return apply


def forward_of(function: Function) -> Callable[..., Any]:
    """What the compiled module calls by the name of the activation."""

    def forward(input: Tensor, quantizer: Any) -> Any:
        return quantize_into(function(input.float()).to(input.dtype), None, quantizer)

    return forward


def gradient(function: Function, grad: Tensor, x: Tensor) -> Tensor:
    """Of the input, by autograd in fp32, in its dtype."""
    with torch.enable_grad():
        wide = x.detach().float().requires_grad_()
        return torch.autograd.grad(function(wide), wide, grad.float())[0].to(x.dtype)


def backward_of(function: Function) -> Callable[..., Any]:
    """What it calls by that name with a d before it."""

    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> Any:
        return quantize_into(gradient(function, grad, fwd_input), None, quantizer)

    return backward


def _backward_with_bias(function: Function) -> Callable[..., Any]:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        dx = gradient(function, grad, fwd_input)
        dbias = dx.float().reshape(-1, dx.shape[-1]).sum(0).to(grad.dtype)
        return [dbias, quantize_into(dx, None, quantizer)]

    return backward


def clamped_swiglu(input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702) -> Any:
    """SwiGLU with a clamped gate, of `[..., 2 H]`."""
    return forward_of(clamped(limit, alpha))(input, quantizer)


def clamped_dswiglu(grad: Tensor, fwd_input: Tensor, quantizer: Any, limit: float = 7.0, alpha: float = 1.702) -> Any:
    """The gradient of `clamped_swiglu`."""
    return backward_of(clamped(limit, alpha))(grad, fwd_input, quantizer)


def functions() -> dict[str, Callable[..., Any]]:
    """By the names of the compiled module."""
    all_functions = PLAIN | {name: gated(PLAIN[gate]) for name, gate in _GATED.items()}
    found: dict[str, Callable[..., Any]] = {
        "clamped_swiglu": clamped_swiglu,
        "clamped_dswiglu": clamped_dswiglu,
    }
    for name, function in all_functions.items():
        found[name] = forward_of(function)
        found["d" + name] = backward_of(function)
    for name in _WITH_BIAS:
        found["dbias_d" + name] = _backward_with_bias(PLAIN[name])
    return found

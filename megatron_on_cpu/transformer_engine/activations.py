"""Activations, gated and not, their gradients, and gradients together with that of a bias.

Results are computed in fp32, rounded once to the dtype of the input, and quantised where a quantiser is given. Gated
activations take `[..., 2 H]`: the activation of the first half is multiplied by the second half.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_on_cpu.transformer_engine.parameters import taking
from megatron_on_cpu.transformer_engine.quantisation.tensors import quantize_into

Function = Callable[..., Tensor]  # of the input and the activation's options

PLAIN: dict[str, Function] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
_GATED = {"geglu": "gelu", "qgeglu": "qgelu", "reglu": "relu", "sreglu": "srelu", "swiglu": "silu"}
OF_CLAMPED = {"limit": 7.0, "alpha": 1.702}


def gated(activation: Function) -> Function:
    """Return the gated form of `activation`, a function of `[..., 2 H]` with the gate in the first half."""

    def apply(x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, dim=-1)
        return activation(gate) * linear

    return apply


def clamped(x: Tensor, limit: float, alpha: float, glu_linear_offset: float = 1.0) -> Tensor:
    """Apply GPT-OSS's SwiGLU: the gate is clamped from above, the other half from both sides and moved by an offset."""
    gate, linear = x.chunk(2, dim=-1)
    gate, linear = gate.clamp(max=limit), linear.clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (linear + glu_linear_offset)


def with_options(function: Function, names: dict[str, Any], given: Any) -> Function:
    """Return `function` with the options `names` taken from the attributes of `given`."""
    return partial(function, **{name: getattr(given, name) for name in names})


def forward_of(function: Function, **options: Any) -> Callable[..., Any]:
    """Return the compiled module's forward function of an activation, whose `options` have these defaults."""

    @taking("input quantizer", **options)
    def forward(given: Any) -> Any:
        found = with_options(function, options, given)(given.input.float())
        return quantize_into(found.to(given.input.dtype), None, given.quantizer)

    return forward


def gradient(function: Function, grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of `x` in its dtype, computed by autograd in fp32."""
    with torch.enable_grad():
        wide = x.detach().float().requires_grad_()
        return torch.autograd.grad(function(wide), wide, grad.float())[0].to(x.dtype)


def backward_of(function: Function, **options: Any) -> Callable[..., Any]:
    """Return the compiled module's backward function of an activation, named as forward with a d ("dgelu")."""

    @taking("grad fwd_input quantizer", **options)
    def backward(given: Any) -> Any:
        dx = gradient(with_options(function, options, given), given.grad, given.fwd_input)
        return quantize_into(dx, None, given.quantizer)

    return backward


def _backward_with_bias(function: Function) -> Callable[..., Any]:
    def backward(grad: Tensor, fwd_input: Tensor, quantizer: Any) -> list[Any]:
        dx = gradient(function, grad, fwd_input)
        dbias = dx.float().reshape(-1, dx.shape[-1]).sum(0).to(grad.dtype)
        return [dbias, quantize_into(dx, None, quantizer)]

    return backward


def functions() -> dict[str, Callable[..., Any]]:
    """Return the functions by their names in the compiled module."""
    all_functions = PLAIN | {name: gated(PLAIN[gate]) for name, gate in _GATED.items()}
    found = {"clamped_swiglu": forward_of(clamped, **OF_CLAMPED), "clamped_dswiglu": backward_of(clamped, **OF_CLAMPED)}
    for name, function in all_functions.items():
        found[name] = forward_of(function)
        found["d" + name] = backward_of(function)
    for name, function in PLAIN.items():
        found["dbias_d" + name] = _backward_with_bias(function)
    return found

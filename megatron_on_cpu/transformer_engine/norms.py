"""LayerNorm and RMSNorm over the last dim, forward and backward. Statistics and sums are in fp32.

With `zero_centered_gamma` the rows are multiplied by the weight + 1. `sm_margin` is for GPUs, and not used.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_on_cpu.transformer_engine.enums import TORCH_DTYPES
from megatron_on_cpu.transformer_engine.quantisation.tensors import quantize_into


def layernorm_fwd(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Normalise `input` `[rows, hidden]`; return [normalised rows, means, inverse standard deviations]."""
    x, gamma = input.float(), _gamma(weight, zero_centered_gamma)
    mean = x.mean(-1)
    inverse_std = torch.rsqrt((x - mean[:, None]).square().mean(-1) + eps)
    y = F.layer_norm(x, x.shape[-1:], gamma, None if bias is None else bias.float(), eps)
    return [quantize_into(y.to(TORCH_DTYPES[otype]), ln_out, quantizer), mean, inverse_std]


def rmsnorm_fwd(
    input: Tensor,
    weight: Tensor,
    eps: float,
    ln_out: Any,
    quantizer: Any,
    otype: Any,
    sm_margin: int,
    zero_centered_gamma: bool,
) -> list[Any]:
    """Normalise `input` `[rows, hidden]`; return [normalised rows, None, inverse root mean squares]."""
    x, gamma = input.float(), _gamma(weight, zero_centered_gamma)
    inverse_rms = torch.rsqrt(x.square().mean(-1) + eps)
    y = F.rms_norm(x, x.shape[-1:], gamma, eps)
    return [quantize_into(y.to(TORCH_DTYPES[otype]), ln_out, quantizer), None, inverse_rms]


def layernorm_bwd(
    dz: Tensor, x: Tensor, mu: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Any]:
    """Return [gradient of the input, of the weight, of the bias]."""
    normed = (x.float() - mu[:, None]) * rsigma[:, None]
    grad = dz.float()
    inner = grad * _gamma(gamma, zero_centered_gamma)
    dx = inner - inner.mean(-1, keepdim=True) - normed * (inner * normed).mean(-1, keepdim=True)
    dgamma, dbeta = (grad * normed).sum(0), grad.sum(0)
    return [(dx * rsigma[:, None]).to(x.dtype), dgamma.to(gamma.dtype), dbeta.to(gamma.dtype)]


def rmsnorm_bwd(
    dz: Tensor, x: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Any]:
    """Return [gradient of the input, of the weight]."""
    return rmsnorm_bwd_add(dz, x, torch.zeros(()), rsigma, gamma, sm_margin, zero_centered_gamma)


def rmsnorm_bwd_add(
    dz: Tensor, x: Tensor, add: Tensor, rsigma: Tensor, gamma: Tensor, sm_margin: int, zero_centered_gamma: bool
) -> list[Any]:
    """Return gradients as `rmsnorm_bwd`, with `add`, the gradient of the residual stream, added to the input's."""
    normed = x.float() * rsigma[:, None]
    inner = dz.float() * _gamma(gamma, zero_centered_gamma)
    dx = (inner - normed * (inner * normed).mean(-1, keepdim=True)) * rsigma[:, None]
    return [(dx + add.float()).to(x.dtype), (dz.float() * normed).sum(0).to(gamma.dtype)]


def _gamma(weight: Tensor, zero_centered: bool) -> Tensor:
    return weight.float() + 1 if zero_centered else weight.float()

"""The multi-tensor kernels of TE's optimizers, and those of gradient scaling and clipping.

`tensor_lists[i][j]` is the j-th tensor of the i-th kind (gradients, parameters, moments, ...). Work is in fp32.
`noop_flag`, an int32 of one element, is set to 1 by the scaling kernels where a gradient is not finite. SGD and the
capturable Adam then change nothing; the other kinds of Adam do not read it.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_on_cpu.transformer_engine.enums import TORCH_DTYPES
from megatron_on_cpu.transformer_engine.parameters import taking
from megatron_on_cpu.transformer_engine.quantisation.scales import amax_of

Lists = list[list[Tensor]]
# `mode` 0 adds the weight decay to the gradient, 1 decouples it (AdamW).
_OF_ADAM = "chunk_size noop_flag tensor_lists lr beta1 beta2 epsilon step mode bias_correction weight_decay"


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float | Tensor) -> None:
    """Write the first list times `scale` into the second list; set `noop_flag` where a number is not finite."""
    for source, target in zip(*tensor_lists, strict=True):
        scaled = source.float() * scale
        _flag_if_not_finite(noop_flag, source)
        target.copy_(scaled)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor_python: bool | None = None
) -> tuple[Tensor, Tensor]:
    """Return in fp32 the norm of all tensors together, `[1]`, and of each tensor if `per_tensor_python`, else empty."""
    squares = torch.stack([t.float().square().sum() for t in tensor_lists[0]] or [torch.zeros(())])
    return squares.sum().sqrt().view(1), squares.sqrt() if per_tensor_python else torch.empty(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor_python: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """Return norms as `multi_tensor_l2norm`, times `inv_scale`; set `noop_flag` where a number is not finite."""
    for tensor in tensor_lists[0]:
        _flag_if_not_finite(noop_flag, tensor)
    total, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor_python)
    return total * inv_scale, each * inv_scale


@taking(_OF_ADAM)
def multi_tensor_adam(given: Any) -> None:
    """Make a step of Adam on [gradients, parameters, first moments, second moments, maybe fp32 main parameters]."""
    for grad, parameter, first, second, *master in _elements(given.tensor_lists):
        updated = _adam(grad.float(), [parameter, *master][-1].float(), first, second, given)
        for tensor in (*master, parameter):
            tensor.copy_(updated)


@taking(_OF_ADAM)
def multi_tensor_adam_param_remainder(given: Any) -> None:
    """Make a step of Adam on bf16 parameters; the fifth list has the lower halves of fp32 main parameters, as int16.

    The upper half of a main parameter is the bits of the bf16 parameter, less one where the lower half is negative,
    since bf16 parameters are rounded, not truncated.
    """
    for grad, parameter, first, second, lower in _elements(given.tensor_lists):
        low = lower.to(torch.int32)
        high = parameter.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
        master = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
        bits = _adam(grad.float(), master, first, second, given).view(torch.int32)
        low = bits.to(torch.int16)
        lower.copy_(low)
        high = (bits >> 16) + (low < 0).to(torch.int32)
        parameter.copy_(high.to(torch.int16).view(torch.bfloat16))


@taking(f"{_OF_ADAM} fp8_dtype")
def multi_tensor_adam_fp8(given: Any) -> None:
    """Make a step of Adam with main parameters on FP8 bytes; lists six to eight: scales, amaxes, inverse scales."""
    eight_bit = TORCH_DTYPES[given.fp8_dtype]
    largest = torch.finfo(eight_bit).max
    scales = zip(*given.tensor_lists[5:], strict=True)
    for row, (scale, amax, scale_inv) in zip(_elements(given.tensor_lists[:5]), scales, strict=True):
        grad, parameter, first, second, master = row
        updated = _adam(grad.float(), master.float(), first, second, given)
        master.copy_(updated)
        amax.copy_(torch.maximum(amax, amax_of(updated)))
        parameter.copy_((updated * scale).clamp(-largest, largest).to(eight_bit).view(torch.uint8))
        scale_inv.copy_(1 / scale)


@taking(f"{_OF_ADAM} inv_scale")
def multi_tensor_adam_capturable(given: Any) -> None:
    """Make a step of Adam with tensors for `lr` and `step`; gradients are multiplied by `inv_scale` first.

    The host reads no tensor, so that a replayed CUDA graph uses the rate, the step and the flag of its own step.
    """
    given.step, skipped = given.step.double(), given.noop_flag == 1
    for grad, parameter, first, second, *master in _elements(given.tensor_lists):
        scaled, m, v = grad.float() * given.inv_scale, first.clone(), second.clone()
        updated = _adam(scaled, [parameter, *master][-1].float(), m, v, given)
        found = [scaled, m, v, *(updated for _ in (parameter, *master))]
        for tensor, value in zip((grad, first, second, parameter, *master), found, strict=True):
            tensor.copy_(torch.where(skipped, tensor, value))


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


@taking("chunk_size noop_flag tensor_lists wd momentum dampening lr nesterov first_run wd_after_momentum scale")
def multi_tensor_sgd(given: Any) -> None:
    """Make a step of SGD on [gradients, parameters, momenta, optionally copies of the parameters in another dtype]."""
    momentum, skipped = given.momentum, given.noop_flag != 0
    for grad, parameter, moment, *copy in _elements(given.tensor_lists):
        g, p, m = grad.float() * given.scale, parameter.float(), moment.float()
        g = g if given.wd_after_momentum else g + given.wd * p
        if momentum:
            m = g if given.first_run else momentum * m + (1 - given.dampening) * g
            m = m.to(moment.dtype).float()
            g = g + momentum * m if given.nesterov else m
        g = g + given.wd * p if given.wd_after_momentum else g
        p = (p - given.lr * g).to(parameter.dtype)
        for tensor, value in (moment, m), (parameter, p), *((one, p) for one in copy):
            tensor.copy_(torch.where(skipped, tensor, value))


def _elements(tensor_lists: Lists) -> Iterator[list[Tensor]]:
    """Yield flat views of the tensors at each index, as the kernels take them: as many numbers as the gradient has.

    Moments of a sharded parameter may have the shape of the whole parameter; only their first numbers are used.
    """
    for grad, *others in zip(*tensor_lists, strict=True):
        yield [tensor.detach().as_strided((grad.numel(),), (1,)) for tensor in (grad, *others)]


def _adam(grad: Tensor, parameter: Tensor, first: Tensor, second: Tensor, given: Any) -> Tensor:
    """Return the parameter after a step, and update the moments in place."""
    beta1, beta2, decay = given.beta1, given.beta2, given.weight_decay
    grad = grad + decay * parameter if given.mode == 0 else grad
    m = beta1 * first.float() + (1 - beta1) * grad
    v = beta2 * second.float() + (1 - beta2) * grad.square()
    first.copy_(m)
    second.copy_(v)
    if given.bias_correction:
        c1, c2 = (torch.as_tensor(1 - beta**given.step).float() for beta in (beta1, beta2))
        m, v = m / c1, v / c2
    update = m / (v.sqrt() + given.epsilon)
    return parameter - given.lr * (update + decay * parameter if given.mode == 1 else update)


def _flag_if_not_finite(flag: Tensor, tensor: Tensor) -> None:
    flag.copy_(torch.where(torch.isfinite(tensor).all(), flag, 1))

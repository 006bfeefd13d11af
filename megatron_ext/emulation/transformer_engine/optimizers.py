"""The multi-tensor kernels of TE's optimizers, and those of gradient scaling and clipping.

`tensor_lists[i][j]` is the j-th tensor of the i-th kind (gradients, parameters, moments, ...). Work is in fp32.
`noop_flag`, an int32 of one element, is set where a gradient is not finite; kernels of optimizers then do nothing.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from megatron_ext.emulation.transformer_engine.enums import TORCH_DTYPES

Lists = list[list[Tensor]]
Hyper = tuple[Any, ...]  # the numbers of `_OF_ADAM`
_OF_ADAM = "chunk_size noop_flag tensor_lists lr beta1 beta2 epsilon step mode bias_correction weight_decay"


def multi_tensor_scale(chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, scale: float) -> None:
    """Second list = first list * scale."""
    for source, target in zip(*tensor_lists, strict=True):
        scaled = source.float() * scale
        _flag_if_not_finite(noop_flag, source)
        target.copy_(scaled)


def multi_tensor_l2norm(
    chunk_size: int, noop_flag: Tensor, tensor_lists: Lists, per_tensor_python: bool | None = None
) -> tuple[Tensor, Tensor]:
    """The norm of all tensors together, `[1]`, and that of each of them where asked for, in fp32."""
    squares = torch.stack([t.float().square().sum() for t in tensor_lists[0]] or [torch.zeros(())])
    return squares.sum().sqrt().view(1), squares.sqrt() if per_tensor_python else torch.empty(0)


def multi_tensor_unscale_l2norm(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    inv_scale: Tensor,
    per_tensor_python: bool | None = None,
) -> tuple[Tensor, Tensor]:
    """The norms of tensors multiplied by `inv_scale`, which stay as they are."""
    for tensor in tensor_lists[0]:
        _flag_if_not_finite(noop_flag, tensor)
    total, each = multi_tensor_l2norm(chunk_size, noop_flag, tensor_lists, per_tensor_python)
    return total * inv_scale, each * inv_scale


def _adam_kernel(*more: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes kernels with the parameters that all of Adam have, and `more`, of functions of the flag, the lists, `Hyper`
    and what is more.

    `mode` 0 adds the weight decay to the gradient, 1 decouples it (AdamW).
    """
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in (*_OF_ADAM.split(), *more)])

    def decorate(update: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(update)
        def kernel(*args: Any, **kwargs: Any) -> None:
            _, noop_flag, tensor_lists, *numbers = signature.bind(*args, **kwargs).args
            end = len(numbers) - len(more)
            update(noop_flag, tensor_lists, tuple(numbers[:end]), *numbers[end:])

        kernel.__signature__ = signature  # type: ignore[attr-defined]
        return kernel

    return decorate


@_adam_kernel()
def multi_tensor_adam(noop_flag: Tensor, tensor_lists: Lists, hyper: Hyper) -> None:
    """Of [gradients, parameters, first moments, second moments] and, where there are five lists, fp32 masters."""
    for grad, parameter, first, second, *master in _elements(tensor_lists):
        updated = _adam(grad.float(), [parameter, *master][-1].float(), first, second, hyper)
        for tensor in (*master, parameter):
            tensor.copy_(updated)


@_adam_kernel()
def multi_tensor_adam_param_remainder(noop_flag: Tensor, tensor_lists: Lists, hyper: Hyper) -> None:
    """As `multi_tensor_adam` of bf16 parameters; the fifth list has the lower 16 bits of their fp32 masters, as int16.

    A master is the parameter's bits above and these below, less one in the upper half where the lower is negative:
    parameters are rounded, not cut off.
    """
    for grad, parameter, first, second, lower in _elements(tensor_lists):
        low = lower.to(torch.int32)
        high = parameter.view(torch.int16).to(torch.int32) - (low < 0).to(torch.int32)
        master = ((high << 16) | (low & 0xFFFF)).view(torch.float32)
        bits = _adam(grad.float(), master, first, second, hyper).view(torch.int32)
        low = bits.to(torch.int16)
        lower.copy_(low)
        high = (bits >> 16) + (low < 0).to(torch.int32)
        parameter.copy_(high.to(torch.int16).view(torch.bfloat16))


@_adam_kernel("fp8_dtype")
def multi_tensor_adam_fp8(noop_flag: Tensor, tensor_lists: Lists, hyper: Hyper, fp8_dtype: Any) -> None:
    """As `multi_tensor_adam` with masters; parameters are FP8 bytes, followed by scales, amaxes and inverse scales."""
    eight_bit = TORCH_DTYPES[fp8_dtype]
    largest = torch.finfo(eight_bit).max
    scales = zip(*tensor_lists[5:], strict=True)
    for row, (scale, amax, scale_inv) in zip(_elements(tensor_lists[:5]), scales, strict=True):
        grad, parameter, first, second, master = row
        updated = _adam(grad.float(), master.float(), first, second, hyper)
        master.copy_(updated)
        amax.copy_(torch.maximum(amax, updated.abs().max()))
        parameter.copy_((updated * scale).clamp(-largest, largest).to(eight_bit).view(torch.uint8))
        scale_inv.copy_(1 / scale)


@_adam_kernel("inv_scale")
def multi_tensor_adam_capturable(noop_flag: Tensor, tensor_lists: Lists, hyper: Hyper, inv_scale: Tensor) -> None:
    """As `multi_tensor_adam` with tensors for the rate and the step; gradients are multiplied by `inv_scale` first."""
    if noop_flag.item():
        return
    grads = [grad.mul_(inv_scale.to(grad.dtype)) for grad in tensor_lists[0]]
    lr, beta1, beta2, epsilon, step, *rest = hyper
    multi_tensor_adam(0, noop_flag, [grads, *tensor_lists[1:]], lr.item(), beta1, beta2, epsilon, int(step), *rest)


multi_tensor_adam_capturable_master = multi_tensor_adam_capturable


def multi_tensor_sgd(
    chunk_size: int,
    noop_flag: Tensor,
    tensor_lists: Lists,
    wd: float,
    momentum: float,
    dampening: float,
    lr: float,
    nesterov: bool,
    first_run: bool,
    wd_after_momentum: bool,
    scale: float,
) -> None:
    """Of [gradients, parameters, momenta], and a fourth list, copies of the parameters in another dtype."""
    if noop_flag.item():
        return
    for grad, parameter, moment, *copy in _elements(tensor_lists):
        g, p = grad.float() * scale, parameter.float()
        g = g if wd_after_momentum else g + wd * p
        if momentum:
            moment.copy_(g if first_run else momentum * moment.float() + (1 - dampening) * g)
            g = g + momentum * moment.float() if nesterov else moment.float()
        g = g + wd * p if wd_after_momentum else g
        for tensor in (parameter, *copy):
            tensor.copy_(p - lr * g)


def _elements(tensor_lists: Lists) -> Iterator[list[Tensor]]:
    """As the kernels see them: as many numbers as the gradient has, from where each of the other tensors begins.

    Moments of a sharded parameter are made in the shape of the whole one, and only this rank's part of them is used.
    """
    for grad, *others in zip(*tensor_lists, strict=True):
        yield [tensor.as_strided((grad.numel(),), (1,)) for tensor in (grad, *others)]


def _adam(grad: Tensor, parameter: Tensor, first: Tensor, second: Tensor, hyper: Hyper) -> Tensor:
    """The parameter after a step; the moments are updated in place."""
    lr, beta1, beta2, epsilon, step, mode, bias_correction, weight_decay = hyper
    grad = grad + weight_decay * parameter if mode == 0 else grad
    m = beta1 * first.float() + (1 - beta1) * grad
    v = beta2 * second.float() + (1 - beta2) * grad.square()
    first.copy_(m)
    second.copy_(v)
    c1, c2 = (1 - beta1**step, 1 - beta2**step) if bias_correction else (1.0, 1.0)
    update = (m / c1) / ((v / c2).sqrt() + epsilon)
    return parameter - lr * (update + weight_decay * parameter if mode == 1 else update)


def _flag_if_not_finite(flag: Tensor, tensor: Tensor) -> None:
    if not torch.isfinite(tensor).all():
        flag.fill_(1)

"""Matrix products of 16-bit operands on any CPU.

oneDNN multiplies 16-bit matrices quickly where the processor has instructions for it (AVX-512, AMX, Arm's bf16). On
others, AVX2 alone for example, PyTorch's own loops take 10 to 60 times as long as an fp32 product. There the operands
are widened to fp32 tile by tile: products of two 16-bit numbers are exact in fp32, sums are in fp32, and a result is
rounded once, where the 16-bit product rounds it. This takes three tiles of memory, 3 MiB.

oneDNN is asked once per dtype and process whether it has the instructions. `sixteen_bit_products` overrides its answer,
for tests and benchmarks; ONEDNN_MAX_CPU_ISA=AVX2 in the environment makes oneDNN itself do without them.

Legend: M rows, N columns, K the length that is summed over.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

# Edges of a tile: from 512 on the fp32 product is as quick as one of whole matrices, and widening hides behind it.
_TILE = 512

QUESTIONS = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}

_chosen: bool | None = None


def linear(x: Tensor, w_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute `torch.nn.functional.linear`, and its gradients by the same products."""
    if not _widened(x, w_ND):
        return F.linear(x, w_ND, bias_N)
    return _Linear.apply(x, w_ND, bias_N)


def mm(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor | None = None, added: Tensor | None = None) -> Tensor:
    """Compute `left @ right + added` in the operands' dtype, rounded once; in `out_MN`'s memory if given.

    `added` is a bias `[N]`, or `[M, N]`: `out_MN` itself, to add to it.
    """
    if not _widened(left_MK, right_KN):
        if added is not None and added is out_MN:
            return out_MN.addmm_(left_MK, right_KN)
        if added is not None:
            return torch.addmm(added, left_MK, right_KN, out=out_MN)
        return torch.mm(left_MK, right_KN, out=out_MN)
    shape = (left_MK.shape[0], right_KN.shape[1])
    if left_MK.shape[1] != right_KN.shape[0] or (added is not None and added.shape not in (shape, shape[1:])):
        raise ValueError(
            f"left has shape {tuple(left_MK.shape)}, right {tuple(right_KN.shape)}, added "
            f"{None if added is None else tuple(added.shape)}: they must be [M, K], [K, N] and [N] or [M, N]; pass such"
        )
    if out_MN is None:
        out_MN = left_MK.new_empty(left_MK.shape[0], right_KN.shape[1])
    if torch.compiler.is_compiling():
        torch.ops.megatron_ext.product_in_tiles(left_MK, right_KN, out_MN, added)
    else:
        _product_in_tiles(left_MK, right_KN, out_MN, added)
    return out_MN


def has_sixteen_bit_products(dtype: torch.dtype) -> bool:
    """Return whether PyTorch multiplies bf16 or fp16 matrices on CPU itself, since there are instructions for them."""
    return _asked(dtype) if _chosen is None else _chosen


# As `torch.compiler.assume_constant_result` does, without its import of torch._dynamo, which imports Triton.
has_sixteen_bit_products._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextlib.contextmanager
def sixteen_bit_products(native: bool) -> Iterator[None]:
    """Take PyTorch's products (`native`) or those in fp32 tiles in the context, whatever the processor has."""
    global _chosen
    before, _chosen = _chosen, native
    try:
        yield
    finally:
        _chosen = before


@functools.cache
def _asked(dtype: torch.dtype) -> bool:
    if not torch.backends.mkldnn.is_available():
        return False
    question = getattr(torch.ops.mkldnn, QUESTIONS[dtype], None)
    return question is None or bool(question())


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_ND: Tensor, bias_N: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w_ND)
        y_MN = mm(x.flatten(0, -2), w_ND.t(), added=bias_N)
        return y_MN.view(*x.shape[:-1], w_ND.shape[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, w_ND = ctx.saved_tensors
        needs_x, needs_w, needs_bias = ctx.needs_input_grad
        grad_MN = grad.flatten(0, -2)
        dx = mm(grad_MN, w_ND).view(x.shape) if needs_x else None
        dw_ND = mm(grad_MN.t(), x.flatten(0, -2)) if needs_w else None
        return dx, dw_ND, grad_MN.sum(0) if needs_bias else None


def _widened(left_MK: Tensor, right_KN: Tensor) -> bool:
    """Return whether operands are widened to fp32 tiles. Fake tensors, which stand for any machine, never are."""
    dtype = left_MK.dtype
    if dtype not in QUESTIONS or right_KN.dtype != dtype or left_MK.device.type != "cpu":
        return False
    return not has_sixteen_bit_products(dtype) and (torch.compiler.is_compiling() or not is_fake(left_MK))


def _product_in_tiles(left_MK: Tensor, right_KN: Tensor, out_MN: Tensor, added: Tensor | None) -> None:
    (rows, inner), columns = left_MK.shape, right_KN.shape[1]
    for n in _tiles(columns):
        # A tile of the right side that holds all of K serves every tile of rows.
        right_kn = right_KN[:, n].float() if inner <= _TILE else None
        for m in _tiles(rows):
            out_mn = out_MN[m, n]
            sum_mn = left_MK.new_empty(out_mn.shape, dtype=torch.float32)
            for k in _tiles(inner):
                right = right_KN[k, n].float() if right_kn is None else right_kn
                sum_mn.addmm_(left_MK[m, k].float(), right, beta=1.0 if k.start else 0.0)
            if not inner:
                sum_mn.zero_()
            if added is not None:
                sum_mn.add_(added[n] if added.dim() == 1 else added[m, n])
            out_mn.copy_(sum_mn)


def _tiles(size: int) -> list[slice]:
    return [slice(at, min(at + _TILE, size)) for at in range(0, size, _TILE)]


torch.library.custom_op(
    "megatron_ext::product_in_tiles", _product_in_tiles, mutates_args=("out_MN",), device_types="cpu"
).register_fake(lambda *arguments: None)

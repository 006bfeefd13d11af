"""Products of matrices with the epilogues that cuBLASLt offers, one or a group of them.

The compiled functions take matrices as column-major, as cuBLAS does. For row-major matrices the result is
`op(B) op(A)`: forward is `input weight^T`, the gradient of the input `grad weight`, of the weight `grad^T input`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_on_cpu.transformer_engine.enums import TORCH_DTYPES
from megatron_on_cpu.transformer_engine.parameters import taking
from megatron_on_cpu.transformer_engine.quantisation.tensors import (
    high_precision,
    nominal_dtype,
    quantize_into,
    quantized,
)


@taking(
    "A transA B transB D quantizer output_dtype bias bias_type gelu gelu_in grad workspace workspace_size accumulate "
    "use_split_accumulator",
    comm_overlap=None,
    comm_type=None,
    extra_output=None,
    bulk_overlap=False,
    alpha=1.0,
    beta=None,
)
def generic_gemm(given: Any) -> list[Any]:
    """Compute D = `alpha op(B) op(A) + beta D`; return [D, gradient of the bias, input of the GELU, extra output].

    Sums are in fp32 and rounded once. `beta D` is added with `accumulate` only. Forward (`grad` false) adds `bias` and
    applies the GELU. Backward multiplies the product by the GELU's derivative at `gelu_in`; the gradient of the bias is
    the sum of the result's rows, or without a GELU of the rows of B.
    """
    if given.comm_overlap is not None:
        raise NotImplementedError(
            "comm_overlap is given: user buffers (tp_comm_overlap) are not part of the CPU emulation of Transformer "
            "Engine; set tp_comm_overlap=False"
        )
    A, B, D, bias, gelu = given.A, given.B, given.D, given.bias, given.gelu
    a, b = high_precision(A, columnwise=not given.transA), high_precision(B, columnwise=given.transB)
    product = given.alpha * _product(a, given.transA, b, given.transB)
    dtype = TORCH_DTYPES[given.output_dtype] if given.output_dtype is not None else nominal_dtype(A)
    if D is not None:
        dtype = nominal_dtype(D)
    bias_gradient = before_gelu = None
    if given.grad:
        if gelu:
            product = _gelu_backward(product, given.gelu_in)
        if bias is not None:
            rows = product if gelu else b
            bias_gradient = rows.reshape(-1, rows.shape[-1]).sum(0).to(dtype)
    else:
        product = product if bias is None else product + bias.float()
        if gelu:
            low_precision = quantized(A) or quantized(B)
            before_gelu = product.to(TORCH_DTYPES[given.bias_type] if low_precision else dtype)
            product = F.gelu(before_gelu.float(), approximate="tanh")
    if given.accumulate:
        product = product + (1.0 if given.beta is None else given.beta) * high_precision(D)
    return [quantize_into(product.to(dtype), D, given.quantizer), bias_gradient, before_gelu, given.extra_output]


@taking(
    "A transa B transb D D_type m_splits bias bias_type single_output pre_gelu_out grad workspace workspaceSize "
    "accumulate use_split_accumulator math_sm_count"
)
def te_general_grouped_gemm(given: Any) -> Sequence[Tensor]:
    """Compute a product for each pair of A and B into D, or with `single_output` into consecutive rows of `D[0]`.

    Gradients of biases and inputs of the GELU are written into `bias` and `pre_gelu_out`, which have empty tensors if
    they are not wanted. Returns `bias`.
    """
    D, bias, before_gelu, grad = given.D, given.bias, given.pre_gelu_out, given.grad
    outputs = _rows_of(D[0], given.B, given.transb) if given.single_output and D is not None else D
    for i, (a, b) in enumerate(zip(given.A, given.B, strict=True)):
        out = None if outputs is None else outputs[i]
        if out is not None and out.numel() == 0:
            continue
        with_bias, gelu = bias[i].numel() > 0, before_gelu[i].numel() > 0
        operands = (a, given.transa, b, given.transb, out, None, given.D_type)
        epilogue = (bias[i] if with_bias else None, given.bias_type, gelu, before_gelu[i] if gelu else None, grad)
        found = generic_gemm(*operands, *epilogue, None, 0, given.accumulate, given.use_split_accumulator)
        if grad and with_bias:
            bias[i].copy_(found[1])
        if gelu and not grad:
            before_gelu[i].copy_(found[2])
    return bias


def _product(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool) -> Tensor:
    """Multiply in fp32; the leading dims of `b` stay if `b` is not transposed."""
    rows_a = a.reshape(-1, a.shape[-1])
    right = rows_a.t() if transpose_a else rows_a
    return b.reshape(-1, b.shape[-1]).t() @ right if transpose_b else b @ right


def _rows_of(out: Tensor, B: Sequence[Any], transposed: bool) -> Sequence[Tensor]:
    """Return the rows of `out` for each product; TE's storages of quantised data have a size, but no shape."""
    sizes = [b.size() for b in B]
    rows = [size[-1] if transposed else math.prod(size[:-1]) for size in sizes]
    return out.view(-1, out.shape[-1])[: sum(rows)].split(rows)


def _gelu_backward(gradient: Tensor, gelu_in: Tensor | None) -> Tensor:
    if gelu_in is None:
        raise ValueError("gelu_in is None: the backward of GELU needs its input; pass gelu_in")
    with torch.enable_grad():
        x = gelu_in.detach().float().requires_grad_()
        return torch.autograd.grad(F.gelu(x, approximate="tanh"), x, gradient)[0]

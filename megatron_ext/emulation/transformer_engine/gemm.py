"""Products of matrices with the epilogues that cuBLASLt offers, one or a group of them.

The compiled functions count in columns as cuBLAS does. Read in rows, the result is `op(B) op(A)`: forward is
`input weight^T`, the gradient of the input `grad weight`, that of the weight `grad^T input`.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_ext.emulation.transformer_engine.enums import TORCH_DTYPES
from megatron_ext.emulation.transformer_engine.quantisation.tensors import (
    high_precision,
    nominal_dtype,
    quantize_into,
    quantized,
)


def generic_gemm(
    A: Any,
    transA: bool,
    B: Any,
    transB: bool,
    D: Any,
    quantizer: Any,
    output_dtype: Any,
    bias: Tensor | None,
    bias_type: Any,
    gelu: bool,
    gelu_in: Tensor | None,
    grad: bool,
    workspace: Any,
    workspace_size: int,
    accumulate: bool,
    use_split_accumulator: bool,
    comm_overlap: Any = None,
    comm_type: Any = None,
    extra_output: Tensor | None = None,
    bulk_overlap: bool = False,
    alpha: float = 1.0,
    beta: float | None = None,
) -> list[Any]:
    """`alpha op(B) op(A) + beta D`, as [D, gradient of the bias, input of the GELU, extra output].

    Sums are in fp32 and rounded once. Forward (`grad` false) adds `bias` and applies the GELU; backward sums the
    gradient of the bias over the rows of B, and multiplies by the GELU's derivative at `gelu_in`.
    """
    if comm_overlap is not None:
        raise NotImplementedError(
            "comm_overlap is given: user buffers (tp_comm_overlap) are not part of the CPU emulation of Transformer "
            "Engine; set tp_comm_overlap=False"
        )
    a, b = high_precision(A, columnwise=not transA), high_precision(B, columnwise=transB)
    product = alpha * _product(a, transA, b, transB)
    dtype = TORCH_DTYPES[output_dtype] if output_dtype is not None else nominal_dtype(A)
    if D is not None:
        dtype = nominal_dtype(D)
    bias_gradient = before_gelu = None
    if grad:
        if gelu:
            product = _gelu_backward(product, gelu_in)
        if bias is not None:
            rows = product if gelu else b
            bias_gradient = rows.reshape(-1, rows.shape[-1]).sum(0).to(dtype)
    else:
        product = product if bias is None else product + bias.float()
        if gelu:
            low_precision = quantized(A) or quantized(B)
            before_gelu = product.to(TORCH_DTYPES[bias_type] if low_precision else dtype)
            product = F.gelu(before_gelu.float(), approximate="tanh")
    if accumulate:
        product = product + (1.0 if beta is None else beta) * high_precision(D)
    return [quantize_into(product.to(dtype), D, quantizer), bias_gradient, before_gelu, extra_output]


def te_general_grouped_gemm(
    A: Sequence[Any],
    transa: bool,
    B: Sequence[Any],
    transb: bool,
    D: Sequence[Tensor] | None,
    D_type: Any,
    m_splits: Sequence[int],
    bias: Sequence[Tensor],
    bias_type: Any,
    single_output: bool,
    pre_gelu_out: Sequence[Tensor],
    grad: bool,
    workspace: Any,
    workspaceSize: int,
    accumulate: bool,
    use_split_accumulator: bool,
    math_sm_count: int,
) -> Sequence[Tensor]:
    """As many products as there are A and B; with `single_output` their rows stand below each other in `D[0]`.

    Gradients of biases and inputs of the GELU are written into `bias` and `pre_gelu_out`, empty tensors where not
    wanted.
    """
    outputs = _rows_of(D[0], B, transb) if single_output and D is not None else D
    for i, (a, b) in enumerate(zip(A, B, strict=True)):
        out = None if outputs is None else outputs[i]
        if out is not None and out.numel() == 0:
            continue
        with_bias, gelu = bias[i].numel() > 0, pre_gelu_out[i].numel() > 0
        found = generic_gemm(
            *(a, transa, b, transb, out, None, D_type, bias[i] if with_bias else None, bias_type),
            *(gelu, pre_gelu_out[i] if gelu else None, grad, None, 0, accumulate, use_split_accumulator),
        )
        if grad and with_bias:
            bias[i].copy_(found[1])
        if gelu and not grad:
            pre_gelu_out[i].copy_(found[2])
    return bias


def _product(a: Tensor, transpose_a: bool, b: Tensor, transpose_b: bool) -> Tensor:
    """In fp32. Leading dims of `b` stay where it is not transposed."""
    rows_a = a.reshape(-1, a.shape[-1])
    right = rows_a.t() if transpose_a else rows_a
    return b.reshape(-1, b.shape[-1]).t() @ right if transpose_b else b @ right


def _rows_of(out: Tensor, B: Sequence[Any], transposed: bool) -> Sequence[Tensor]:
    """The part of `out` that belongs to each product."""
    rows = [b.shape[-1] if transposed else b.shape[:-1].numel() for b in B]
    return out.view(-1, out.shape[-1])[: sum(rows)].split(rows)


def _gelu_backward(gradient: Tensor, gelu_in: Tensor | None) -> Tensor:
    if gelu_in is None:
        raise ValueError("gelu_in is None: the backward of the GELU needs what went into it; pass it")
    with torch.enable_grad():
        x = gelu_in.detach().float().requires_grad_()
        return torch.autograd.grad(F.gelu(x, approximate="tanh"), x, gradient)[0]

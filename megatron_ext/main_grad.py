"""Weight gradients straight into fp32 `main_grad`, by Megatron-Core's protocol and without Apex.

Megatron's DDP and optimizers give each parameter an fp32 buffer `main_grad`, which collects the gradients of all
micro-batches. With gradient accumulation fusion a layer's backward itself adds the weight gradient there, sets
`weight.grad_added_to_main_grad = True`, and returns a dummy gradient so that autograd's hooks still fire: zeros if
`weight.zero_out_wgrad` is set (a weight that two layers share), else uninitialised memory.

PyTorch's matmul does the addition, as Apex's kernels do. On GPUs the dummy is Transformer Engine's, if that is
imported, as in Megatron.
"""

import sys

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.torch_version import TorchVersion

from megatron_ext.numerics import cpu_products

# torch before 2.13 cannot trace `addmm` with `out_dtype`.
_FAKES_SUMS = TorchVersion(torch.__version__) >= "2.13"


def buffer_of(weight: Tensor) -> Tensor:
    """Return the tensor that collects `weight`'s gradient. Raises ValueError if there is none."""
    main_grad = weight.get_main_grad() if hasattr(weight, "get_main_grad") else getattr(weight, "main_grad", None)
    if main_grad is None:
        raise ValueError(
            "gradient_accumulation_fusion=True but weight.main_grad is missing: the fusion adds the weight gradient "
            "into it; wrap the model in Megatron's DistributedDataParallel, or turn gradient_accumulation_fusion off"
        )
    return main_grad


def add_product(out_ND: Tensor, left_TN: Tensor, right_TD: Tensor) -> None:
    """Compute `out += left.T @ right` in place, accumulated in `out`'s dtype.

    On CUDA 16-bit operands go through one GEMM with fp32 output. The CPU has no such GEMM: there the product is rounded
    to 16 bits once, and added in `out`'s dtype.
    """
    if left_TN.dtype == out_ND.dtype:
        cpu_products.mm(left_TN.t(), right_TD, out_ND, added=out_ND)
    elif left_TN.is_cuda and left_TN.element_size() == 2 and out_ND.dtype == torch.float32:
        if torch.compiler.is_compiling() or (is_fake(out_ND) and not _FAKES_SUMS):
            out_ND.add_(torch.mm(left_TN.t(), right_TD, out_dtype=torch.float32))
        else:
            torch.addmm(out_ND, left_TN.t(), right_TD, out_dtype=torch.float32, out=out_ND)
    else:
        out_ND.add_(cpu_products.mm(left_TN.t(), right_TD))


def promise(weight: Tensor) -> None:
    """Set, in forward, marks that backward would set too late (shared weights) or cannot set (compiled backward)."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return
    if weight.requires_grad and torch.is_grad_enabled():
        _keep_gradients_of_lookups(weight)  # before any backward, so that each backward returns zeros as its dummy
        if torch.compiler.is_compiling():  # a compiled backward cannot set attributes
            weight.grad_added_to_main_grad = True


def finish(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Tell Megatron that the gradient was added, and return the dummy that backward returns for `weight`.

    The dummy is None for a weight without the attribute `grad_added_to_main_grad`: Megatron has no hook on it.
    """
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    if not torch.compiler.is_compiling():  # in compiled code `promise` has set the marks
        weight.grad_added_to_main_grad = True
        _keep_gradients_of_lookups(weight)
    zero = bool(getattr(weight, "zero_out_wgrad", False))
    lend = getattr(sys.modules.get("transformer_engine.pytorch.module.base"), "get_dummy_wgrad", None)
    if lend is not None and weight.is_cuda and weight.dim() == 2 and not torch.compiler.is_compiling():
        return lend(list(weight.shape), dtype, zero=zero)
    make = torch.zeros if zero else torch.empty
    return make(weight.shape, dtype=dtype, device=weight.device, requires_grad=False)


def _keep_gradients_of_lookups(weight: Tensor) -> None:
    """Have Megatron also add autograd's gradient of a weight that pipeline stages share: a stage may embed tokens.

    With multi-token prediction the last stage does. No other mark tells Megatron so in all its versions.
    """
    if getattr(weight, "shared_embedding", False):
        weight.zero_out_wgrad = True  # type: ignore[attr-defined]

"""`RowPasses`, the passes over rows that the head is made of, and which of its instances a tensor takes.

PyTorch's instance is the definition; Triton's gives the same results on CUDA. With TRITON_INTERPRET=1 in the
environment, Triton's own switch for running kernels on CPU, CPU tensors take Triton's passes too: slow, and the same
code as on CUDA.

`torch.compile` sees each pass over logits, dx or dW as one operator, `torch.ops.megatron_ext.row_statistics` and so on,
and leaves it whole: what is compiled runs the same code as what is not. What is made of a few numbers per token it
compiles itself, from the plain functions, and so it does the passes of top-k and top-p, which are slower then.
"""

import functools
import importlib
import importlib.util
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call import logit_gradient, statistics
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import MAX, SUM_EXP, Statistics
from megatron_ext.head.row_passes import fixed_order_sums, fused_products, label_terms, logit_passes, nucleus, selection
from megatron_ext.numerics.readable_values import has_values


class RowPasses:
    """The passes over rows in plain PyTorch, which is their definition; another instance has other functions.

    `logit_passes`, `fused_products`, `label_terms`, `statistics`, `logit_gradient`, `nucleus`, `selection` and
    `fixed_order_sums` say what each of them takes.
    """

    row_statistics = staticmethod(logit_passes.row_statistics)
    row_gradient = staticmethod(logit_passes.row_gradient)
    product_statistics = staticmethod(fused_products.product_statistics)
    product_gradient = staticmethod(fused_products.product_gradient)
    add_label_rows = staticmethod(label_terms.add_label_rows)
    finish_dx = staticmethod(label_terms.finish_dx)
    scale_rows = staticmethod(label_terms.scale_rows)
    combined = staticmethod(statistics.combine)
    token_gradient = staticmethod(logit_gradient.token_gradient)
    nucleus = staticmethod(nucleus.nucleus)
    group_maxima = staticmethod(selection.group_maxima)
    first_columns = staticmethod(selection.first_columns)
    equal_counts = staticmethod(selection.equal_counts)
    add_at_equals = staticmethod(selection.add_at_equals)
    row_sums = staticmethod(fixed_order_sums.row_sums)
    segment_sums = staticmethod(fixed_order_sums.segment_sums)


PYTORCH = RowPasses()


def passes_of(x: Tensor) -> RowPasses:
    """Triton's passes for real CUDA tensors, PyTorch's for others; while compiling the operators."""
    if torch.compiler.is_compiling():
        return _OPERATORS
    if not has_values(x) or x.is_cuda == _interpreted():
        return PYTORCH
    return triton_passes() or _without_triton()


@functools.cache
def _interpreted() -> bool:
    """Return whether Triton runs kernels on CPU tensors, as it decides when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def triton_passes() -> RowPasses | None:
    """The passes in Triton; None where it is not installed, or has no device."""
    if importlib.util.find_spec("triton") is None or (torch.version.cuda is None and not _interpreted()):
        return None
    found: RowPasses = importlib.import_module("megatron_ext.head.kernels.triton_passes").TRITON
    return found


@functools.cache
def _without_triton() -> RowPasses:
    """PyTorch's passes on a GPU; said once."""
    missing = "Triton is not installed" if importlib.util.find_spec("triton") is None else "this torch is not for CUDA"
    warnings.warn(
        f"{missing}: the head reads each row of logits in several passes of plain PyTorch instead of one kernel; the "
        f"results are the same",
        stacklevel=2,
    )
    return PYTORCH


def _operator(name: str, plain: Callable[..., None], written: tuple[str, ...]) -> Any:
    """An operator of a pass, by its own annotations. Its fake does nothing: a pass returns nothing."""

    @functools.wraps(plain)
    def run(x: Tensor, *arguments: Tensor, **options: Any) -> None:
        getattr(passes_of(x), name)(x, *arguments, **options)

    operator = torch.library.custom_op(f"megatron_ext::{name}", run, mutates_args=written)
    operator.register_fake(lambda *arguments, **options: None)
    return staticmethod(getattr(torch.ops.megatron_ext, name))


class _OperatorPasses(RowPasses):
    """The passes as torch's compiler sees them."""

    row_statistics = _operator("row_statistics", logit_passes.row_statistics, ("stats_KT", "exp_TV", "shift_T"))
    row_gradient = _operator("row_gradient", logit_passes.row_gradient, ("out_TV",))
    product_statistics = _operator(
        "product_statistics", fused_products.product_statistics, ("stats_KT", "shift_T", "exp_TV")
    )
    product_gradient = _operator("product_gradient", fused_products.product_gradient, ("out_TV",))
    add_label_rows = _operator("add_label_rows", label_terms.add_label_rows, ("out_VD",))
    finish_dx = _operator("finish_dx", label_terms.finish_dx, ("out_TD",))
    scale_rows = _operator("scale_rows", label_terms.scale_rows, ("out_TD",))


_OPERATORS = _OperatorPasses()


def in_engine_order(call: ResolvedHead, x_TD: Tensor) -> bool:
    """Return whether log-probabilities have the bits of inference engines' batch-invariant kernels, and of Megatron's.

    Logits have those bits already: both products sum in steps of the same size, one after the other. What is left is
    the softmax: the order of its sums, and that its logarithm and both differences are rounded to fp32. Over several
    ranks each shard has sums of its own, which are joined as always: an engine gathers its logits first.
    """
    return call.rounds and call.bits == "batch" and x_TD.is_cuda


def write_engine_sums(z_tV: Tensor, stats_Kt: Tensor, bias_V: Tensor | None, counted: int, call: ResolvedHead) -> None:
    """Sums of exponentials in an engine's order, over those in `stats_Kt`."""
    _kernels().write_sums(z_tV, stats_Kt, bias_V, counted, call.softcap, call.temperature)


def engine_combined(stats_RKT: Tensor, own_KT: Tensor, shift_T: Tensor, call: ResolvedHead, like: Tensor) -> Statistics:
    """`statistics.combine`, of a whole vocabulary with an engine's roundings, in fp32, where they apply."""
    stats = statistics.combine(stats_RKT, own_KT, shift_T, call)
    if len(stats_RKT) > 1 or not in_engine_order(call, like):
        return stats
    total_T = stats_RKT[0, SUM_EXP, :-1].masked_fill(stats_RKT[0, MAX, :-1] == -torch.inf, 1.0)
    return stats._replace(log_sum=_kernels().log(total_T).double(), target=stats.target.float().double())


def _kernels() -> Any:
    return importlib.import_module("megatron_ext.head.kernels.engine_softmax")

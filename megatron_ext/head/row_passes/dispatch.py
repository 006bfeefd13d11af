"""Chooses between Triton's passes (CUDA) and those in plain PyTorch: same arguments, same results.

With TRITON_INTERPRET=1 in the environment, Triton's own switch for running kernels on CPU, CPU tensors take Triton's
passes too: slow, and the same code as on CUDA.

`torch.compile` sees each pass over logits, dx or dW as one operator, `torch.ops.megatron_ext.row_statistics` and so on,
and leaves it whole: what is compiled runs the same code as what is not. What is made of a few numbers per token it
compiles itself, from the plain functions, and so it does the passes of top-k and top-p, which are slower then.
"""

import functools
import importlib
import importlib.util
import os
import warnings
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.engine.statistics import Statistics
from megatron_ext.head.row_passes import fixed_order_sums, label_terms, logit_passes, selection, token_terms
from megatron_ext.head.row_passes import nucleus as nucleus_pass
from megatron_ext.numerics.readable_values import has_values


def row_statistics(z_TV: Tensor, *arguments: Any) -> None:
    """See `logit_passes.row_statistics`."""
    _run(logit_passes, "row_statistics", z_TV, *arguments)


def row_gradient(source_TV: Tensor, *arguments: Any) -> None:
    """See `logit_passes.row_gradient`."""
    _run(logit_passes, "row_gradient", source_TV, *arguments)


def add_label_rows(out_VD: Tensor, *arguments: Any) -> None:
    """See `label_terms.add_label_rows`."""
    _run(label_terms, "add_label_rows", out_VD, *arguments)


def finish_dx(out_TD: Tensor, *arguments: Any) -> None:
    """See `label_terms.finish_dx`."""
    _run(label_terms, "finish_dx", out_TD, *arguments)


def scale_rows(out_TD: Tensor, *arguments: Any) -> None:
    """See `label_terms.scale_rows`."""
    _run(label_terms, "scale_rows", out_TD, *arguments)


def nucleus(z_TV: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """See `nucleus.nucleus`."""
    return _side(z_TV, nucleus_pass).nucleus(z_TV, *arguments)


def group_maxima(z_TV: Tensor, *arguments: Any) -> Tensor:
    """See `selection.group_maxima`."""
    return _side(z_TV, selection).group_maxima(z_TV, *arguments)


def first_columns(z_TV: Tensor, *arguments: Any) -> Tensor:
    """See `selection.first_columns`."""
    return _side(z_TV, selection).first_columns(z_TV, *arguments)


def equal_counts(z_TV: Tensor, *arguments: Any) -> Tensor:
    """See `selection.equal_counts`."""
    return _side(z_TV, selection).equal_counts(z_TV, *arguments)


def add_at_equals(out_TV: Tensor, *arguments: Any) -> None:
    """See `selection.add_at_equals`."""
    _side(out_TV, selection).add_at_equals(out_TV, *arguments)


def row_sums(x_TN: Tensor) -> Tensor:
    """See `fixed_order_sums.row_sums`."""
    return _side(x_TN, fixed_order_sums).row_sums(x_TN)


def segment_sums(x_n: Tensor, lengths_T: Tensor) -> Tensor:
    """See `fixed_order_sums.segment_sums`."""
    return _side(x_n, fixed_order_sums).segment_sums(x_n, lengths_T)


def combined(stats_RKT: Tensor, *arguments: Any) -> Statistics:
    """See `token_terms.combined`."""
    return _side(stats_RKT, token_terms).combined(stats_RKT, *arguments)


def token_gradient(stats: Statistics, *arguments: Any) -> token_terms.Gradient:
    """See `token_terms.token_gradient`."""
    return _side(stats.shift, token_terms).token_gradient(stats, *arguments)


def _run(plain: ModuleType, name: str, x: Tensor, *arguments: Any) -> None:
    side = torch.ops.megatron_ext if torch.compiler.is_compiling() else _side(x, plain)
    getattr(side, name)(x, *arguments)


def _side(x: Tensor, plain: ModuleType) -> ModuleType:
    """Triton's twin of a module for real CUDA tensors, the module itself for others."""
    if not has_values(x) or x.is_cuda == _interpreted():
        return plain
    return _twin(plain) or _without_triton(plain)


@functools.cache
def _interpreted() -> bool:
    """Whether Triton runs kernels on CPU tensors, as it decides when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@functools.cache
def _twin(plain: ModuleType) -> ModuleType | None:
    if importlib.util.find_spec("triton") is None or (torch.version.cuda is None and not _interpreted()):
        return None
    return importlib.import_module(plain.__name__.replace(".row_passes.", ".kernels."))


@functools.cache
def _say_it_is_slower() -> None:
    missing = "Triton is not installed" if importlib.util.find_spec("triton") is None else "this torch is not for CUDA"
    warnings.warn(
        f"{missing}: the head reads each row of logits in several passes of plain PyTorch instead of one kernel; the "
        f"results are the same",
        stacklevel=2,
    )


def _without_triton(plain: ModuleType) -> ModuleType:
    """The module itself, on a GPU; said once."""
    _say_it_is_slower()
    return plain


def _operator(plain: ModuleType, name: str, written: tuple[str, ...]) -> None:
    """Makes an operator of a pass, from its own annotations. Its fake does nothing: a pass returns nothing."""

    @functools.wraps(getattr(plain, name))
    def run(x: Tensor, *arguments: Any) -> None:
        getattr(_side(x, plain), name)(x, *arguments)

    operator = torch.library.custom_op(f"megatron_ext::{name}", run, mutates_args=written)
    operator.register_fake(lambda *arguments: None)


_operator(logit_passes, "row_statistics", written=("stats_KT", "exp_TV", "shift_T"))
_operator(logit_passes, "row_gradient", written=("out_TV",))
_operator(label_terms, "add_label_rows", written=("out_VD",))
_operator(label_terms, "finish_dx", written=("out_TD",))
_operator(label_terms, "scale_rows", written=("out_TD",))

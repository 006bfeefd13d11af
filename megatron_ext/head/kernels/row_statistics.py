"""`row_statistics` in Triton: the same arguments and results as in `megatron_ext.head.row_passes.passes`. One program
has one token, `T` of them in all."""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import kernel_options, rowwise, writable
from megatron_ext.head.kernels.long_rows import long_row_kernel
from megatron_ext.head.kernels.whole_rows import whole_row_kernel
from megatron_ext.numerics.launches import launch


def row_statistics(
    z_TV: Tensor,
    target_T: Tensor,
    stats_KT: Tensor,
    exp_TV: Tensor | None = None,
    shift_T: Tensor | None = None,
    **options: Any,
) -> None:
    """Each row's statistics and exponentials in one launch. See `row_passes/passes.py`."""
    (tokens, columns), z_TV = z_TV.shape, rowwise(z_TV)
    more = any(options.get(name) is not None for name in ("bias_V", "softcap"))
    more = more or any(options.get(name) for name in ("with_mean", "with_entropy", "with_hits"))
    double, kept = stats_KT.dtype == torch.float64, None if exp_TV is None else writable(exp_TV)
    kept_columns = 0 if kept is None else kept.shape[1]
    sizes = blocks.whole_row(columns, options["counted"], more, double)
    constants, warps = blocks.long_row(more, double) if sizes is None else sizes
    if sizes is None:
        constants["SAMPLED"] = kept is not None and (z_TV.dtype, kept.dtype) == (torch.float32, torch.bfloat16)
    else:
        constants["FIRST_KEPT"] = constants["FIRST"] <= kept_columns
    launch(
        long_row_kernel if sizes is None else whole_row_kernel,
        (tokens,),
        z_TV,
        target_T.contiguous(),
        writable(stats_KT),
        kept,
        shift_T,
        z_TV.stride(0),
        stats_KT.stride(0),
        0 if kept is None else kept.stride(0),
        kept_columns,
        num_warps=warps,
        **constants,
        **kernel_options(**options),
    )

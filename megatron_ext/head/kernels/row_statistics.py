"""`row_statistics` in Triton: the same arguments and results as in `megatron_ext.head.row_passes.passes`.

One program has one token, `T` of them in all. Offsets are 64-bit: T * V/R may pass 2^31. Nothing is read back to the
host and nothing is allocated, so it can be captured in a CUDA graph.
"""

import torch
from torch import Tensor

from megatron_ext.head.kernels import blocks
from megatron_ext.head.kernels.logits import packed, rowwise, writable
from megatron_ext.head.kernels.long_rows import long_row_kernel
from megatron_ext.head.kernels.whole_rows import whole_row_kernel
from megatron_ext.numerics.launches import launch


def row_statistics(
    z_TV: Tensor,
    target_T: Tensor,
    stats_KT: Tensor,
    exp_TV: Tensor | None = None,
    shift_T: Tensor | None = None,
    bias_V: Tensor | None = None,
    *,
    counted: int,
    softcap: float | None = None,
    temperature: float = 1.0,
    with_mean: bool = False,
    with_entropy: bool = False,
    with_hits: bool = False,
    labelled: bool = False,
) -> None:
    """Each row's statistics and exponentials in one launch. See `row_passes/passes.py`."""
    tokens, columns = z_TV.shape
    z_TV = rowwise(z_TV)
    more = bias_V is not None or softcap is not None or with_mean or with_entropy or with_hits
    double = stats_KT.dtype == torch.float64
    sizes = blocks.whole_row(columns, counted, more, double)
    kernel = long_row_kernel if sizes is None else whole_row_kernel
    constants, warps = blocks.long_row(more, double) if sizes is None else sizes
    kept = None if exp_TV is None else writable(exp_TV)
    kept_columns = 0 if kept is None else kept.shape[1]
    if sizes is None:
        constants["SAMPLED"] = kept is not None and (z_TV.dtype, kept.dtype) == (torch.float32, torch.bfloat16)
    else:
        constants["FIRST_KEPT"] = constants["FIRST"] <= kept_columns
    launch(
        kernel,
        (tokens,),
        z_TV,
        target_T,
        stats_KT,
        kept,
        shift_T,
        packed(bias_V),
        z_TV.stride(0),
        target_T.stride(0),
        stats_KT.stride(0),
        stats_KT.stride(1),
        0 if kept is None else kept.stride(0),
        kept_columns,
        counted,
        1.0 if softcap is None else softcap,
        temperature,
        HAS_SOFTCAP=softcap is not None,
        HAS_TEMPERATURE=temperature != 1.0,
        WITH_MEAN=with_mean,
        WITH_ENTROPY=with_entropy,
        WITH_HITS=with_hits,
        **constants,
        num_warps=warps,
    )

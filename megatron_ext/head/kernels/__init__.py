"""The passes over rows in Triton: twins of the functions in `row_passes/`, whose `passes.py` chooses. No autograd.

A kernel's docstring gives the shape of each tensor whose pointer the kernel takes. Neighbouring columns of a tensor are
adjacent in memory; a pointer is None if there is no such tensor. `..._stride` is the number of elements from one row to
the next (`..._stride_r` and the like: along the dim R, K, T, ...). Shapes have the letters of `row_passes/`. Capitals
are constants that a kernel is compiled for: BLOCK..., LANES, STEPS and the like count what a program takes at a time;
HAS_... is whether the option is set.

Offsets are 64-bit: T * V/R may pass 2^31. The two passes over logits read nothing back to the host and allocate
nothing, so they can be captured in a CUDA graph.
"""

from megatron_ext.head.kernels import label_terms, nucleus, selection, token_ids, token_terms
from megatron_ext.head.kernels.epilogues.gradient import product_gradient
from megatron_ext.head.kernels.epilogues.statistics import product_statistics
from megatron_ext.head.kernels.exchange_checks import check_exchange
from megatron_ext.head.kernels.fixed_order_sums import row_sums, segment_sums
from megatron_ext.head.kernels.row_gradient import row_gradient
from megatron_ext.head.kernels.row_statistics import row_statistics
from megatron_ext.head.row_passes.passes import RowPasses

# The instance for CUDA: each pass is one launch, or a few.
TRITON = RowPasses(
    row_statistics,
    row_gradient,
    product_statistics,
    product_gradient,
    label_terms.add_label_rows,
    label_terms.finish_dx,
    label_terms.scale_rows,
    token_ids.ids_exist,
    token_ids.columns_of,
    token_ids.labels_checksum,
    check_exchange,
    token_terms.combined,
    token_terms.token_gradient,
    nucleus.nucleus,
    selection.group_maxima,
    selection.first_columns,
    selection.equal_counts,
    selection.add_at_equals,
    row_sums,
    segment_sums,
)

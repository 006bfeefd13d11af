"""The passes over rows in Triton: the instance of `row_passes.passes.RowPasses` for CUDA."""

from megatron_ext.head.kernels import label_terms, nucleus, selection, token_terms
from megatron_ext.head.kernels.epilogues.gradient import product_gradient
from megatron_ext.head.kernels.epilogues.statistics import product_statistics
from megatron_ext.head.kernels.exchange_checks import check_exchange
from megatron_ext.head.kernels.fixed_order_sums import row_sums, segment_sums
from megatron_ext.head.kernels.row_gradient import row_gradient
from megatron_ext.head.kernels.statistics.row_statistics import row_statistics
from megatron_ext.head.row_passes.passes import RowPasses


class _TritonPasses(RowPasses):
    """Each pass is one launch, or a few."""

    row_statistics = staticmethod(row_statistics)
    row_gradient = staticmethod(row_gradient)
    product_statistics = staticmethod(product_statistics)
    product_gradient = staticmethod(product_gradient)
    add_label_rows = staticmethod(label_terms.add_label_rows)
    finish_dx = staticmethod(label_terms.finish_dx)
    scale_rows = staticmethod(label_terms.scale_rows)
    check_exchange = staticmethod(check_exchange)
    combined = staticmethod(token_terms.combined)
    token_gradient = staticmethod(token_terms.token_gradient)
    nucleus = staticmethod(nucleus.nucleus)
    group_maxima = staticmethod(selection.group_maxima)
    first_columns = staticmethod(selection.first_columns)
    equal_counts = staticmethod(selection.equal_counts)
    add_at_equals = staticmethod(selection.add_at_equals)
    row_sums = staticmethod(row_sums)
    segment_sums = staticmethod(segment_sums)


TRITON = _TritonPasses()

"""The Triton twin of `megatron_ext.head.row_passes.logit_passes`: the same two functions."""

from megatron_ext.head.kernels.row_gradient import row_gradient
from megatron_ext.head.kernels.statistics.row_statistics import row_statistics

__all__ = ["row_gradient", "row_statistics"]

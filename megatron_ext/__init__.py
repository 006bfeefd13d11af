"""The tensor-parallel core and the lm head of a Megatron job, right, small and fast. Imports with torch alone."""

from megatron_ext.distributed import VocabShard
from megatron_ext.head import (
    linear_cross_entropy,
    linear_log_probs,
    token_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "VocabShard",
    "linear_cross_entropy",
    "linear_log_probs",
    "token_entropy",
    "token_log_probs",
    "vocab_parallel_cross_entropy",
]

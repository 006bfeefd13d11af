"""Hidden states or logits in, per-token numbers out: one row-statistics engine, many read-outs."""

from megatron_ext.head.calls import (
    linear_cross_entropy,
    linear_log_probs,
    token_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

__all__ = [
    "linear_cross_entropy",
    "linear_log_probs",
    "token_entropy",
    "token_log_probs",
    "vocab_parallel_cross_entropy",
]

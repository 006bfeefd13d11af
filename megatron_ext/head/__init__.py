"""Hidden states or logits in, per-token numbers out: one row-statistics engine, many read-outs."""

from megatron_ext.head.cross_entropy_of_hidden_states import linear_cross_entropy, linear_log_probs
from megatron_ext.head.cross_entropy_of_logits import token_entropy, token_log_probs, vocab_parallel_cross_entropy
from megatron_ext.head.distributions_of_hidden_states import (
    linear_gather_log_probs,
    linear_kl_divergence,
    linear_sampled_log_probs,
    linear_topk_log_probs,
)
from megatron_ext.head.distributions_of_logits import (
    gather_log_probs,
    gather_logits,
    kl_divergence,
    sampled_log_probs,
    soft_cross_entropy,
    vocab_parallel_log_softmax,
    vocab_parallel_softmax,
    vocab_topk,
)
from megatron_ext.head.readouts.jensen_shannon import js_divergence, linear_js_divergence

__all__ = [
    "gather_log_probs",
    "gather_logits",
    "js_divergence",
    "kl_divergence",
    "linear_cross_entropy",
    "linear_gather_log_probs",
    "linear_js_divergence",
    "linear_kl_divergence",
    "linear_log_probs",
    "linear_sampled_log_probs",
    "linear_topk_log_probs",
    "sampled_log_probs",
    "soft_cross_entropy",
    "token_entropy",
    "token_log_probs",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_log_softmax",
    "vocab_parallel_softmax",
    "vocab_topk",
]

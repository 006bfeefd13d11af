"""Hidden states or logits in, per-token numbers out: one row-statistics engine, many read-outs."""

from megatron_ext.head.cross_entropy import (
    linear_cross_entropy,
    linear_log_probs,
    token_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)
from megatron_ext.head.distributions import (
    Sampled,
    gather_log_probs,
    gather_logits,
    js_divergence,
    kl_divergence,
    linear_gather_log_probs,
    linear_js_divergence,
    linear_kl_divergence,
    linear_sampled_log_probs,
    linear_topk_log_probs,
    sampled_log_probs,
    soft_cross_entropy,
    vocab_parallel_log_softmax,
    vocab_parallel_softmax,
    vocab_topk,
)
from megatron_ext.head.draft_vocabulary import DraftLabels, DraftVocabulary
from megatron_ext.head.lm_head import LmHead
from megatron_ext.head.logits import Logits
from megatron_ext.head.lora import LoRA
from megatron_ext.head.readouts.gather import Gather, TopK
from megatron_ext.head.readouts.kept import Kept, KeptEntropy
from megatron_ext.head.readouts.kl_divergence import KL
from megatron_ext.head.readouts.normalised_divergences import AcceptanceRate, JensenShannon, TotalVariation
from megatron_ext.head.readouts.read_out import CrossEntropy, IsArgmax, LogProbs, ReadOut
from megatron_ext.head.readouts.row_sums import Entropy, LogSumExp, MeanLogit, SumOfSquares, ZLoss
from megatron_ext.head.readouts.teacher import Teacher
from megatron_ext.numerics.batch_invariance import batch_invariant_mode

__all__ = [
    "KL",
    "AcceptanceRate",
    "CrossEntropy",
    "DraftLabels",
    "DraftVocabulary",
    "Entropy",
    "Gather",
    "IsArgmax",
    "JensenShannon",
    "Kept",
    "KeptEntropy",
    "LmHead",
    "LoRA",
    "LogProbs",
    "LogSumExp",
    "Logits",
    "MeanLogit",
    "ReadOut",
    "Sampled",
    "SumOfSquares",
    "Teacher",
    "TopK",
    "TotalVariation",
    "ZLoss",
    "batch_invariant_mode",
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

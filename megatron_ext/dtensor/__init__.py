"""transformers' models under DTensor tensor parallelism, FSDP2 and context parallelism; the names are NeMo-RL's.

`_parallelize_model` shards a model, `causal_lm_loss` and `causal_lm_log_probs` go from its tokens to a number for each
without logits, `get_grad_norm` and `clip_grad_by_total_norm_` follow backward. Importing this needs torch alone.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron_ext.dtensor.attention import use_attention
from megatron_ext.dtensor.causal_lm import (
    causal_lm_from_logits,
    causal_lm_log_probs,
    causal_lm_loss,
    causal_lm_sampled_log_probs,
    get_logprobs_from_vocab_parallel_logits,
)
from megatron_ext.dtensor.decoder import tie_word_embeddings
from megatron_ext.dtensor.gradients import clip_grad_by_total_norm_, get_grad_norm, to_local_if_dtensor
from megatron_ext.dtensor.parallelize import (
    _parallelize_gemma3,
    _parallelize_llama,
    _parallelize_model,
    _parallelize_qwen,
    parallelize_functions,
)
from megatron_ext.dtensor.plans import get_hf_tp_plan, translate_parallel_style
from megatron_ext.dtensor.styles import RotaryEmbedParallel

__all__ = [
    "PARALLIZE_FUNCTIONS",
    "RotaryEmbedParallel",
    "_parallelize_gemma3",
    "_parallelize_llama",
    "_parallelize_model",
    "_parallelize_qwen",
    "causal_lm_from_logits",
    "causal_lm_log_probs",
    "causal_lm_loss",
    "causal_lm_sampled_log_probs",
    "clip_grad_by_total_norm_",
    "get_grad_norm",
    "get_hf_tp_plan",
    "get_logprobs_from_vocab_parallel_logits",
    "tie_word_embeddings",
    "to_local_if_dtensor",
    "translate_parallel_style",
    "use_attention",
]

PARALLIZE_FUNCTIONS: dict[type, Callable[..., nn.Module]]
"""transformers' model classes and the functions that parallelize them; asking for it imports these classes."""


def __getattr__(name: str) -> Any:
    if name == "PARALLIZE_FUNCTIONS":  # its keys are classes of transformers
        return parallelize_functions()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

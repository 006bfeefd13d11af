"""transformers' models under tensor parallelism (DTensor), FSDP2 and context parallelism; their losses without logits.

`_parallelize_model` and some other names are NeMo-RL's. Importing this package needs only torch.
"""

from collections.abc import Callable
from typing import Any

from torch import nn

from megatron_ext.dtensor.attention import use_attention
from megatron_ext.dtensor.causal_lm import (
    causal_lm_from_logits,
    causal_lm_log_probs,
    causal_lm_loss,
    causal_lm_read,
    causal_lm_sampled_log_probs,
    get_logprobs_from_vocab_parallel_logits,
)
from megatron_ext.dtensor.decoder import tie_word_embeddings
from megatron_ext.dtensor.gradients import clip_grad_by_total_norm_, get_grad_norm, to_local_if_dtensor
from megatron_ext.dtensor.output.fused_loss import use_fused_loss
from megatron_ext.dtensor.output.own_loss import fused_loss_report, restore_own_loss
from megatron_ext.dtensor.parallelize import (
    _parallelize_gemma3,
    _parallelize_llama,
    _parallelize_model,
    _parallelize_qwen,
    parallelize,
    parallelize_functions,
)
from megatron_ext.dtensor.plans import get_hf_tp_plan, translate_parallel_style
from megatron_ext.dtensor.pretrained.loading import from_pretrained
from megatron_ext.dtensor.pretrained.saving import save_pretrained
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
    "causal_lm_read",
    "causal_lm_sampled_log_probs",
    "clip_grad_by_total_norm_",
    "from_pretrained",
    "fused_loss_report",
    "get_grad_norm",
    "get_hf_tp_plan",
    "get_logprobs_from_vocab_parallel_logits",
    "parallelize",
    "restore_own_loss",
    "save_pretrained",
    "tie_word_embeddings",
    "to_local_if_dtensor",
    "translate_parallel_style",
    "use_attention",
    "use_fused_loss",
]

PARALLIZE_FUNCTIONS: dict[type, Callable[..., nn.Module]]
"""transformers' model classes and the functions that parallelize them; reading the name imports these classes."""


def __getattr__(name: str) -> Any:
    if name == "PARALLIZE_FUNCTIONS":  # its keys are classes of transformers
        return parallelize_functions()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

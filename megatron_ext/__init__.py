"""The lm head and the tensor-parallel core of Megatron jobs: losses, log-probabilities and gradients without logits.

Names that need more than torch, and the subpackages, are imported at their first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron_ext.distributed import VocabShard
from megatron_ext.head import (
    Entropy,
    LmHead,
    Logits,
    LogProbs,
    TopK,
    batch_invariant_mode,
    linear_cross_entropy,
    linear_log_probs,
    token_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

if TYPE_CHECKING:
    from megatron_ext.dtensor.causal_lm import causal_lm_loss
    from megatron_ext.dtensor.output.fused_loss import use_fused_loss
    from megatron_ext.dtensor.output.own_loss import fused_loss_report, restore_own_loss
    from megatron_ext.dtensor.parallelize import parallelize
    from megatron_ext.megatron.fusion_report import fusion_report
    from megatron_ext.megatron.substitute import restore_tensor_parallel, substitute_tensor_parallel
    from megatron_ext.model_utils import (
        patch_gpt_model_forward_for_linear_ce_fusion,
        unpatch_gpt_model_forward_for_linear_ce_fusion,
    )

__version__ = "0.1.0"

__all__ = [
    "Entropy",
    "LmHead",
    "LogProbs",
    "Logits",
    "TopK",
    "VocabShard",
    "batch_invariant_mode",
    "causal_lm_loss",
    "fused_loss_report",
    "fusion_report",
    "linear_cross_entropy",
    "linear_log_probs",
    "parallelize",
    "patch_gpt_model_forward_for_linear_ce_fusion",
    "restore_own_loss",
    "restore_tensor_parallel",
    "substitute_tensor_parallel",
    "token_entropy",
    "token_log_probs",
    "unpatch_gpt_model_forward_for_linear_ce_fusion",
    "use_fused_loss",
    "vocab_parallel_cross_entropy",
]

_PACKAGES = ("dtensor", "integrations", "losses", "megatron", "model_utils", "policy", "sequence", "tensor_parallel")
_MODULES = {
    "causal_lm_loss": "dtensor",
    "fused_loss_report": "dtensor",
    "fusion_report": "megatron.fusion_report",
    "parallelize": "dtensor",
    "patch_gpt_model_forward_for_linear_ce_fusion": "model_utils",
    "restore_own_loss": "dtensor",
    "restore_tensor_parallel": "megatron.substitute",
    "substitute_tensor_parallel": "megatron.substitute",
    "unpatch_gpt_model_forward_for_linear_ce_fusion": "model_utils",
    "use_fused_loss": "dtensor",
}


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"{__name__}.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = import_module(f"{__name__}.{_MODULES[name]}")
    except ImportError as error:
        return _missing(error)
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted({*__all__, *_PACKAGES, "__version__"})


def _missing(error: ImportError) -> Any:
    """Return a stand-in for a function that cannot be imported, so that `from megatron_ext import *` does not fail."""
    message = str(error)

    def missing(*arguments: Any, **keywords: Any) -> Any:
        raise ImportError(message)

    return missing

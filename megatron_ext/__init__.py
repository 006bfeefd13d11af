"""The tensor-parallel core and the lm head of a Megatron job, right, small and fast. Imports with torch alone."""

from typing import TYPE_CHECKING, Any

from megatron_ext.distributed import VocabShard
from megatron_ext.head import (
    batch_invariant_mode,
    linear_cross_entropy,
    linear_log_probs,
    token_entropy,
    token_log_probs,
    vocab_parallel_cross_entropy,
)

if TYPE_CHECKING:
    from megatron_ext.megatron.substitute import restore_tensor_parallel, substitute_tensor_parallel

__all__ = [
    "VocabShard",
    "batch_invariant_mode",
    "linear_cross_entropy",
    "linear_log_probs",
    "restore_tensor_parallel",
    "substitute_tensor_parallel",
    "token_entropy",
    "token_log_probs",
    "vocab_parallel_cross_entropy",
]


def __getattr__(name: str) -> Any:
    """Import names that need Megatron-Core, and NeMo-RL's names, when they are asked for."""
    if name == "model_utils":
        from importlib import import_module

        return import_module(f"{__name__}.{name}")
    if name in ("restore_tensor_parallel", "substitute_tensor_parallel"):
        try:
            from megatron_ext.megatron import substitute
        except ImportError as error:
            return _missing(error)
        return getattr(substitute, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _missing(error: ImportError) -> Any:
    """In the place of a function that could not be imported, which `from megatron_ext import *` asks for too."""
    message = str(error)

    def missing(*arguments: Any, **keywords: Any) -> Any:
        raise ImportError(message)

    return missing

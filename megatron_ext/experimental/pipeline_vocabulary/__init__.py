"""Embedding and lm head shared by all pipeline stages, in Megatron's own training loop.

    from megatron_ext.experimental import pipeline_vocabulary

    pipeline_vocabulary.share_vocabulary()  # before the model is built
    ...
    pipeline_vocabulary.restore()

Models that Megatron builds from then on have their vocabulary layers cut over all stages, and the function that
`get_forward_backward_func()` returns runs them; see docs/pipeline.md.

Shapes in this folder: B batch, S sequence positions of this context-parallel rank, H hidden size, R tensor-parallel
ranks, P predictions of each position: 1, or with multi-token prediction 1 + its layers.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules
from megatron.core.transformer import multi_token_prediction as megatron_mtp

from megatron_ext.experimental.pipeline_vocabulary.paused_forward import check_installed
from megatron_ext.experimental.pipeline_vocabulary.schedule import forward_backward, recorded, sharing_of
from megatron_ext.experimental.pipeline_vocabulary.vocabulary_sharing import Builder
from megatron_ext.megatron.fused_loss import megatron_log
from megatron_ext.megatron.fused_loss.module_calls import attribute

__all__ = ["recorded", "restore", "share_vocabulary"]

_SCHEDULES = (
    "forward_backward_no_pipelining",  # trains models that were built before
    "forward_backward_pipelining_without_interleaving",
    "forward_backward_pipelining_with_interleaving",
)
_HYBRIDS = (  # since 0.18 the second one is derived from the first
    ("megatron.core.models.hybrid.hybrid_model", "HybridModel"),
    ("megatron.core.models.mamba.mamba_model", "MambaModel"),
)
_replaced: contextlib.ExitStack | None = None  # closed, it puts Megatron's functions back


def share_vocabulary() -> None:
    """Let GPT and hybrid models built from now on share embedding and output layer over all pipeline stages.

    Each of p stages x t tensor-parallel ranks holds V/(p t) rows of both, with the values that Megatron's
    initialisation gives them; losses, gradients and checkpoints (`dist_checkpointing`) are those of stock Megatron.
    Call it before the model is built; a second call does nothing more. `restore()` undoes it; models that were built
    meanwhile stay as they are and cannot be trained any more.

    Communicates: nothing. While a model is built: see `Builder.add`. While it is trained: see `stage_run`.

    Raises:
        RuntimeError: greenlet is not installed.
        ValueError: while a model is built or trained, see `Builder.add` and `schedule.forward_backward`; a language
            model of another kind is built; or a language model is trained that was built before.
    """
    global _replaced
    check_installed()
    if _replaced is not None:
        return
    _replaced, kinds = contextlib.ExitStack(), _kinds()
    builder = Builder(_replaced)

    def replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        stock = vars(owner)[name]
        _replaced.enter_context(attribute(owner, name, functools.wraps(stock)(make(stock))))

    for kind in kinds:
        replace(kind, "__init__", functools.partial(_with_sharing, builder))
    replace(LanguageModule, "__init__", functools.partial(_refusing_others, tuple(kinds)))
    if megatron_log.counts_acceptance():
        replace(megatron_mtp, megatron_log.COUNTS, megatron_log.counts_by_hits)
    for name in _SCHEDULES:
        replace(schedules, name, _or_stock)


def restore() -> None:
    """Undo `share_vocabulary`: Megatron's own functions are back. Harmless without it."""
    global _replaced
    if _replaced is not None:
        _replaced.close()
        _replaced = None


def _kinds() -> list[type]:
    """List Megatron's language models that can share their vocabulary, as far as this version has them."""
    kinds = [GPTModel]
    for module, name in _HYBRIDS:
        with contextlib.suppress(ImportError, AttributeError):
            kinds.append(getattr(importlib.import_module(module), name))
    return [kind for kind in kinds if "__init__" in vars(kind)]


def _with_sharing(builder: Builder, stock: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock(self, *args, **kwargs)
        builder.add(self)

    return init


def _refusing_others(kinds: tuple[type, ...], stock: Any) -> Any:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, kinds):
            raise ValueError(
                f"{type(self).__name__} cannot share its vocabulary over pipeline stages, GPTModel and HybridModel "
                f"can: train it without share_vocabulary() (--pipeline-vocab)"
            )
        stock(self, *args, **kwargs)

    return init


def _or_stock(stock: Any) -> Any:
    def schedule(**arguments: Any) -> Any:
        model = arguments["model"]
        if sharing_of(model) is not None:
            return forward_backward(**arguments)
        chunks = model if isinstance(model, list) else [model]
        inside = (one for chunk in chunks for one in chunk.modules() if isinstance(one, LanguageModule))
        before = next(inside, None)
        if before is not None and not arguments.get("forward_only"):
            raise ValueError(
                f"this {type(before).__name__} was built before share_vocabulary(), and does not share its vocabulary "
                f"over pipeline stages: call share_vocabulary() (--pipeline-vocab) before the model is built, or "
                f"restore() before this one is trained"
            )
        return stock(**arguments)

    return schedule

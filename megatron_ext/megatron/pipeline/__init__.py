"""Embedding and lm head shared by all pipeline stages, in Megatron's own training loop.

    from megatron_ext.megatron import pipeline

    pipeline.share_vocabulary()  # before the model is built
    ...
    pipeline.restore()

Models that Megatron builds from then on have their vocabulary layers cut over all stages, and the function that
`get_forward_backward_func()` returns runs them; see docs/pipeline.md.
"""

import functools
from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.models.gpt import GPTModel
from megatron.core.pipeline_parallel import schedules

from megatron_ext.megatron.pipeline.paused_forward import check_installed
from megatron_ext.megatron.pipeline.schedule import forward_backward, recorded, sharing_of
from megatron_ext.megatron.pipeline.sharing import Builder

__all__ = ["recorded", "restore", "share_vocabulary"]

_SCHEDULES = ("forward_backward_pipelining_without_interleaving", "forward_backward_pipelining_with_interleaving")
_stock: dict[Any, Any] = {}
_builder: Builder | None = None


def share_vocabulary() -> None:
    """GPT models built from now on share embedding and output layer over all pipeline stages.

    Each of p stages x t tensor-parallel ranks holds V/(p t) rows of both, with the values that Megatron's
    initialisation gives them; losses, gradients and checkpoints (`dist_checkpointing`) are those of stock. Call it
    before the model is built; calling it twice does nothing more. `restore()` undoes it; models that were built
    meanwhile stay as they are and cannot be trained any more.

    Communicates: nothing. While a model is built: see `Builder.add`. While it is trained: see `stage_run`.

    Raises:
        RuntimeError: greenlet is not installed.
        ValueError: from building and training, see `Builder.add` and `schedule.forward_backward`; a language model is
            built that is no GPTModel.
    """
    global _builder
    check_installed()
    if _stock:
        return
    builder = _builder = Builder()
    stock_init = GPTModel.__init__

    @functools.wraps(stock_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        builder.add(self)

    stock_base = LanguageModule.__init__

    @functools.wraps(stock_base)
    def base(self: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self, GPTModel):
            raise ValueError(
                f"{type(self).__name__} cannot share its vocabulary over pipeline stages, only GPTModel can: train it "
                f"without share_vocabulary() (--pipeline-vocab)"
            )
        stock_base(self, *args, **kwargs)

    _stock[GPTModel, "__init__"] = stock_init
    GPTModel.__init__ = init
    _stock[LanguageModule, "__init__"] = stock_base
    LanguageModule.__init__ = base
    for name in _SCHEDULES:
        _stock[schedules, name] = getattr(schedules, name)
        setattr(schedules, name, _or_stock(getattr(schedules, name)))


def restore() -> None:
    """Undo `share_vocabulary`: Megatron's own functions are back. Harmless without it."""
    global _builder
    for (owner, name), original in _stock.items():
        setattr(owner, name, original)
    _stock.clear()
    if _builder is not None:
        _builder.close()
        _builder = None


def _or_stock(stock: Any) -> Any:
    @functools.wraps(stock)
    def schedule(**arguments: Any) -> Any:
        shared = sharing_of(arguments["model"]) is not None
        return (forward_backward if shared else stock)(**arguments)

    return schedule

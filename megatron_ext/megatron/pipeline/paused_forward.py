"""Megatron's forward step of one micro-batch, which pauses where it needs the other pipeline stages.

The user's `forward_step_func`, the model and the loss function stay as they are. They run in a coroutine (greenlet) of
the same thread: where the model asks for embeddings or for losses, the schedule gets the question and may run other
passes before it answers.
"""

import contextvars
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

try:
    import greenlet
except ImportError:  # said where it is needed
    greenlet = None


class AskEmbedding(NamedTuple):
    """Wanted: the embeddings of token ids `[B, S]`, as `VocabParallelEmbedding` returns them."""

    ids_BS: Tensor


class AskLosses(NamedTuple):
    """Wanted: the losses of labels `[B, S]` from hidden states `[S, B, H]` (`[S/R, B, H]` in sequence parallelism)."""

    hidden_SBH: Tensor
    labels_BS: Tensor


def check_installed() -> None:
    """Raises RuntimeError where greenlet is missing."""
    if greenlet is None:
        raise RuntimeError("sharing the vocabulary over pipeline stages needs greenlet: pip install greenlet")


class PausedForward:
    """A call of `function` under way. `go` runs it until it asks for something or ends."""

    def __init__(self, function: Callable[[], Any]):
        self._coroutine = greenlet.greenlet(function)
        self._coroutine.gr_context = contextvars.copy_context()
        self._coroutine.asks = True

    def go(self, answer: Any = None) -> Any:
        """The next question, or what the function returns. Raises what the function raises."""
        return self._coroutine.switch() if not self._coroutine else self._coroutine.switch(answer)


def ask(question: AskEmbedding | AskLosses) -> Any:
    """Within a paused forward: the schedule's answer.

    Raises:
        RuntimeError: nobody is there to answer, the model was called outside of the schedule.
    """
    here = greenlet.getcurrent() if greenlet is not None else None
    if here is None or not getattr(here, "asks", False):
        raise RuntimeError(
            "this model shares its vocabulary over the pipeline stages, so it runs inside Megatron's schedules alone: "
            "call the function that get_forward_backward_func() returns, not the model"
        )
    recording = torch.is_grad_enabled()
    answer = here.parent.switch(question)
    torch.set_grad_enabled(recording)
    return answer

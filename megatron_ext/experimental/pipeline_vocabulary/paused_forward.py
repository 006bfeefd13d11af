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
except ImportError:  # `check_installed` raises
    greenlet = None


class AskEmbedding(NamedTuple):
    """Request for embeddings of token ids `[P B, S]`; the answer: the first B, and a function for their gradient."""

    ids: Tensor


class AskLosses(NamedTuple):
    """Request for `Losses` from hidden states `[S, P B, H]` (`[S/R, P B, H]` in sequence parallelism) and labels."""

    hidden: Tensor
    labels: Tensor


class StepContext(NamedTuple):
    """Context that the schedule gives to a forward step at its begin.

    Attributes:
        expect: `expect(found, expected, name)` marks a failure if the model uses other ids or labels than it asked for.
        further: on the last stage, with multi-token prediction, the other token ids, their embeddings, and a function
            for their gradient; taken out once, so that the embeddings are not kept.
    """

    expect: Callable[[Tensor, Tensor, str], None]
    further: list[tuple[Tensor, Tensor, Callable[[Tensor], None]]]


class Losses(NamedTuple):
    """The answer to `AskLosses`, for P predictions of each position; see `multi_token_stage`.

    Attributes:
        loss: `[P B, S]`, fp32.
        hits: `[S, P B]`, whether the labels have the largest logits, if asked for.
        unit_dx: `[S, P B, H]` or a slice of it, the hidden states' gradient where that of each loss is 1.
        send: takes a prediction's number and the gradient of its losses `[B, S]`; returns this rank's slice of it.
    """

    loss: Tensor
    hits: Tensor | None
    unit_dx: Tensor | None
    send: Callable[[int, Tensor], Tensor]

    def part(self, which: int, of: int) -> "Losses":
        """Return the part of one prediction."""
        hits = None if self.hits is None else self.hits.chunk(of, 1)[which]
        unit_dx = None if self.unit_dx is None else self.unit_dx.chunk(of, 1)[which]
        return Losses(self.loss.chunk(of)[which], hits, unit_dx, self.send)


def check_installed() -> None:
    """Raise RuntimeError where greenlet is missing."""
    if greenlet is None:
        raise RuntimeError("sharing the vocabulary over pipeline stages needs greenlet: pip install greenlet")


class PausedForward:
    """A call of `function` under way. `go` runs it until it asks for something or ends."""

    def __init__(self, function: Callable[[], Any], known: StepContext):
        self._coroutine = greenlet.greenlet(function)
        self._coroutine.gr_context = contextvars.copy_context()
        self._coroutine.known = known

    def go(self, answer: Any = None) -> Any:
        """Return the next question, or the function's result. Raises what the function raises."""
        return self._coroutine.switch() if not self._coroutine else self._coroutine.switch(answer)


def known() -> StepContext:
    """Return the context of the paused forward that runs; raise RuntimeError outside of the schedule."""
    told = getattr(greenlet and greenlet.getcurrent(), "known", None)
    if told is None:
        raise RuntimeError(
            "this model shares its vocabulary over the pipeline stages, so it runs only inside Megatron's schedules: "
            "call the function that get_forward_backward_func() returns, not the model"
        )
    return told


def ask(question: AskEmbedding | AskLosses) -> Any:
    """Pause the forward that runs, and return the schedule's answer to its question."""
    known()
    recording = torch.is_grad_enabled()
    answer = greenlet.getcurrent().parent.switch(question)
    torch.set_grad_enabled(recording)
    return answer


def differentiable(answer: Tensor, send: Callable[[Tensor], Any], source: Tensor | None = None) -> Tensor:
    """Return `answer` with a gradient: `send` gets it, and returns the gradient of `source`, if there is one."""
    source = torch.zeros(0, device=answer.device, requires_grad=True) if source is None else source
    return _Answer.apply(source, answer, send)


class _Answer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, source: Tensor, answer: Tensor, send: Any) -> Tensor:
        ctx.send = send
        return answer.view_as(answer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        send, ctx.send = ctx.send, None  # `send` holds tensors
        if send is None:
            raise RuntimeError("stages that share a vocabulary take one backward pass of a micro-batch")
        return send(grad), None, None

"""Passes and exchanges of a pipeline's stages in a step, and which waits for which: for orders, programs, messages.

A pass is what one stage computes between messages. An exchange is a message, or a few that belong together, which all
of its stages launch at the same place of the pipeline's order. Nothing is sent within a pass.
"""

from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple


class Kind(Enum):
    """Computation of a pass, for one micro-batch."""

    TOKENS = "tokens"  # first stage: the batch is read, the forward pass begins and asks for the embedding
    LOOKUP = "embedding"  # every stage: its rows of the embedding, summed on the first stage
    FORWARD = "forward"  # the layers of one chunk
    PRODUCTS = "head"  # every stage: its logits' exponentials, their statistics and their product with the weight
    RESULT = "head result"  # every stage: its part of dx, and the losses, from the statistics of all
    LOSS = "loss"  # last stage: the forward pass goes on with the losses
    BACKWARD = "backward"  # the layers of one chunk
    WEIGHT = "head weight gradient"  # every stage
    ROWS = "embedding gradient"  # every stage

    __hash__ = object.__hash__  # members are looked up a million times for one order, and Enum's is written in Python


class Pass(NamedTuple):
    kind: Kind
    micro_batch: int
    chunk: int = 0


class Sent(Enum):
    """Content of an exchange, for one micro-batch. Exchanges that other stages wait for first come first."""

    FORWARD = "forward"  # activations to the next chunk of layers
    BACKWARD = "backward"  # their gradient, to the chunk before
    HIDDEN = "hidden"  # hidden states and labels, from the last stage to all
    STATISTICS = "statistics"  # of the head, to all ranks that share the vocabulary
    SUM = "sum"  # dx without its factor, the losses' gradient, on the last stage
    TOKENS = "tokens"  # token ids, from the first stage to all
    EMBEDDING = "embedding"  # its sum on the first stage, with multi-token prediction another one on the last stage
    GRAD_LOSS = "grad_loss"  # the gradient of each token's loss, from the last stage to all
    GRAD_EMBEDDING = "grad_embedding"  # from the first stage to all
    GRAD_FURTHER = "grad_further"  # that of multi-token prediction, from the last stage to all

    __hash__ = object.__hash__


class Exchange(NamedTuple):
    """An exchange. `chunk` and `stage` are the sender's of FORWARD or BACKWARD, 0 for the kinds between all stages."""

    kind: Sent
    micro_batch: int
    chunk: int = 0
    stage: int = 0


class Shape(NamedTuple):
    """Size of a schedule: its stages, chunks and micro-batches.

    Attributes:
        stages, chunks: pipeline stages, and chunks of layers on each (1: not interleaved).
        micro_batches: of one step.
        group: micro-batches that go through one chunk before the next chunk has its turn, as Megatron's
            `microbatch_group_size_per_vp_stage`; the number of stages by default there.
        forward_only: no backward passes.
        further: with multi-token prediction, whose layers on the last stage look up embeddings too.
        beside: RESULT runs on a stream of its own as soon as the statistics are there; else it is a pass like others.
    """

    stages: int
    chunks: int
    micro_batches: int
    group: int
    forward_only: bool = False
    further: bool = False
    beside: bool = True

    @property
    def last(self) -> int:
        return self.stages - 1

    def is_front(self, stage: int, what: Pass) -> bool:
        """Return whether a pass of layers belongs to the model's first chunk."""
        return stage == 0 and what.chunk == 0

    def is_back(self, stage: int, what: Pass) -> bool:
        """Return whether a pass of layers belongs to the model's last chunk."""
        return stage == self.last and what.chunk == self.chunks - 1


def needed(stage: int, what: Pass, shape: Shape) -> Iterator[Exchange]:
    """Yield the exchanges that a pass waits for."""
    kind, n, chunk = what
    if kind is Kind.LOOKUP:
        yield Exchange(Sent.TOKENS, n)
    elif kind is Kind.FORWARD:
        if stage > 0:
            yield Exchange(Sent.FORWARD, n, chunk, stage - 1)
        elif chunk > 0:
            yield Exchange(Sent.FORWARD, n, chunk - 1, shape.last)
        if shape.is_front(stage, what) or (shape.further and shape.is_back(stage, what)):
            yield Exchange(Sent.EMBEDDING, n)
    elif kind is Kind.PRODUCTS:
        yield Exchange(Sent.HIDDEN, n)
    elif kind is Kind.RESULT:
        yield Exchange(Sent.STATISTICS, n)
    elif kind is Kind.LOSS and not shape.forward_only:
        yield Exchange(Sent.SUM, n)
    elif kind is Kind.BACKWARD:
        if stage < shape.last:
            yield Exchange(Sent.BACKWARD, n, chunk, stage + 1)
        elif chunk < shape.chunks - 1:
            yield Exchange(Sent.BACKWARD, n, chunk + 1, 0)
    elif kind is Kind.WEIGHT:
        yield Exchange(Sent.GRAD_LOSS, n)
    elif kind is Kind.ROWS:
        yield Exchange(Sent.GRAD_EMBEDDING, n)
        if shape.further:
            yield Exchange(Sent.GRAD_FURTHER, n)


_OF_ALL = {Sent.EMBEDDING: Kind.LOOKUP, Sent.STATISTICS: Kind.PRODUCTS, Sent.SUM: Kind.RESULT}


def sources(exchange: Exchange, shape: Shape) -> list[tuple[int, Pass]]:
    """List the passes, with their stages, that must have ended before an exchange."""
    kind, n, chunk, stage = exchange
    if kind is Sent.FORWARD:
        return [(stage, Pass(Kind.FORWARD, n, chunk))]
    if kind is Sent.BACKWARD:
        return [(stage, Pass(Kind.BACKWARD, n, chunk))]
    if kind in _OF_ALL:
        source = Pass(_OF_ALL[kind], n)
        return [(every, source) for every in range(shape.stages)]
    if kind is Sent.TOKENS:
        return [(0, Pass(Kind.TOKENS, n))]
    if kind is Sent.GRAD_EMBEDDING:
        return [(0, Pass(Kind.BACKWARD, n, 0))]
    return [(shape.last, Pass(Kind.FORWARD if kind is Sent.HIDDEN else Kind.BACKWARD, n, shape.chunks - 1))]


def members(exchange: Exchange, shape: Shape) -> tuple[int, ...]:
    """Return the stages that launch an exchange; of two stages the sender comes first."""
    step = {Sent.FORWARD: 1, Sent.BACKWARD: -1}.get(exchange.kind)
    if step is None:
        return tuple(range(shape.stages))
    return exchange.stage, (exchange.stage + step) % shape.stages

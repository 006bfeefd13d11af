"""One step of training on one pipeline stage whose vocabulary layers all stages share: its passes, in their order.

Layers, loss and data run by Megatron's own `forward_step` and `backward_step`. Messages per micro-batch beside
Megatron's activations and gradients: token ids (a broadcast), the embedding (a sum on the first stage) and its
gradient (a broadcast); hidden states with the labels (a broadcast), statistics (an all-gather), the hidden states'
gradient (a sum on the last stage) and that of the losses (a broadcast of a number per token). Passes send nothing
themselves: the stage's program says when each message is launched, see `order.stage_programs`.

For a pass that fails on one rank see `packed_messages`.

With multi-token prediction its layers are part of the last stage's forward pass, and the same messages are larger:
see `multi_token_stage`. The embedding is then summed on the last stage too, which sends a gradient of it as well.
"""

import inspect
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import Run
from megatron_ext.experimental.pipeline_vocabulary.order.passes import Exchange, Kind, Pass, Sent, Shape, needed
from megatron_ext.experimental.pipeline_vocabulary.order.stage_programs import Entry
from megatron_ext.experimental.pipeline_vocabulary.paused_forward import (
    AskEmbedding,
    AskLosses,
    Losses,
    PausedForward,
    StepContext,
)
from megatron_ext.experimental.pipeline_vocabulary.shared_vocabulary_layers import Sharing
from megatron_ext.experimental.pipeline_vocabulary.stage_messages import StageMessages
from megatron_ext.experimental.pipeline_vocabulary.vocabulary_passes import VocabularyPasses, gradients_held
from megatron_ext.megatron.fused_loss.module_calls import call_known


class ScheduleArguments(NamedTuple):
    """Arguments of Megatron's training loop for the schedule, by Megatron's names; lists: an entry a chunk."""

    forward_step_func: Callable[..., Any]
    data_iterator: list[Any]
    model: list[Any]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    forward_only: bool = False
    collect_non_loss_data: bool = False
    first_val_step: bool | None = None


class StageRun:
    """One run of a stage's program. `config` is Megatron's."""

    def __init__(self, call: ScheduleArguments, shape: Shape, config: Any, sharing: Sharing):
        self.call, self.shape, self.config = call, shape, config
        self.groups, self.output = sharing.groups, sharing.output
        self.backward = not call.forward_only
        self.device = self.output.weight.device
        self.messages = StageMessages(sharing, shape, config, call.micro_batch_size, call.seq_length)
        self.marks = self.messages.marks
        self.vocabulary = VocabularyPasses(self.messages, sharing, shape)
        self.tokens = torch.zeros([], dtype=torch.int, device=self.device)
        self.data_store: list[Any] = []
        self.paused: dict[int, PausedForward] = {}
        self.inputs: dict[tuple[int, int], Tensor | None] = {}
        self.outputs: dict[tuple[int, int], Any] = {}
        self._passes: dict[Kind, Callable[[Pass], None]] = {
            Kind.TOKENS: self.read_tokens,
            Kind.LOOKUP: self.vocabulary.look_up,
            Kind.FORWARD: self.forward,
            Kind.PRODUCTS: self.vocabulary.multiply,
            Kind.RESULT: self.vocabulary.make_result,
            Kind.LOSS: self.finish_loss,
            Kind.BACKWARD: self.backward_pass,
            Kind.WEIGHT: self.vocabulary.weight_gradient,
            Kind.ROWS: self.vocabulary.embedding_gradient,
        }

    def run(self, program: Sequence[Entry], on_pass: Callable[[Run], None] | None = None) -> list[Any]:
        """Run the program. Return Megatron's list of the loss function's reports on the last stage, [] elsewhere.

        `on_pass` is called with each pass when it has ended on the host; its times, by `time.perf_counter()`, go from
        the wait for its messages until then.

        Raises:
            RuntimeError: another rank failed. An error of this rank is raised as it is.
        """
        for entry in program:
            if isinstance(entry, Exchange):
                self.launch(entry)
                continue
            for exchange in needed(self.groups.stage, entry, self.shape):
                self.messages.wait_for(exchange)
            start = time.perf_counter()
            self._passes[entry.kind](entry)
            if on_pass is not None:
                on_pass(Run(entry, start, time.perf_counter()))
        self.messages.wait_for_sent()
        self.vocabulary.finish()
        self.marks.raise_what_failed()
        return self.data_store

    def launch(self, exchange: Exchange) -> None:
        """Begin this stage's part of an exchange."""
        of_vocabulary = {
            Sent.EMBEDDING: self.vocabulary.sum_embedding,
            Sent.STATISTICS: self.vocabulary.gather_statistics,
            Sent.SUM: self.vocabulary.sum_dx,
        }
        if exchange.kind in of_vocabulary:
            of_vocabulary[exchange.kind](exchange.micro_batch)
        else:
            self.messages.launch(exchange)

    def _begin(self, micro_batch: int, chunk: int, input_: Tensor | None, further: Any = ()) -> PausedForward:
        call = self.call
        arguments = call._asdict() | {
            "data_iterator": call.data_iterator[chunk],
            "model": call.model[chunk],
            "input_tensor": input_,
            "forward_data_store": self.data_store,
            "config": self.config,
            "is_first_microbatch": micro_batch == 0 and (not call.forward_only or call.first_val_step is not False),
            "current_microbatch": micro_batch,
            "cp_group_size": parallel_state.get_context_parallel_world_size(),
            "vp_stage": chunk if len(call.model) > 1 else None,
            "is_last_stage": self.groups.is_last and chunk == len(call.model) - 1,
        }
        self._enter_chunk(micro_batch, chunk)
        step = partial(call_known, schedules.forward_step, **arguments)
        return PausedForward(step, StepContext(self.marks.expect, further))

    def _enter_chunk(self, micro_batch: int, chunk: int) -> None:
        if len(self.call.model) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        schedules.set_current_microbatch(self.call.model[chunk], micro_batch)

    def read_tokens(self, what: Pass) -> None:
        given = self.messages.given
        expected = (given.sequences, given.sequence)

        def begin() -> Tensor:
            paused = self._begin(what.micro_batch, 0, None)
            question = paused.go()
            if not isinstance(question, AskEmbedding):
                raise ValueError("the model on the first pipeline stage did not ask for the embedding of its tokens")
            self.paused[what.micro_batch] = paused
            ids = question.ids if self.messages.vary else _checked("tokens", question.ids, expected)
            return ids.long()

        nothing = torch.zeros(expected, dtype=torch.int64, device=self.device)
        ids = self.marks.attempt(begin, nothing)
        if self.messages.vary:
            self.messages.found(what.micro_batch, ids.shape[0] // given.predictions, ids.shape[1])
        self.messages.put(Exchange(Sent.TOKENS, what.micro_batch), ids)

    def forward(self, what: Pass) -> None:
        n, chunk = what.micro_batch, what.chunk
        batch, _, piece, width, _ = self.messages.sizes(n)
        asks_losses = self.shape.is_back(self.groups.stage, what)
        further = [self.vocabulary.further(n)] if asks_losses and self.shape.further else []
        input_ = None
        if self.shape.is_front(self.groups.stage, what):
            answer = self.vocabulary.embedding_of(n)
            paused = self.paused.pop(n, None)

            def go() -> Any:
                assert paused is not None
                self._enter_chunk(n, chunk)
                return paused.go((answer, lambda grad: self.vocabulary.take_embedding_gradient(n, grad)))
        else:
            input_ = self._received(what).detach().requires_grad_(self.backward)

            def go() -> Any:
                paused = self._begin(n, chunk, input_, further)
                return self._up_to_losses(n, paused) if asks_losses else paused.go()

        if asks_losses:
            found = self.marks.attempt(go) or self.vocabulary.no_hidden(n)
            self.messages.put(Exchange(Sent.HIDDEN, n), *found)
        else:
            zeros = torch.zeros(piece, batch, width, dtype=self.config.pipeline_dtype, device=self.device)
            output, tokens = self.marks.attempt(go, ([zeros], 0))
            output = output[0] if isinstance(output, list) else output
            self.tokens += tokens
            self.messages.put(Exchange(Sent.FORWARD, n, chunk, self.groups.stage), output)
            if self.backward:
                self.outputs[n, chunk] = output
                schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
        if self.backward:
            self.inputs[n, chunk] = input_

    def _received(self, what: Pass) -> Tensor:
        """Return activations or their gradient, from another stage."""
        (exchange,) = (
            one for one in needed(self.groups.stage, what, self.shape) if one.kind in (Sent.FORWARD, Sent.BACKWARD)
        )
        return self.messages.arrived(exchange)[0]

    def _up_to_losses(self, n: int, paused: PausedForward) -> tuple[Tensor, Tensor]:
        """Run the forward until it asks for losses; return their hidden states and labels."""
        question = paused.go()
        if not isinstance(question, AskLosses):
            raise ValueError(
                "the model on the last pipeline stage did not take a loss: call it with labels; a vocabulary shared "
                "over pipeline stages gives losses, and no logits"
            )
        _, sequence, piece, width, _ = sizes = self.messages.sizes(n)
        hidden = _checked("hidden states", question.hidden, (piece, sizes.sequences, width))
        labels = _checked("labels", question.labels, (sizes.sequences, sequence))
        if hidden.dtype != self.output.weight.dtype:
            raise ValueError(
                f"the hidden states are {hidden.dtype}, the output layer's weight {self.output.weight.dtype}: they "
                f"must be equal; train without autocast"
            )
        self.paused[n] = paused
        return hidden, labels.transpose(0, 1).contiguous().long()

    def finish_loss(self, what: Pass) -> None:
        n, chunk = what.micro_batch, len(self.call.model) - 1
        result, unit_TD = self.vocabulary.result_of(n)
        _, sequence, piece, width, _ = sizes = self.messages.sizes(n)

        def go() -> Any:
            self._enter_chunk(n, chunk)
            loss = result.loss_T.view(sequence, sizes.sequences).t().contiguous().float()
            hits = None if result.hits_T is None else result.hits_T.view(sequence, sizes.sequences)
            unit = None if unit_TD is None else unit_TD.view(piece, sizes.sequences, width)
            answer = Losses(loss, hits, unit, lambda which, grad: self.vocabulary.take_loss_gradient(n, which, grad))
            return self.paused.pop(n).go(answer)

        output, tokens = self.marks.attempt(go, (None, 0))
        self.tokens += tokens
        if self.backward:
            self.outputs[n, chunk] = output

    def backward_pass(self, what: Pass) -> None:
        n, chunk = what.micro_batch, what.chunk
        batch, _, piece, width, _ = sizes = self.messages.sizes(n)
        is_front, is_back = (is_end(self.groups.stage, what) for is_end in (self.shape.is_front, self.shape.is_back))
        grad = None if is_back else self._received(what)
        input_, output = self.inputs.pop((n, chunk)), self.outputs.pop((n, chunk))

        def go() -> Any:
            self._enter_chunk(n, chunk)
            with gradients_held(self.config, n == self.call.num_microbatches - 1):
                step, given = schedules.backward_step, [input_, output, grad]
                if "model_type" in inspect.signature(step).parameters:  # in older versions
                    given.append(schedules.get_model_type(self.call.model[chunk]))
                return step(*given, self.config)

        input_grad = self.marks.attempt(go)
        if is_back:
            self.vocabulary.put_loss_gradient(n)
            if self.shape.further:
                self.vocabulary.put_embedding_gradient(n, sizes.sequences - batch)
        if is_front:
            self.vocabulary.put_embedding_gradient(n, batch)
            return
        input_grad = input_grad[0] if isinstance(input_grad, list) else input_grad
        if input_grad is None:
            input_grad = torch.zeros(piece, batch, width, dtype=self.config.pipeline_dtype, device=self.device)
        self.messages.put(Exchange(Sent.BACKWARD, n, chunk, self.groups.stage), input_grad)


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"the {name} of this micro-batch have shape {tuple(tensor.shape)}, the schedule's micro_batch_size and "
            f"seq_length make {shape}: all micro-batches must have the size that the schedule was given"
        )
    return tensor

"""One step of training on one pipeline stage whose vocabulary layers all stages share: its passes, in their order.

Layers, loss and data run by Megatron's own `forward_step` and `backward_step`. What is sent per micro-batch beyond
Megatron's activations and gradients: token ids (a broadcast), the embedding (a sum on the first stage) and its
gradient (a broadcast); hidden states with the labels (a broadcast), statistics (an all-gather), the hidden states'
gradient (a sum on the last stage) and that of the losses (a broadcast of a number per token).

A pass that fails on one rank: see `parcels`.

Legend: B batch, S sequence positions of this context-parallel rank, T = S B tokens, H hidden size.
"""

import inspect
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.megatron.log_probs import IGNORE_INDEX
from megatron_ext.megatron.pipeline.groups import PipelineGroups
from megatron_ext.megatron.pipeline.pass_order import Kind, Pass, Run
from megatron_ext.megatron.pipeline.paused_forward import AskEmbedding, AskLosses, PausedForward
from megatron_ext.megatron.pipeline.shared_layers import SharedEmbedding, SharedOutputLayer
from megatron_ext.megatron.pipeline.stage_messages import StageMessages, sizes_of
from megatron_ext.megatron.pipeline.vocabulary_passes import GradientSync, VocabularyPasses


class Call(NamedTuple):
    """What Megatron's training loop gave the schedule, by its names; lists have one entry a chunk."""

    forward_step_func: Callable[..., Any]
    data_iterator: list[Any]
    model: list[Any]
    num_microbatches: int
    seq_length: int
    micro_batch_size: int
    forward_only: bool
    collect_non_loss_data: bool
    first_val_step: bool | None


class StageRun:
    """Runs `order`, this stage's passes. `embedding` and `output` are its shared layers, `config` is Megatron's."""

    def __init__(
        self, call: Call, config: Any, groups: PipelineGroups, embedding: SharedEmbedding, output: SharedOutputLayer
    ):
        self.call, self.config, self.groups = call, config, groups
        self.embedding, self.output = embedding, output
        self.backward = not call.forward_only
        self.device = output.weight.device
        self.sizes = sizes_of(call.micro_batch_size, call.seq_length, config)
        self.messages = StageMessages(groups, self.sizes, config, embedding, output, len(call.model))
        self.marks = self.messages.marks
        self.sync = GradientSync(config)
        total = call.num_microbatches
        self.vocabulary = VocabularyPasses(self.messages, embedding, output, self.sync, total, self.backward)
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
            Kind.LOSS: self.finish_loss,
            Kind.BACKWARD: self.backward_pass,
            Kind.WEIGHT: self.vocabulary.weight_gradient,
            Kind.ROWS: self.vocabulary.embedding_gradient,
        }

    def run(self, order: list[Pass], on_pass: Callable[[Run], None] | None = None) -> list[Any]:
        """Megatron's list of what the loss function reported, on the last stage; empty elsewhere.

        `on_pass` is told of each pass when it has ended on the host: from when its message had arrived until then, by
        `time.perf_counter()`.

        Raises:
            RuntimeError: another rank failed. What fails on this rank is raised as it is.
        """
        try:
            for what, following in zip(order, [*order[1:], None], strict=True):
                self.messages.expect(what)
                if following is not None:
                    self.messages.expect(following)
                self.messages.wait_for(what)
                start = time.perf_counter()
                self._passes[what.kind](what)
                if on_pass is not None:
                    on_pass(Run(what, start, time.perf_counter()))
            self.messages.wait_for_sent()
        finally:
            self.vocabulary.close()
        self.marks.raise_what_failed()
        return self.data_store

    def _begin(self, micro_batch: int, chunk: int, input_: Tensor | None) -> PausedForward:
        call = self.call
        arguments = {
            "forward_step_func": call.forward_step_func,
            "data_iterator": call.data_iterator[chunk],
            "model": call.model[chunk],
            "num_microbatches": call.num_microbatches,
            "input_tensor": input_,
            "forward_data_store": self.data_store,
            "config": self.config,
            "collect_non_loss_data": call.collect_non_loss_data,
            "is_first_microbatch": micro_batch == 0 and (not call.forward_only or call.first_val_step is not False),
            "current_microbatch": micro_batch,
            "cp_group_size": parallel_state.get_context_parallel_world_size(),
            "vp_stage": chunk if len(call.model) > 1 else None,
            "is_last_stage": self.groups.is_last and chunk == len(call.model) - 1,
        }
        known = inspect.signature(schedules.forward_step).parameters
        self._enter_chunk(micro_batch, chunk)
        return PausedForward(
            lambda: schedules.forward_step(**{name: value for name, value in arguments.items() if name in known})
        )

    def _enter_chunk(self, micro_batch: int, chunk: int) -> None:
        if len(self.call.model) > 1:
            parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
        schedules.set_current_microbatch(self.call.model[chunk], micro_batch)

    def read_tokens(self, what: Pass) -> None:
        batch, sequence, *_ = self.sizes

        def begin() -> Tensor:
            paused = self._begin(what.micro_batch, 0, None)
            question = paused.go()
            if not isinstance(question, AskEmbedding):
                raise ValueError("the model on the first pipeline stage did not ask for the embedding of its tokens")
            self.paused[what.micro_batch] = paused
            return _checked("tokens", question.ids_BS, (batch, sequence)).long()

        nothing = torch.zeros(batch, sequence, dtype=torch.int64, device=self.device)
        ids = self.vocabulary.ids[what.micro_batch] = self.marks.attempt(begin, nothing)
        self.messages.broadcast("tokens", ids)

    def forward(self, what: Pass) -> None:
        n, chunk = what.micro_batch, what.chunk
        first = self.groups.is_first and chunk == 0
        last = self.groups.is_last and chunk == len(self.call.model) - 1
        batch, sequence, piece, width = self.sizes
        input_ = None
        if first:
            answer = self.vocabulary.sums.pop(n).wait()
            if not self.embedding.reduce_scatter_embeddings:
                answer = collectives.all_reduce(answer, self.groups.tp, in_place=True)
            paused = self.paused.pop(n, None)

            def go() -> Any:
                assert paused is not None
                self._enter_chunk(n, chunk)
                return paused.go((answer, lambda grad: self.vocabulary.send_embedding_gradient(n, grad)))
        else:
            (input_,) = self.messages.arrived(what)
            input_ = input_.detach().requires_grad_(self.backward)

            def go() -> Any:
                nonlocal paused
                paused = self._begin(n, chunk, input_)
                return paused.go()

            paused = None
        if last:
            self.marks.attempt(lambda: self._ask_stages(n, go(), lambda: paused))
            if n not in self.vocabulary.hidden:
                self.vocabulary.hidden[n] = (
                    self.output.weight.new_zeros(piece, batch, width),
                    torch.full((sequence, batch), IGNORE_INDEX, dtype=torch.int64, device=self.device),
                )
            self.messages.broadcast("hidden", *self.vocabulary.hidden[n])
        else:
            zeros = torch.zeros(piece, batch, width, dtype=self.config.pipeline_dtype, device=self.device)
            output, tokens = self.marks.attempt(go, ([zeros], 0))
            output = output[0] if isinstance(output, list) else output
            self.tokens += tokens
            self.messages.send("forward", output, self.groups.stage + 1)
            if self.backward:
                self.outputs[n, chunk] = output
                schedules.deallocate_output_tensor(output, self.config.deallocate_pipeline_outputs)
        if self.backward:
            self.inputs[n, chunk] = input_

    def _ask_stages(self, n: int, question: Any, paused: Callable[[], Any]) -> None:
        if not isinstance(question, AskLosses):
            raise ValueError(
                "the model on the last pipeline stage did not take a loss: call it with labels; a vocabulary shared "
                "over pipeline stages gives losses, and no logits"
            )
        batch, sequence, piece, width = self.sizes
        hidden = _checked("hidden states", question.hidden_SBH, (piece, batch, width))
        labels = _checked("labels", question.labels_BS, (batch, sequence))
        if hidden.dtype != self.output.weight.dtype:
            raise ValueError(
                f"the hidden states are {hidden.dtype}, the output layer's weight {self.output.weight.dtype}: they "
                f"must be equal; train without autocast"
            )
        self.paused[n] = paused()
        self.vocabulary.hidden[n] = hidden, labels.transpose(0, 1).contiguous().long()

    def finish_loss(self, what: Pass) -> None:
        n, chunk = what.micro_batch, len(self.call.model) - 1
        result = self.vocabulary.results[n]() if self.backward else self.vocabulary.results.pop(n)()
        batch, sequence, piece, width = self.sizes

        def go() -> Any:
            self._enter_chunk(n, chunk)
            loss_BS = result.loss_T.view(sequence, batch).t().contiguous().float()
            unit = None if result.unit_dx_TD is None else result.unit_dx_TD.view(piece, batch, width)
            return self.paused.pop(n).go((loss_BS, unit, lambda grad: self.vocabulary.send_loss_gradient(n, grad)))

        output, tokens = self.marks.attempt(go, (None, 0))
        self.tokens += tokens
        if self.backward:
            self.outputs[n, chunk] = output

    def backward_pass(self, what: Pass) -> None:
        n, chunk = what.micro_batch, what.chunk
        last = self.groups.is_last and chunk == len(self.call.model) - 1
        batch, sequence, piece, width = self.sizes
        grad = None if last else self.messages.arrived(what)[0]
        input_, output = self.inputs.pop((n, chunk)), self.outputs.pop((n, chunk))

        def go() -> Any:
            self._enter_chunk(n, chunk)
            with self.sync.held_until(n == self.call.num_microbatches - 1):
                model_type = schedules.get_model_type(self.call.model[chunk])
                return _backward_step(input_, output, grad, model_type, self.config)

        input_grad = self.marks.attempt(go)
        if last and n not in self.vocabulary.grad_losses:  # it failed before the losses' gradient was known
            self.vocabulary.send_loss_gradient(n, torch.zeros(batch, sequence, device=self.device))
        if self.groups.is_first and chunk == 0:
            if n not in self.vocabulary.grad_embeddings:
                slices = self.embedding.reduce_scatter_embeddings
                shape = (piece, batch, width) if slices else (batch, sequence, width)
                self.vocabulary.send_embedding_gradient(n, self.output.weight.new_zeros(shape))
            return
        input_grad = input_grad[0] if isinstance(input_grad, list) else input_grad
        if input_grad is None:
            input_grad = torch.zeros(piece, batch, width, dtype=self.config.pipeline_dtype, device=self.device)
        self.messages.send("backward", input_grad, self.groups.stage - 1)


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"the {name} of this micro-batch have shape {tuple(tensor.shape)}, micro_batch_size and seq_length of the "
            f"schedule make {shape}: all micro-batches must be of the size that is given to it"
        )
    return tensor


def _backward_step(input_: Any, output: Any, grad: Any, model_type: Any, config: Any) -> Any:
    """Megatron's, which wants the model type in older versions."""
    known = inspect.signature(schedules.backward_step).parameters
    arguments = [input_, output, grad, model_type, config] if "model_type" in known else [input_, output, grad, config]
    return schedules.backward_step(*arguments)

"""One step of training on one pipeline stage whose vocabulary layers all stages share: its passes, in their order.

Layers, loss and data run by Megatron's own `forward_step` and `backward_step`. What is sent per micro-batch beyond
Megatron's activations and gradients: token ids (a broadcast), the embedding (a sum on the first stage) and its
gradient (a broadcast); hidden states with the labels (a broadcast), statistics (an all-gather), the hidden states'
gradient (a sum on the last stage) and that of the losses (a broadcast of a number per token).

A pass that fails on one rank: see `parcels`.

Legend: B batch, S sequence positions of this context-parallel rank, T = S B tokens, H hidden size.
"""

import contextlib
import inspect
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.head import steps
from megatron_ext.head.options import HeadOptions
from megatron_ext.megatron.log_probs import IGNORE_INDEX
from megatron_ext.megatron.pipeline.groups import PipelineGroups
from megatron_ext.megatron.pipeline.pass_order import Kind, Pass, Run
from megatron_ext.megatron.pipeline.paused_forward import AskEmbedding, AskLosses, PausedForward
from megatron_ext.megatron.pipeline.shared_layers import SharedEmbedding, SharedOutputLayer
from megatron_ext.megatron.pipeline.side_work import SideWork
from megatron_ext.megatron.pipeline.stage_messages import StageMessages, sizes_of


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
        self.error: BaseException | None = None
        self.sizes = sizes_of(call.micro_batch_size, call.seq_length, config)
        self.messages = StageMessages(groups, self.sizes, config, embedding, output, len(call.model))
        self.options = HeadOptions(
            groups.statistics,
            output.vocab,
            ignore_index=IGNORE_INDEX,
            cache=1,
            fuse_main_grad=output.gradient_accumulation_fusion,
        )
        self.side = SideWork(self.device)
        self.tokens = torch.zeros([], dtype=torch.int, device=self.device)
        self.data_store: list[Any] = []
        self.paused: dict[int, PausedForward] = {}
        self.inputs: dict[tuple[int, int], Tensor | None] = {}
        self.outputs: dict[tuple[int, int], Any] = {}
        self.ids: dict[int, Tensor] = {}
        self.sums: dict[int, Pending] = {}  # of the embedding, on the first stage
        self.hidden: dict[int, tuple[Tensor, Tensor]] = {}
        self.results: dict[int, Callable[[], Any]] = {}
        self.grad_losses: dict[int, Tensor] = {}
        self.grad_embeddings: dict[int, Tensor] = {}
        self.left = self._contributions()

    # The run.

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
                _PASSES[what.kind](self, what)
                if on_pass is not None:
                    on_pass(Run(what, start, time.perf_counter()))
            self.messages.wait_for_sent()
        finally:
            self.side.close()
        if self.error is not None:
            raise self.error
        failed = int(self.messages.marks.mark)
        if failed:
            raise RuntimeError(
                f"rank {failed - 1} failed in this step and the other stages of its pipeline end with it; its own "
                f"error says why"
            )
        return self.data_store

    def _attempt(self, compute: Callable[[], Any], otherwise: Any = None) -> Any:
        """What `compute` returns; after a failure on this rank `otherwise`, and the other ranks are told."""
        if self.error is None:
            try:
                return compute()
            except Exception as error:
                traceback.clear_frames(error.__traceback__)
                self.error = error
                self.messages.marks.fail(dist.get_rank())
        return otherwise

    # Passes of the layers.

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
        ids = self.ids[what.micro_batch] = self._attempt(begin, nothing)
        self.messages.broadcast("tokens", ids)

    def look_up(self, what: Pass) -> None:
        batch, sequence, _, width = self.sizes
        if self.messages.are_for(what):
            self.ids[what.micro_batch] = self.messages.arrived(what)[0].clone()
        ids, vocab = self.ids[what.micro_batch], self.embedding.vocab
        if not self.backward:
            del self.ids[what.micro_batch]

        @torch.no_grad()
        def rows(weight: Tensor) -> Tensor:
            owned = vocab.owns(ids)
            found = torch.nn.functional.embedding((ids - vocab.start).where(owned, 0), weight)
            return found.masked_fill_(~owned.unsqueeze(-1), 0)

        nothing = self.output.weight.new_zeros(batch, sequence, width)
        part = self._attempt(lambda: self.embedding(rows), nothing)
        if self.embedding.reduce_scatter_embeddings:
            part = collectives.reduce_scatter(part.transpose(0, 1), self.groups.tp)
        part = part.contiguous()
        pending = collectives.start_reduce(part, self.groups["embedding"], 0)
        if self.groups.is_first:
            self.sums[what.micro_batch] = pending
        else:
            self.messages.sent.append(pending)

    def forward(self, what: Pass) -> None:
        n, chunk = what.micro_batch, what.chunk
        first = self.groups.is_first and chunk == 0
        last = self.groups.is_last and chunk == len(self.call.model) - 1
        batch, sequence, piece, width = self.sizes
        input_ = None
        if first:
            answer = self.sums.pop(n).wait()
            if not self.embedding.reduce_scatter_embeddings:
                answer = collectives.all_reduce(answer, self.groups.tp, in_place=True)
            paused = self.paused.pop(n, None)

            def go() -> Any:
                assert paused is not None
                self._enter_chunk(n, chunk)
                return paused.go((answer, lambda grad: self._send_embedding_gradient(n, grad)))
        else:
            (input_,) = self.messages.arrived(what)
            input_ = input_.detach().requires_grad_(self.backward)

            def go() -> Any:
                nonlocal paused
                paused = self._begin(n, chunk, input_)
                return paused.go()

            paused = None
        if last:
            self._attempt(lambda: self._ask_stages(n, go(), lambda: paused))
            if n not in self.hidden:
                self.hidden[n] = (
                    self.output.weight.new_zeros(piece, batch, width),
                    torch.full((sequence, batch), IGNORE_INDEX, dtype=torch.int64, device=self.device),
                )
            self.messages.broadcast("hidden", *self.hidden[n])
        else:
            zeros = torch.zeros(piece, batch, width, dtype=self.config.pipeline_dtype, device=self.device)
            output, tokens = self._attempt(go, ([zeros], 0))
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
        self.hidden[n] = hidden, labels.transpose(0, 1).contiguous().long()

    def finish_loss(self, what: Pass) -> None:
        n, chunk = what.micro_batch, len(self.call.model) - 1
        result = self.results[n]() if self.backward else self.results.pop(n)()
        batch, sequence, piece, width = self.sizes

        def go() -> Any:
            self._enter_chunk(n, chunk)
            loss_BS = result.loss_T.view(sequence, batch).t().contiguous().float()
            unit = None if result.unit_dx_TD is None else result.unit_dx_TD.view(piece, batch, width)
            return self.paused.pop(n).go((loss_BS, unit, lambda grad: self._send_loss_gradient(n, grad)))

        output, tokens = self._attempt(go, (None, 0))
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
            with self._sync(n == self.call.num_microbatches - 1):
                model_type = schedules.get_model_type(self.call.model[chunk])
                return _backward_step(input_, output, grad, model_type, self.config)

        input_grad = self._attempt(go)
        if last and n not in self.grad_losses:  # it failed before the losses' gradient was known
            self._send_loss_gradient(n, torch.zeros(batch, sequence, device=self.device))
        if self.groups.is_first and chunk == 0:
            if n not in self.grad_embeddings:
                slices = self.embedding.reduce_scatter_embeddings
                shape = (piece, batch, width) if slices else (batch, sequence, width)
                self._send_embedding_gradient(n, self.output.weight.new_zeros(shape))
            return
        input_grad = input_grad[0] if isinstance(input_grad, list) else input_grad
        if input_grad is None:
            input_grad = torch.zeros(piece, batch, width, dtype=self.config.pipeline_dtype, device=self.device)
        self.messages.send("backward", input_grad, self.groups.stage - 1)

    # Passes of the vocabulary layers.

    def multiply(self, what: Pass) -> None:
        n = what.micro_batch
        hidden, labels = self.messages.arrived(what) if self.messages.are_for(what) else self.hidden.pop(n)
        if self.output.sequence_parallel:
            hidden = collectives.all_gather(hidden, self.groups.tp)
        hidden_TD, labels_T = hidden.flatten(0, -2), labels.flatten()

        def go(weight: Tensor) -> Any:
            return steps.products(hidden_TD, weight, labels_T, self.options, self.backward)

        found = self._attempt(lambda: self.output(go))
        weight = self.output.weight.detach()
        if found is None:  # take part in the exchange
            ignored_T = labels_T.new_full(labels_T.shape, IGNORE_INDEX)
            found = steps.products(hidden_TD.new_zeros(hidden_TD.shape), weight, ignored_T, self.options, self.backward)
        statistics = steps.start_exchange(found, self.options)
        reads = [x for x in found if x is not None]
        result = self.side.start(lambda: self._result(found, statistics, weight), reads)
        if self.backward or self.groups.is_last:
            self.results[n] = result

    def _result(self, found: steps.Products, statistics: Pending, weight: Tensor) -> Any:
        """Beside the passes: a `steps.Result`, on the last stage with the sum over all ranks as its `unit_dx_TD`."""
        stats_RKT = statistics.wait()
        result = self._attempt(lambda: steps.result(found, stats_RKT, weight, self.options))
        if result is None:
            unit = weight.new_zeros(found.x_TD.shape) if self.backward else None
            result = steps.Result(found.shift_T.new_zeros(found.shift_T.shape), unit, found, None)  # type: ignore[arg-type]
        unit = result.unit_dx_TD
        if unit is not None:
            if self.output.sequence_parallel:
                unit = collectives.reduce_scatter(unit, self.groups.tp_aside)
            unit = collectives.start_reduce(unit.contiguous(), self.groups["sum"], self.groups.last).wait()
            if self.groups.is_last and not self.output.sequence_parallel:
                unit = collectives.all_reduce(unit, self.groups.tp_aside, in_place=True)
        return result._replace(unit_dx_TD=unit if self.groups.is_last else None)

    def _send_loss_gradient(self, n: int, grad_BS: Tensor) -> Tensor:
        """Returns this rank's part of it, `[S/R, B]` under sequence parallelism."""
        grad_SB = grad_BS.detach().t().contiguous().float()
        self.grad_losses[n] = grad_SB
        self.messages.broadcast("grad_loss", grad_SB)
        piece = self.sizes.slice
        start = parallel_state.get_tensor_model_parallel_rank() * piece if self.output.sequence_parallel else 0
        return grad_SB[start : start + piece]

    def weight_gradient(self, what: Pass) -> None:
        n = what.micro_batch
        grad = self.messages.arrived(what)[0] if self.messages.are_for(what) else self.grad_losses.pop(n)
        result = self.results.pop(n)()

        def go() -> None:
            weight = self.output.weight
            if weight.requires_grad:
                dw = steps.weight_gradient(result, grad.reshape(-1), weight, self.options)
                self._contribute(weight, dw)

        self._attempt(go)

    def _send_embedding_gradient(self, n: int, grad: Tensor) -> None:
        grad = grad.detach().to(self.output.weight.dtype)
        self.grad_embeddings[n] = grad
        self.messages.broadcast("grad_embedding", grad)

    def embedding_gradient(self, what: Pass) -> None:
        n = what.micro_batch
        grad = self.messages.arrived(what)[0] if self.messages.are_for(what) else self.grad_embeddings.pop(n)
        if self.embedding.reduce_scatter_embeddings:
            grad = collectives.all_gather(grad, self.groups.tp).transpose(0, 1)
        ids, vocab, weight = self.ids.pop(n), self.embedding.vocab, self.embedding.weight

        def go() -> None:
            if weight.requires_grad:
                owned = vocab.owns(ids)
                rows = (ids - vocab.start).where(owned, 0)
                masked = grad.masked_fill(~owned.unsqueeze(-1), 0)
                dw = torch.ops.aten.embedding_dense_backward(masked, rows, weight.shape[0], -1, False)
                self._contribute(weight, dw)

        self._attempt(go)

    # Gradients of parameters.

    def _contributions(self) -> dict[Tensor, int]:
        """How often a parameter of the vocabulary layers will get a gradient in this step."""
        left: dict[Tensor, int] = {}
        for weight in (self.output.weight, self.embedding.weight):
            left[weight] = left.get(weight, 0) + self.call.num_microbatches
        return left

    def _contribute(self, weight: Tensor, gradient: Tensor | None) -> None:
        """Hand a gradient to autograd, as a layer's backward would: data parallelism's hooks run."""
        self.left[weight] -= 1
        if gradient is not None:
            with self._sync(self.left[weight] == 0):
                weight.backward(gradient)

    @contextlib.contextmanager
    def _sync(self, last: bool) -> Any:
        """In the last pass data parallelism may reduce gradients, unless the config has them reduced at the end."""
        config = self.config
        functions = config.no_sync_func
        if functions is None or (last and config.grad_sync_func is None):
            yield
            return
        with contextlib.ExitStack() as stack:
            for function in functions if isinstance(functions, (list, tuple)) else [functions]:
                stack.enter_context(function())
            yield


_PASSES: dict[Kind, Callable[[StageRun, Pass], None]] = {
    Kind.TOKENS: StageRun.read_tokens,
    Kind.LOOKUP: StageRun.look_up,
    Kind.FORWARD: StageRun.forward,
    Kind.PRODUCTS: StageRun.multiply,
    Kind.LOSS: StageRun.finish_loss,
    Kind.BACKWARD: StageRun.backward_pass,
    Kind.WEIGHT: StageRun.weight_gradient,
    Kind.ROWS: StageRun.embedding_gradient,
}


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

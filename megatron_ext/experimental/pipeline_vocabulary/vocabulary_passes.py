"""The passes of embedding and lm head on one pipeline stage, each of which does this stage's part of a micro-batch.

Results between two passes of a micro-batch lie in dictionaries, by the micro-batch's number. The passes of the layers
(`stage_run`) put in the model's questions, and take out the answers.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.experimental.pipeline_vocabulary import linear_steps
from megatron_ext.experimental.pipeline_vocabulary.order.passes import Exchange, Pass, Sent, Shape
from megatron_ext.experimental.pipeline_vocabulary.shared_vocabulary_layers import Sharing
from megatron_ext.experimental.pipeline_vocabulary.side_stream import SideStreamResult, SideWork
from megatron_ext.experimental.pipeline_vocabulary.stage_messages import StageMessages
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.readouts.read_out import CrossEntropy, IsArgmax, ReadOut
from megatron_ext.megatron.fused_loss.log_probs import IGNORE_INDEX
from megatron_ext.megatron.fused_loss.megatron_log import counts_acceptance


@contextlib.contextmanager
def gradients_held(config: Any, last: bool) -> Iterator[None]:
    """Context of a pass that makes gradients: data parallelism reduces them in the last pass, or if told at the end."""
    functions = config.no_sync_func
    if functions is None or (last and config.grad_sync_func is None):
        functions = ()
    with contextlib.ExitStack() as stack:
        for function in functions if isinstance(functions, (list, tuple)) else [functions]:
            stack.enter_context(function())
        yield


class VocabularyPasses:
    """Passes of embedding and lm head in one step.

    Attributes:
        ids: token ids `[P B, S]`, until the embedding has its gradient.
        parts: this stage's part of the embedding, of B sequences and of the others.
        sums: of the embedding, on the first stage of B sequences, on the last one of the others if P > 1.
        products, statistics: of the head, between its passes.
        results: `linear_steps.Result` of the side stream; its `unit_dx_TD` goes to `sums_of_dx` on the last stage.
        grad_embeddings: on the stages that have `sums`, until they are sent.
    """

    def __init__(self, messages: StageMessages, sharing: Sharing, shape: Shape):
        self.messages, self.marks = messages, messages.marks
        self.groups, self.embedding, self.output = _, embedding, output = sharing
        self.backward, self.beside = not shape.forward_only, shape.beside
        fuse = output.gradient_accumulation_fusion
        self.call = ResolvedHead(self.groups.statistics, output.vocab, cache=1, fuse_main_grad=fuse)
        self.hits = output.mtp_layers > 0 and counts_acceptance()
        self.asks_further = self.groups.is_last and shape.further
        self.side = SideWork(output.weight.device, shape.beside)
        self.ids: dict[int, Tensor] = {}
        self.parts: dict[int, list[Tensor]] = {}
        self.sums: dict[int, Pending] = {}
        self.products: dict[int, linear_steps.Products] = {}
        self.statistics: dict[int, SideStreamResult] = {}
        self.results: dict[int, SideStreamResult] = {}
        self.sums_of_dx: dict[int, SideStreamResult] = {}
        self._part_of_dx: Pending | None = None  # on its way to the last stage
        self._grad_parts: dict[int, dict[int, Tensor]] = {}
        self.grad_embeddings: dict[int, Tensor] = {}
        # How many more gradients each parameter will get.
        tied = output.weight is embedding.weight
        self.left: dict[Tensor, int] = dict.fromkeys(
            (embedding.weight, output.weight), shape.micro_batches * (1 + tied)
        )

    def finish(self) -> None:
        """Wait for the work that was begun on the side stream."""
        if self._part_of_dx is not None:
            self.side.run(self._part_of_dx.wait)
        self.side.close()

    def look_up(self, what: Pass) -> None:
        n = what.micro_batch
        ids, vocab = self.messages.arrived(Exchange(Sent.TOKENS, n))[0].clone(), self.embedding.vocab
        if self.backward or self.asks_further:
            self.ids[n] = ids

        @torch.no_grad()
        def rows(weight: Tensor) -> Tensor:
            owned = vocab.owns(ids)
            found = torch.nn.functional.embedding((ids - vocab.start).where(owned, 0), weight)
            return found.masked_fill_(~owned.unsqueeze(-1), 0)

        nothing = self.output.weight.new_zeros(*ids.shape, self.messages.sizes(n).hidden)
        part = self.marks.attempt(lambda: self.embedding(rows), nothing)
        if self.embedding.reduce_scatter_embeddings:
            part = collectives.reduce_scatter(part.transpose(0, 1), self.groups.tp)
        batch, batch_dim = self.messages.sizes(n).batch, 1 if self.embedding.reduce_scatter_embeddings else 0
        self.parts[n] = [own.contiguous() for own in part.split([batch, ids.shape[0] - batch], batch_dim)]

    def sum_embedding(self, n: int) -> None:
        """Begin `Sent.EMBEDDING`."""
        for stage, own in zip((0, self.groups.last), self.parts.pop(n), strict=True):
            if own.numel():
                pending = collectives.start_reduce(own, self.groups[Sent.EMBEDDING], stage)
                if self.groups.stage == stage:
                    self.sums[n] = pending
                else:
                    self.messages.sent(pending)

    def embedding_of(self, n: int) -> Tensor:
        """Return the embedding that this stage's layers asked for, once all stages have looked up their rows."""
        found = self.sums.pop(n).wait()
        slices = self.embedding.reduce_scatter_embeddings
        return found if slices else collectives.all_reduce(found, self.groups.tp, in_place=True)

    def further(self, n: int) -> tuple[Tensor, Tensor, Callable[[Tensor], None]]:
        """Return the token ids of multi-token prediction, their embeddings, and a function that takes the gradient."""
        ids = self.ids[n][self.messages.sizes(n).batch :]
        if not self.backward:
            del self.ids[n]
        return ids, self.embedding_of(n), lambda grad: self.take_embedding_gradient(n, grad)

    def no_hidden(self, n: int) -> tuple[Tensor, Tensor]:
        """Return zeros and ignored labels for the hidden states and labels of a micro-batch that failed."""
        _, sequence, piece, width, _ = sizes = self.messages.sizes(n)
        weight = self.output.weight
        labels = torch.full((sequence, sizes.sequences), IGNORE_INDEX, dtype=torch.int64, device=weight.device)
        return weight.new_zeros(piece, sizes.sequences, width), labels

    def multiply(self, what: Pass) -> None:
        n = what.micro_batch
        hidden, labels = self.messages.arrived(Exchange(Sent.HIDDEN, n))
        if self.output.sequence_parallel:
            hidden = collectives.all_gather(hidden, self.groups.tp)
        hidden_TD, labels_T = hidden.flatten(0, -2), labels.flatten()

        def go(weight: Tensor) -> Any:
            return linear_steps.products(hidden_TD, weight, self._readouts(labels_T), self.call, self.backward)

        found = self.marks.attempt(lambda: self.output(go))
        if found is None:  # take part in the exchange
            ignored_T = labels_T.new_full(labels_T.shape, IGNORE_INDEX)
            zeros_TD, weight = hidden_TD.new_zeros(hidden_TD.shape), self.output.weight.detach()
            readouts = self._readouts(ignored_T)
            found = linear_steps.products(zeros_TD, weight, readouts, self.call, self.backward)
        self.products[n] = found

    def gather_statistics(self, n: int) -> None:
        """Begin `Sent.STATISTICS`."""
        found = self.products[n]
        begin = partial(linear_steps.start_exchange, found)
        # On the stream that reads the statistics, which then owns their memory.
        self.statistics[n] = self.side.run(begin, self.side.now(), [found.stats_KT])

    def make_result(self, what: Pass) -> None:
        """Make the result of a micro-batch beside the passes, or as one of them."""
        n = what.micro_batch
        found, statistics = self.products.pop(n), self.statistics.pop(n).found
        failures: list[Exception] = []
        result = self.side.run(lambda: self._result(found, statistics, failures), reads=found.tensors())
        for error in failures:  # marks belong to the passes' stream
            self.marks.fail(error)
        if self.backward or self.groups.is_last:
            self.results[n] = result

    def _readouts(self, labels_T: Tensor) -> list[ReadOut]:
        loss = CrossEntropy(labels_T, IGNORE_INDEX)
        return [loss, IsArgmax(labels_T, IGNORE_INDEX)] if self.hits else [loss]

    def _result(self, found: linear_steps.Products, statistics: Pending, failures: list[Exception]) -> Any:
        """Make a `linear_steps.Result`; in sequence parallelism its `unit_dx_TD` is that of this rank's tokens."""
        stats_RKT, weight, result = statistics.wait(), self.output.weight.detach(), None
        try:
            if not self.marks.has_failed:
                result = linear_steps.result(found, stats_RKT, weight)
        except Exception as error:
            failures.append(error)
        if result is None:
            unit = weight.new_zeros(found.x_TD.shape) if self.backward else None
            loss = torch.zeros_like(found.shift_T)
            results = [[loss], [loss.bool()]][: 1 + self.hits]
            result = linear_steps.Result(results, unit, found, None, [])
        if result.unit_dx_TD is not None and self.output.sequence_parallel:
            group = self.groups.tp_aside if self.beside else self.groups.tp
            result = result._replace(unit_dx_TD=collectives.reduce_scatter(result.unit_dx_TD, group))
        return result

    def sum_dx(self, n: int) -> None:
        """Begin `Sent.SUM`."""
        result, done = self.results[n]
        self.results[n] = SideStreamResult(result._replace(unit_dx_TD=None), done)

        def begin() -> Pending:
            if self._part_of_dx is not None:
                self._part_of_dx.wait()
            return collectives.start_reduce(result.unit_dx_TD.contiguous(), self.groups[Sent.SUM], self.groups.last)

        pending = self.side.run(begin)
        if self.groups.is_last:
            self.sums_of_dx[n] = pending
        else:
            self._part_of_dx = pending.found

    def result_of(self, n: int) -> tuple[Any, Tensor | None]:
        """Return on the last stage all stages' `linear_steps.Result`, and hidden states' gradient of losses of 1."""
        if not self.backward:
            return self.side.take(self.results.pop(n)), None
        pending, done = self.sums_of_dx.pop(n)
        unit = self.side.take(SideStreamResult(pending.wait(), done))
        unit = unit if self.output.sequence_parallel else collectives.all_reduce(unit, self.groups.tp, in_place=True)
        return self.side.take(self.results[n]), unit

    def take_loss_gradient(self, n: int, which: int, grad_BS: Tensor) -> Tensor:
        """Take the loss gradient of one prediction, and return this rank's slice of it, `[S/R, B]`."""
        grad_SB = grad_BS.detach().t().contiguous().float()
        self._grad_parts.setdefault(n, {})[which] = grad_SB
        piece = self.messages.sizes(n).slice
        start = parallel_state.get_tensor_model_parallel_rank() * piece if self.output.sequence_parallel else 0
        return grad_SB[start : start + piece]

    def put_loss_gradient(self, n: int) -> None:
        """Hand all stages the losses' gradient, or zeros, once the last stage's backward pass has ended."""
        batch, sequence, *_ = self.messages.sizes(n)
        parts = self._grad_parts.pop(n, {})
        nothing = torch.zeros(sequence, batch, device=self.output.weight.device)
        grad = torch.cat([parts.get(which, nothing) for which in range(self.messages.predictions)], 1)
        self.messages.put(Exchange(Sent.GRAD_LOSS, n), grad)

    def weight_gradient(self, what: Pass) -> None:
        n = what.micro_batch
        (grad,) = self.messages.arrived(Exchange(Sent.GRAD_LOSS, n))
        result = self.side.take(self.results.pop(n))

        def go() -> None:
            weight = self.output.weight
            if weight.requires_grad:
                dw = linear_steps.weight_gradient(result, grad.reshape(-1), weight)
                self._contribute(weight, dw)

        self.marks.attempt(go)

    def take_embedding_gradient(self, n: int, grad: Tensor) -> None:
        """Take the gradient of the embeddings that this stage's layers asked for."""
        self.grad_embeddings[n] = grad.detach().to(self.output.weight.dtype)

    def put_embedding_gradient(self, n: int, sequences: int) -> None:
        """Hand all stages the gradient of the embeddings of `sequences` sequences once this stage's backward pass has
        ended; zeros if the pass has made none."""
        grad = self.grad_embeddings.pop(n, None)
        if grad is None:
            grad = self.output.weight.new_zeros(self.messages.embedding_shape(n, sequences))
        kind = Sent.GRAD_EMBEDDING if self.groups.is_first else Sent.GRAD_FURTHER
        self.messages.put(Exchange(kind, n), grad)

    def embedding_gradient(self, what: Pass) -> None:
        n = what.micro_batch
        kinds = (Sent.GRAD_EMBEDDING, Sent.GRAD_FURTHER)[: 1 + self.messages.shape.further]
        parts = [self.messages.arrived(Exchange(kind, n))[0] for kind in kinds]
        if self.embedding.reduce_scatter_embeddings:
            grad = collectives.all_gather(torch.cat(parts, 1), self.groups.tp).transpose(0, 1)
        else:
            grad = torch.cat(parts)
        ids, vocab, weight = self.ids.pop(n), self.embedding.vocab, self.embedding.weight

        def go() -> None:
            if weight.requires_grad:
                owned = vocab.owns(ids)
                rows = (ids - vocab.start).where(owned, 0)
                masked = grad.masked_fill(~owned.unsqueeze(-1), 0)
                dw = torch.ops.aten.embedding_dense_backward(masked, rows, weight.shape[0], -1, False)
                self._contribute(weight, dw)

        self.marks.attempt(go)

    def _contribute(self, weight: Tensor, gradient: Tensor | None) -> None:
        """Hand a gradient to autograd, as a layer's backward would: data parallelism's hooks run."""
        self.left[weight] -= 1
        if gradient is not None:
            with gradients_held(self.messages.config, self.left[weight] == 0):
                weight.backward(gradient)

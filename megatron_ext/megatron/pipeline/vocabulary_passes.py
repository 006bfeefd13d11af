"""The passes of embedding and lm head on one pipeline stage, each of which does this stage's part of a micro-batch.

What is between two passes of a micro-batch lies in dictionaries by its number. The passes of the layers (`stage_run`)
put in what the model asks, and take out what it is answered.

Legend: B batch, S sequence positions of this context-parallel rank, H hidden size, P predictions of each position: 1,
or with multi-token prediction 1 + its layers (see `multi_token_stage`).
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.utils._pytree import tree_leaves

from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.head.engine import linear_steps
from megatron_ext.head.engine.options import HeadOptions
from megatron_ext.megatron.fused_loss.log_probs import IGNORE_INDEX
from megatron_ext.megatron.fused_loss.multi_token_prediction import counts_acceptance
from megatron_ext.megatron.pipeline.pass_order import Pass
from megatron_ext.megatron.pipeline.shared_vocabulary_layers import SharedEmbedding, SharedOutputLayer
from megatron_ext.megatron.pipeline.side_stream import SideWork
from megatron_ext.megatron.pipeline.stage_messages import StageMessages


class GradientSync:
    """When data parallelism may reduce gradients, by the config's `no_sync_func` and `grad_sync_func`."""

    def __init__(self, config: Any):
        self._config = config

    @contextlib.contextmanager
    def held_until(self, last: bool) -> Iterator[None]:
        """A pass that gives gradients. They may be reduced in the last one, unless that is to be done at the end."""
        functions = self._config.no_sync_func
        if functions is None or (last and self._config.grad_sync_func is None):
            yield
            return
        with contextlib.ExitStack() as stack:
            for function in functions if isinstance(functions, (list, tuple)) else [functions]:
                stack.enter_context(function())
            yield


class VocabularyPasses:
    """Of one step with `micro_batches` of them, with a backward pass or without.

    Attributes:
        ids: token ids `[P B, S]`, until the embedding has its gradient.
        sums: of the embedding, on the first stage of B sequences, on the last one of the others if P > 1.
        hidden: hidden states `[S, P B, H]` and labels `[S, P B]`, on the last stage.
        results: functions that wait for a `linear_steps.Result`.
        grad_losses: `[S, P B]`, on the last stage.
        grad_embeddings: on the stages that have `sums`.
    """

    def __init__(
        self,
        messages: StageMessages,
        embedding: SharedEmbedding,
        output: SharedOutputLayer,
        sync: GradientSync,
        micro_batches: int,
        backward: bool,
    ):
        self.messages, self.groups, self.marks = messages, messages.groups, messages.marks
        self.embedding, self.output, self.sync, self.backward = embedding, output, sync, backward
        self.options = HeadOptions(
            self.groups.statistics,
            output.vocab,
            ignore_index=IGNORE_INDEX,
            cache=1,
            hits=output.mtp_layers > 0 and counts_acceptance(),
            fuse_main_grad=output.gradient_accumulation_fusion,
        )
        self.asks_further = self.groups.is_last and messages.predictions > 1
        self.side = SideWork(output.weight.device)
        self.ids: dict[int, Tensor] = {}
        self.sums: dict[int, Pending] = {}
        self.hidden: dict[int, tuple[Tensor, Tensor]] = {}
        self.results: dict[int, Callable[[], Any]] = {}
        self.grad_losses: dict[int, Tensor] = {}
        self._grad_parts: dict[int, dict[int, Tensor]] = {}
        self.grad_embeddings: dict[int, Tensor] = {}
        # How often each parameter will get a gradient yet.
        tied = output.weight is embedding.weight
        self.left: dict[Tensor, int] = dict.fromkeys((embedding.weight, output.weight), micro_batches * (1 + tied))

    def close(self) -> None:
        self.side.close()

    def look_up(self, what: Pass) -> None:
        n = what.micro_batch
        received = self.messages.arrived(what, "tokens")
        if received is not None:
            self.ids[n] = received[0].clone()
        ids, vocab = self.ids[n], self.embedding.vocab
        if not self.backward and not self.asks_further:
            del self.ids[n]

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
        parts = part.split([batch, ids.shape[0] - batch], batch_dim)
        for stage, own in zip((0, self.groups.last), parts, strict=True):
            if own.numel():
                pending = collectives.start_reduce(own.contiguous(), self.groups["embedding"], stage)
                if self.groups.stage == stage:
                    self.sums[n] = pending
                else:
                    self.messages.sent.append(pending)

    def embedding_of(self, n: int) -> Tensor:
        """The embedding that this stage's layers asked for, when all stages have looked up their rows."""
        found = self.sums.pop(n).wait()
        slices = self.embedding.reduce_scatter_embeddings
        return found if slices else collectives.all_reduce(found, self.groups.tp, in_place=True)

    def further(self, n: int) -> tuple[Tensor, Tensor, Callable[[Tensor], None]]:
        """For the layers of multi-token prediction: their token ids, embeddings, and who takes the gradient."""
        ids = self.ids[n][self.messages.sizes(n).batch :]
        if not self.backward:
            del self.ids[n]
        return ids, self.embedding_of(n), lambda grad: self.send_embedding_gradient(n, grad)

    def no_hidden(self, n: int) -> tuple[Tensor, Tensor]:
        """In the place of hidden states and labels of a micro-batch that failed."""
        _, sequence, piece, width, _ = sizes = self.messages.sizes(n)
        weight = self.output.weight
        labels = torch.full((sequence, sizes.sequences), IGNORE_INDEX, dtype=torch.int64, device=weight.device)
        return weight.new_zeros(piece, sizes.sequences, width), labels

    def multiply(self, what: Pass) -> None:
        n = what.micro_batch
        hidden, labels = self.messages.arrived(what, "hidden") or self.hidden.pop(n)
        if self.output.sequence_parallel:
            hidden = collectives.all_gather(hidden, self.groups.tp)
        hidden_TD, labels_T = hidden.flatten(0, -2), labels.flatten()

        def go(weight: Tensor) -> Any:
            return linear_steps.products(hidden_TD, weight, labels_T, self.options, self.backward)

        found = self.marks.attempt(lambda: self.output(go))
        weight = self.output.weight.detach()
        if found is None:  # take part in the exchange
            ignored_T = labels_T.new_full(labels_T.shape, IGNORE_INDEX)
            found = linear_steps.products(
                hidden_TD.new_zeros(hidden_TD.shape), weight, ignored_T, self.options, self.backward
            )
        statistics = linear_steps.start_exchange(found, self.options)
        result = self.side.start(lambda: self._result(found, statistics, weight), tree_leaves(found))
        if self.backward or self.groups.is_last:
            self.results[n] = result

    def _result(self, found: linear_steps.Products, statistics: Pending, weight: Tensor) -> Any:
        """On the side stream: a `linear_steps.Result`; on the last stage its `unit_dx_TD` is summed over all ranks."""
        stats_RKT = statistics.wait()
        result = self.marks.attempt(lambda: linear_steps.result(found, stats_RKT, weight, self.options))
        if result is None:
            unit = weight.new_zeros(found.x_TD.shape) if self.backward else None
            loss = torch.zeros_like(found.first.shift_T)
            hits = loss.bool() if self.options.hits else None
            result = linear_steps.Result(loss, hits, unit, found, None)  # type: ignore[arg-type]
        unit = result.unit_dx_TD
        if unit is not None:
            if self.output.sequence_parallel:
                unit = collectives.reduce_scatter(unit, self.groups.tp_aside)
            unit = collectives.start_reduce(unit.contiguous(), self.groups["sum"], self.groups.last).wait()
            if self.groups.is_last and not self.output.sequence_parallel:
                unit = collectives.all_reduce(unit, self.groups.tp_aside, in_place=True)
        return result._replace(unit_dx_TD=unit if self.groups.is_last else None)

    def take_loss_gradient(self, n: int, which: int, grad_BS: Tensor) -> Tensor:
        """Of one prediction. It is sent with that of the last one; returned is this rank's slice of it, `[S/R, B]`."""
        grad_SB = grad_BS.detach().t().contiguous().float()
        parts = self._grad_parts.setdefault(n, {})
        parts[which] = grad_SB
        if len(parts) == self.messages.predictions:
            self.send_loss_gradient(n)
        piece = self.messages.sizes(n).slice
        start = parallel_state.get_tensor_model_parallel_rank() * piece if self.output.sequence_parallel else 0
        return grad_SB[start : start + piece]

    def send_loss_gradient(self, n: int) -> None:
        """To all stages, once; zeros for what has none."""
        if n in self.grad_losses:
            return
        batch, sequence, *_ = self.messages.sizes(n)
        parts = self._grad_parts.pop(n, {})
        nothing = torch.zeros(sequence, batch, device=self.output.weight.device)
        grad = torch.cat([parts.get(which, nothing) for which in range(self.messages.predictions)], 1)
        self.grad_losses[n] = grad
        self.messages.broadcast("grad_loss", grad)

    def weight_gradient(self, what: Pass) -> None:
        n = what.micro_batch
        received = self.messages.arrived(what, "grad_loss")
        grad = self.grad_losses.pop(n) if received is None else received[0]
        result = self.results.pop(n)()

        def go() -> None:
            weight = self.output.weight
            if weight.requires_grad:
                dw = linear_steps.weight_gradient(result, grad.reshape(-1), weight, self.options)
                self._contribute(weight, dw)

        self.marks.attempt(go)

    def send_embedding_gradient(self, n: int, grad: Tensor) -> None:
        """Of what this stage's layers asked for."""
        grad = grad.detach().to(self.output.weight.dtype)
        self.grad_embeddings[n] = grad
        self.messages.broadcast("grad_embedding" if self.groups.is_first else "grad_further", grad)

    def embedding_gradient(self, what: Pass) -> None:
        n = what.micro_batch
        parts = []
        for kind in ("grad_embedding", "grad_further")[: min(self.messages.predictions, 2)]:
            received = self.messages.arrived(what, kind)
            parts.append(self.grad_embeddings.pop(n) if received is None else received[0])
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
            with self.sync.held_until(self.left[weight] == 0):
                weight.backward(gradient)

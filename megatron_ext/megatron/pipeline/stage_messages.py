"""What a stage sends and receives in one step, pass by pass: one message for each, with the mark of a failure in it."""

from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.megatron.pipeline.groups import PipelineGroups
from megatron_ext.megatron.pipeline.packed_messages import Form, Marks, empty_parcel
from megatron_ext.megatron.pipeline.pass_order import Kind, Pass
from megatron_ext.megatron.pipeline.shared_vocabulary_layers import SharedEmbedding, SharedOutputLayer


class Sizes(NamedTuple):
    """Of a micro-batch on this rank: B, S of all tensor-parallel ranks, S of its slice, H, P predictions a position."""

    batch: int
    sequence: int
    slice: int
    hidden: int
    predictions: int

    @property
    def sequences(self) -> int:
        """P B"""
        return self.predictions * self.batch


class Message(NamedTuple):
    """What arrives for a pass: from which stage, in the group for which kind, and what."""

    kind: str
    source: int
    forms: list[Form]


class StageMessages:
    """`marks`: see `packed_messages`. `sent`: what is on its way.

    With `config.variable_seq_lengths` the first stage sends the shape of its token ids before them: the stages learn
    it in the first pass of a micro-batch, `LOOKUP`, which waits for it on the host.
    """

    def __init__(
        self,
        groups: PipelineGroups,
        given: tuple[int, int],
        config: Any,
        embedding: SharedEmbedding,
        output: SharedOutputLayer,
        chunks: int,
    ):
        """`given`: micro_batch_size and seq_length of the schedule."""
        self.groups, self.config = groups, config
        self.dtype, self.device = output.weight.dtype, output.weight.device
        self.in_slices, self.last_chunk = embedding.reduce_scatter_embeddings, chunks - 1
        self.predictions = 1 + output.mtp_layers
        self.marks = Marks(self.device)
        self.sent: list[Pending] = []
        batch, sequence = given
        self.given = self._sizes(batch, sequence // parallel_state.get_context_parallel_world_size())
        self.vary = bool(config.variable_seq_lengths)
        self._found: dict[int, Sizes] = {}
        self._arriving: dict[tuple[Pass, str], Pending] = {}

    def _sizes(self, batch: int, sequence: int) -> Sizes:
        ranks = parallel_state.get_tensor_model_parallel_world_size() if self.config.sequence_parallel else 1
        return Sizes(batch, sequence, sequence // ranks, self.config.hidden_size, self.predictions)

    def sizes(self, micro_batch: int) -> Sizes:
        """Known from `LOOKUP` on, on the first stage from `TOKENS`."""
        return self._found[micro_batch] if self.vary else self.given

    def messages(self, what: Pass) -> list[Message]:
        """What arrives for a pass from other stages."""
        n, kind, groups = what.micro_batch, what.kind, self.groups
        stage, last = groups.stage, groups.last
        batch, sequence, piece, width, predictions = sizes = self.sizes(n)
        activations: list[Form] = [((piece, batch, width), self.config.pipeline_dtype)]
        if kind is Kind.FORWARD:
            first = groups.is_first and what.chunk == 0
            return [] if first else [Message("forward", (stage - 1) % groups.stages, activations)]
        if kind is Kind.BACKWARD:
            at_the_end = groups.is_last and what.chunk == self.last_chunk
            return [] if at_the_end else [Message("backward", (stage + 1) % groups.stages, activations)]
        tokens, losses = (sizes.sequences, sequence), (sequence, sizes.sequences)
        found = []
        if kind is Kind.LOOKUP:
            found = [Message("tokens", 0, [(tokens, torch.int64)])]
        elif kind is Kind.PRODUCTS:
            hidden = (piece, sizes.sequences, width)
            found = [Message("hidden", last, [(hidden, self.dtype), (losses, torch.int64)])]
        elif kind is Kind.WEIGHT:
            found = [Message("grad_loss", last, [(losses, torch.float32)])]
        elif kind is Kind.ROWS:
            found = [Message("grad_embedding", 0, [(self.embedding_shape(n, batch), self.dtype)])]
            if predictions > 1:
                further = self.embedding_shape(n, sizes.sequences - batch)
                found.append(Message("grad_further", last, [(further, self.dtype)]))
        return [message for message in found if message.source != stage]

    def embedding_shape(self, micro_batch: int, sequences: int) -> tuple[int, int, int]:
        """Of the embedding of that many sequences, as the layers get it on this rank."""
        _, sequence, piece, width, _ = self.sizes(micro_batch)
        return (piece, sequences, width) if self.in_slices else (sequences, sequence, width)

    def expect(self, what: Pass) -> None:
        """Begin to receive what a pass needs, if its shapes are known yet."""
        if self.vary and what.micro_batch not in self._found:
            return
        for message in self.messages(what):
            if (what, message.kind) not in self._arriving:
                self._arriving[what, message.kind] = self._receive(message)

    def _receive(self, message: Message) -> Pending:
        buffer, group = empty_parcel(message.forms, self.device), self.groups[message.kind]
        neighbour = message.kind in ("forward", "backward")
        receive = collectives.start_receive if neighbour else collectives.start_broadcast
        return receive(buffer, group, message.source)

    def wait_for(self, what: Pass) -> None:
        if self.vary and what.micro_batch not in self._found and what.kind is Kind.LOOKUP:
            forms: list[Form] = [((2,), torch.int64)]
            (shape,) = self.marks.unpack(self._receive(Message("tokens", 0, forms)).wait(), forms)
            self.found(what.micro_batch, *shape.tolist())
        self.expect(what)
        for (one, _), pending in self._arriving.items():
            if one == what:
                pending.wait()

    def found(self, micro_batch: int, batch: int, sequence: int) -> None:
        """The shape of a micro-batch's token ids is known."""
        self._found[micro_batch] = self._sizes(batch, sequence)

    def arrived(self, what: Pass, kind: str) -> list[Tensor] | None:
        """None: this stage has it, nothing is sent."""
        pending = self._arriving.pop((what, kind), None)
        if pending is None:
            return None
        (forms,) = (message.forms for message in self.messages(what) if message.kind == kind)
        return self.marks.unpack(pending.wait(), forms)

    def broadcast_tokens(self, micro_batch: int, ids: Tensor) -> None:
        """Token ids `[P B, S]` of the first stage, and before them their shape where it may change."""
        if self.vary:
            shape = torch.tensor([ids.shape[0] // self.predictions, ids.shape[1]], device=self.device)
            self.found(micro_batch, *shape.tolist())
            self.broadcast("tokens", shape)
        self.broadcast("tokens", ids)

    def broadcast(self, kind: str, *tensors: Tensor) -> None:
        """This stage's tensors to all the others."""
        self._forget_what_arrived()
        self.sent.append(collectives.start_broadcast(self.marks.pack(*tensors), self.groups[kind], self.groups.stage))

    def send(self, kind: str, tensor: Tensor, stage: int) -> None:
        """Activations or a gradient to another stage (modulo the number of stages)."""
        self._forget_what_arrived()
        target = stage % self.groups.stages
        self.sent.append(collectives.start_send(self.marks.pack(tensor.detach()), self.groups[kind], target))

    def wait_for_sent(self) -> None:
        for pending in self.sent:
            pending.wait()
        self.sent = []

    def _forget_what_arrived(self) -> None:
        self.sent = [pending for pending in self.sent if not pending.done]

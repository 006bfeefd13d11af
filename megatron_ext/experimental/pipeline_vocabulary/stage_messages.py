"""Messages of a stage in one step: one for each exchange, with the mark of a failure in it."""

from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.byte_buffer import Form
from megatron_ext.distributed.collectives import Pending
from megatron_ext.experimental.pipeline_vocabulary.order.passes import Exchange, Sent, Shape, members, sources
from megatron_ext.experimental.pipeline_vocabulary.packed_messages import Marks, empty_parcel
from megatron_ext.experimental.pipeline_vocabulary.shared_vocabulary_layers import Sharing

_OF_TWO = (Sent.FORWARD, Sent.BACKWARD)  # a sender and a receiver; all others are sent to all stages


class MicroBatchSizes(NamedTuple):
    """Sizes of a micro-batch on this rank: B, S whole, S of the rank's slice, H, P predictions a position."""

    batch: int
    sequence: int
    slice: int
    hidden: int
    predictions: int

    @property
    def sequences(self) -> int:
        """Return the number of sequences of all predictions, P B."""
        return self.predictions * self.batch


class StageMessages:
    """Messages of one stage. A pass hands its tensors to `put`; the stage's program says when `launch` sends them, or
    begins to receive; `arrived` gives received tensors to the pass that waits. `marks`: see `packed_messages`.

    With `config.variable_seq_lengths` the first stage sends the shape of its token ids before them: the other stages
    learn it when they launch `Sent.TOKENS`, and wait for it on the host.
    """

    def __init__(self, sharing: Sharing, shape: Shape, config: Any, batch: int, sequence: int):
        """`batch`, `sequence`: micro_batch_size and seq_length of the schedule."""
        self.groups, embedding, output = sharing
        self.shape, self.config = shape, config
        self.dtype, self.device = output.weight.dtype, output.weight.device
        self.in_slices = embedding.reduce_scatter_embeddings
        self.predictions = 1 + output.mtp_layers
        self.marks = Marks(self.device)
        self.given = self._sizes(batch, sequence // parallel_state.get_context_parallel_world_size())
        self.vary = bool(config.variable_seq_lengths)
        self._found: dict[int, MicroBatchSizes] = {}
        self._put: dict[Exchange, Tensor] = {}
        self._own: dict[Exchange, list[Tensor]] = {}
        self._arriving: dict[Exchange, Pending] = {}
        self._sent: list[Pending] = []

    def _sizes(self, batch: int, sequence: int) -> MicroBatchSizes:
        ranks = parallel_state.get_tensor_model_parallel_world_size() if self.config.sequence_parallel else 1
        return MicroBatchSizes(batch, sequence, sequence // ranks, self.config.hidden_size, self.predictions)

    def sizes(self, micro_batch: int) -> MicroBatchSizes:
        """Return a micro-batch's sizes, known once its token ids are launched, or read on the first stage."""
        return self._found[micro_batch] if self.vary else self.given

    def found(self, micro_batch: int, batch: int, sequence: int) -> None:
        """Note the shape of a micro-batch's token ids."""
        self._found[micro_batch] = self._sizes(batch, sequence)

    def forms(self, exchange: Exchange) -> list[Form]:
        """Return shapes and dtypes of the tensors in a message."""
        batch, sequence, piece, width, _ = sizes = self.sizes(exchange.micro_batch)
        tokens, losses = (sizes.sequences, sequence), (sequence, sizes.sequences)
        if exchange.kind in _OF_TWO:
            return [((piece, batch, width), self.config.pipeline_dtype)]
        if exchange.kind is Sent.TOKENS:
            return [(tokens, torch.int64)]
        if exchange.kind is Sent.HIDDEN:
            return [((piece, sizes.sequences, width), self.dtype), (losses, torch.int64)]
        if exchange.kind is Sent.GRAD_LOSS:
            return [(losses, torch.float32)]
        sequences = batch if exchange.kind is Sent.GRAD_EMBEDDING else sizes.sequences - batch
        return [(self.embedding_shape(exchange.micro_batch, sequences), self.dtype)]

    def embedding_shape(self, micro_batch: int, sequences: int) -> tuple[int, int, int]:
        """Return the shape of the embedding of so many sequences, as the layers get it on this rank."""
        _, sequence, piece, width, _ = self.sizes(micro_batch)
        return (piece, sequences, width) if self.in_slices else (sequences, sequence, width)

    def put(self, exchange: Exchange, *tensors: Tensor) -> None:
        """Pack the tensors that this stage will send. Tensors for all stages arrive here too, unpacked."""
        found = [tensor.detach() for tensor in tensors]
        self._put[exchange] = self.marks.pack(*found)
        if exchange.kind not in _OF_TWO:
            self._own[exchange] = found

    def launch(self, exchange: Exchange) -> None:
        """Begin to send the tensors that were put for this exchange, or else to receive."""
        self._sent = [pending for pending in self._sent if not pending.done]
        group, of_two = self.groups[exchange.kind], exchange.kind in _OF_TWO
        if exchange.kind is Sent.TOKENS and self.vary:
            self._launch_shape(exchange.micro_batch, group)
        ((sender, _),) = sources(exchange, self.shape)
        if exchange in self._put:
            buffer = self._put.pop(exchange)
            if of_two:
                self.sent(collectives.start_send(buffer, group, members(exchange, self.shape)[1]))
            else:
                self.sent(collectives.start_broadcast(buffer, group, sender))
        else:
            room = empty_parcel(self.forms(exchange), self.device)
            begin = collectives.start_receive if of_two else collectives.start_broadcast
            self._arriving[exchange] = begin(room, group, sender)

    def _launch_shape(self, micro_batch: int, group: Any) -> None:
        if self.groups.is_first:
            batch, sequence = self._found[micro_batch][:2]
            shape = torch.tensor([batch, sequence], device=self.device)
            self.sent(collectives.start_broadcast(shape, group, 0))
        else:
            shape = torch.zeros(2, dtype=torch.int64, device=self.device)
            self.found(micro_batch, *collectives.start_broadcast(shape, group, 0).wait().tolist())

    def wait_for(self, exchange: Exchange) -> None:
        """Let the current stream wait for a message that arrives; do nothing for one that this stage has sent."""
        if exchange in self._arriving:
            self._arriving[exchange].wait()

    def arrived(self, exchange: Exchange) -> list[Tensor]:
        if exchange in self._own:
            return self._own.pop(exchange)
        return self.marks.unpack(self._arriving.pop(exchange).wait(), self.forms(exchange))

    def sent(self, pending: Pending) -> None:
        """Keep a message that is on its way."""
        self._sent.append(pending)

    def wait_for_sent(self) -> None:
        for pending in self._sent:
            pending.wait()
        self._sent = []

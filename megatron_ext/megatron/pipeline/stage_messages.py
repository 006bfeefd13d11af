"""What a stage sends and receives in one step, pass by pass: one message for each, with the mark of a failure in it."""

from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.collectives import Pending
from megatron_ext.megatron.pipeline.groups import PipelineGroups
from megatron_ext.megatron.pipeline.parcels import Form, Marks, empty_parcel
from megatron_ext.megatron.pipeline.pass_order import Kind, Pass
from megatron_ext.megatron.pipeline.shared_layers import SharedEmbedding, SharedOutputLayer

# The group, and the stage that has what a pass needs (-1: the last).
_BROADCASTS = {
    Kind.LOOKUP: ("tokens", 0),
    Kind.PRODUCTS: ("hidden", -1),
    Kind.WEIGHT: ("grad_loss", -1),
    Kind.ROWS: ("grad_embedding", 0),
}


class Sizes(NamedTuple):
    """Shapes on this rank: B, S (over all tensor-parallel ranks), S of its slice, H."""

    batch: int
    sequence: int
    slice: int
    hidden: int


def sizes_of(micro_batch_size: int, seq_length: int, config: Any) -> Sizes:
    sequence = seq_length // parallel_state.get_context_parallel_world_size()
    ranks = parallel_state.get_tensor_model_parallel_world_size() if config.sequence_parallel else 1
    return Sizes(micro_batch_size, sequence, sequence // ranks, config.hidden_size)


class StageMessages:
    """`marks`: see `parcels`. `sent`: what is on its way."""

    def __init__(
        self,
        groups: PipelineGroups,
        sizes: Sizes,
        config: Any,
        embedding: SharedEmbedding,
        output: SharedOutputLayer,
        chunks: int,
    ):
        self.groups, self.sizes, self.config = groups, sizes, config
        self.dtype, self.device = output.weight.dtype, output.weight.device
        self.in_slices, self.last_chunk = embedding.reduce_scatter_embeddings, chunks - 1
        self.marks = Marks(self.device)
        self.sent: list[Pending] = []
        self._arriving: dict[Pass, Pending] = {}

    def form(self, what: Pass) -> list[Form] | None:
        """What arrives for a pass from another stage; None if nothing does."""
        batch, sequence, piece, width = self.sizes
        kind, first, last = what.kind, self.groups.is_first, self.groups.is_last
        activations: list[Form] = [((piece, batch, width), self.config.pipeline_dtype)]
        if kind is Kind.FORWARD:
            return None if first and what.chunk == 0 else activations
        if kind is Kind.BACKWARD:
            return None if last and what.chunk == self.last_chunk else activations
        if kind is Kind.LOOKUP:
            return None if first else [((batch, sequence), torch.int64)]
        if kind is Kind.PRODUCTS:
            return None if last else [((piece, batch, width), self.dtype), ((sequence, batch), torch.int64)]
        if kind is Kind.WEIGHT:
            return None if last else [((sequence, batch), torch.float32)]
        if kind is Kind.ROWS:
            shape = (piece, batch, width) if self.in_slices else (batch, sequence, width)
            return None if first else [(shape, self.dtype)]
        return None

    def expect(self, what: Pass) -> None:
        """Begin to receive what a pass needs."""
        form, groups = self.form(what), self.groups
        if form is None or what in self._arriving:
            return
        buffer = empty_parcel(form, self.device)
        if what.kind is Kind.FORWARD:
            source = (groups.stage - 1) % groups.stages
            self._arriving[what] = collectives.start_receive(buffer, groups["forward"], source)
        elif what.kind is Kind.BACKWARD:
            source = (groups.stage + 1) % groups.stages
            self._arriving[what] = collectives.start_receive(buffer, groups["backward"], source)
        else:
            kind, source = _BROADCASTS[what.kind]
            self._arriving[what] = collectives.start_broadcast(buffer, groups[kind], source % groups.stages)

    def are_for(self, what: Pass) -> bool:
        return what in self._arriving

    def wait_for(self, what: Pass) -> None:
        if what in self._arriving:
            self._arriving[what].wait()

    def arrived(self, what: Pass) -> list[Tensor]:
        form = self.form(what)
        assert form is not None
        return self.marks.unpack(self._arriving.pop(what).wait(), form)

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

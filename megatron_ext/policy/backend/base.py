"""A policy's model on one rank, sharded by DTensor or by Megatron: the parts of a worker ask it alone."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import Group, VocabShard, group_rank, group_size, tensor_parallel_group
from megatron_ext.head import ReadOut, batch_invariant_mode
from megatron_ext.policy import device_memory
from megatron_ext.policy.config import Settings, check_positive
from megatron_ext.policy.data.batch import BatchedDataDict, Rows
from megatron_ext.policy.data.batch_plan import MicroBatchBounds, RankCoordinates, Step
from megatron_ext.tensor_parallel.mappings import gather_from_tensor_model_parallel_region

T = TypeVar("T")
Read = Callable[[BatchedDataDict], Tensor]
# Of what was read, its micro-batch, the rows of that, and whether they count: a loss, or None.
Use = Callable[[Tensor, BatchedDataDict, list[int], bool], Tensor | None]


class Export(NamedTuple):
    """A weight for generators: its whole shape, and a function that makes it, which all ranks call."""

    shape: torch.Size
    make: Callable[[], Tensor]


class ReadRequest(NamedTuple):
    """Read-outs of a micro-batch, of each position's label and of `beside` `[B, S, K]`: `columns` numbers in all.

    `labels`: the tokens, -100 where one does not count: such take no part in the head's products, as
    `skip_masked_tokens` says. `rows`, `beside` and `labels` are as the model takes them, padded or packed.
    """

    rows: Rows
    readouts: Callable[..., Sequence[ReadOut]]
    columns: int
    beside: Tensor | None = None
    labels: Tensor | None = None


class Backend(ABC):
    """The model as far as it lies on this rank, its gradients and weights, and the reference policy's weights."""

    model: nn.Module
    vocabulary: int  # how many tokens the model knows: all ids are below

    def __init__(self, settings: Settings, init_reference_model: bool = True):
        self.settings = settings
        self.device = device_memory.join_world()
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.mesh = _mesh(settings, self.device)
        self.dp_rank, self.dp_size = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        stages, ranks = settings.pipeline.stages, settings.context_parallel_size
        self.coordinates = RankCoordinates(self.dp_rank, self.dp_size, world // self.dp_size // stages, stages)
        self.places_multiple = 2 * ranks if ranks > 1 else 1  # a sequence is cut into two pieces a rank
        self.head_options: dict[str, Any] = {
            "temperature": settings.temperature,
            "bits": settings.bits,
            "logit_dtype": settings.logit_dtype,
        }
        self.has_reference_weights = False  # in the model, now
        try:
            self.build_model()
            self.reference = device_memory.copies_on_cpu(self.state().items()) if init_reference_model else None
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def build_model(self) -> None:
        """Sets `model`, sharded, with its weights, and `vocabulary`."""

    @abstractmethod
    def read_out(self, asked: ReadRequest) -> Tensor:
        """`[B, S, columns]`: read-outs of hidden states, over the temperature; see `dtensor.causal_lm_read`."""

    @abstractmethod
    def whole_logits(self, rows: Rows, columns: int) -> Tensor:
        """fp32 `[B, S, columns]`: logits over the temperature, of the whole vocabulary on every rank."""

    @abstractmethod
    def gradient_norm(self) -> float:
        """Return the norm of all ranks' gradients together."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The weights by name, each once: DTensors, or the same on all ranks. They share the model's memory."""

    def exports(self) -> dict[str, Export]:
        """The weights that generators get, by transformers' names."""
        return {name: Export(x.shape, partial(whole, x)) for name, x in self.state().items()}

    def as_global(self, name: str, x: Tensor) -> Tensor:
        """A tensor shaped like this rank's part of the weight `name`, as the DTensor that it is a part of."""
        return x

    def end_inference(self) -> None:
        """Free whole weights that passes without backward leave behind."""
        return

    def reduce_gradients(self) -> None:
        """Finish the sums of gradients over the ranks, after the last backward pass."""
        return

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def move_model(self, device: torch.device) -> None:
        device_memory.move_buffers(self.model, device)
        if not self.settings.cpu_offload:
            self.model.to(device)

    def close(self) -> None:
        """Leave nothing behind that outlives this process; also of a model that was not built whole."""
        return

    def mode(self) -> AbstractContextManager[None]:
        """Return the context of passes: layers keep what `batch_invariant_mode` promises, as the head does."""
        return batch_invariant_mode() if self.settings.batch_invariant_mode else nullcontext()

    def run_passes(self, step: Step, batch: BatchedDataDict, read: Read, use: Use) -> None:
        """Every pass of a step through the model: `read` gives what the model computes of a micro-batch, `use` makes
        of that, where a pipeline ends, a loss to go back from, or None."""
        for rows, counts in step.rows():
            micro_batch = self.micro_batch(batch, rows)
            loss = use(read(micro_batch), micro_batch, rows, counts)
            if loss is not None:
                loss.backward()

    def from_last_stage(self, found: T) -> T:
        """Return on every rank what `run_passes` left on the last stage of a pipeline."""
        return found

    def micro_batch(self, batch: BatchedDataDict, rows: list[int]) -> BatchedDataDict:
        micro_batch = batch.select_indices(rows)
        dynamic = self.settings.batching.kind == "dynamic"
        return micro_batch.cut(max(2, int(micro_batch["input_lengths"].max()))) if dynamic else micro_batch

    def bounds(self, rows: int | None, usual: int, tokens: int, at_most: int | None = None) -> MicroBatchBounds:
        """Bounds of a call's micro-batches; `rows` as the caller gives them, None: `usual`."""
        rows = usual if rows is None else check_positive("mbs (micro_batch_size)", rows)
        kind = self.settings.batching.kind
        return MicroBatchBounds(kind, rows, tokens, self.vocabulary, self.places_multiple, at_most)

    def rows(self, micro_batch: Mapping[str, Any]) -> Rows:
        """The micro-batch's tokens as the model takes them."""
        return Rows.of(micro_batch, self.settings.batching.kind == "packed", self.places_multiple)

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Give the model the reference policy's weights for a while; host memory holds the model's own meanwhile.

        The context may be entered again inside, to no effect. Nothing can be trained, saved, loaded or handed on.
        """
        if self.reference is None:
            raise ValueError("there is no reference policy: the worker was made with init_reference_model=False")
        if self.has_reference_weights:
            yield
            return
        device_memory.exchange(self.state().items(), self.reference)
        self.has_reference_weights = True
        try:
            yield
        finally:
            device_memory.exchange(self.state().items(), self.reference)
            self.has_reference_weights = False

    def refuse_reference(self, act: str) -> None:
        if self.has_reference_weights:
            raise ValueError(
                f"{act} inside use_reference_model(): the model has the reference's weights; leave it first"
            )


def _mesh(settings: Settings, device: torch.device) -> DeviceMesh:
    world, tp, cp = dist.get_world_size(), settings.tensor_parallel_size, settings.context_parallel_size
    pp = settings.pipeline.stages
    if world % (pp * tp * cp):
        stages = f", {pp} pipeline stages" if pp > 1 else ""
        raise ValueError(
            f"{world} ranks with tensor_parallel_size {tp} and context_parallel_size {cp}{stages}: the ranks must be a "
            f"multiple of {pp * tp * cp}"
        )
    sizes = {"pp": pp, "dp": world // (pp * tp * cp), "cp": cp, "tp": tp}
    names = tuple(name for name in sizes if name != "pp" or pp > 1)
    return init_device_mesh(device.type, tuple(sizes[name] for name in names), mesh_dim_names=names)


def whole(x: Tensor) -> Tensor:
    """All of a DTensor, on every rank."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_vocabulary(logits: Tensor, tp_group: Group, vocab: VocabShard) -> Tensor:
    """`[..., V]` of this rank's `[..., V/R]`, on every rank of `tp_group`, which go on with it alike.

    Communicates: forward 1 all-gather, backward nothing.
    """
    group = tensor_parallel_group(tp_group)
    if group_size(group) == 1:
        return logits
    width = (
        -(-vocab.start // group_rank(group)) if group_rank(group) else vocab.columns
    )  # the first shard's, the widest
    padded = F.pad(logits, (0, width - logits.shape[-1])) if width > logits.shape[-1] else logits
    found = gather_from_tensor_model_parallel_region(padded, group)
    return found if found.shape[-1] == vocab.size else found[..., : vocab.size].contiguous()

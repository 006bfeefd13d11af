"""A policy's model on one rank, sharded by DTensor or by Megatron: the parts of a worker call only `Backend`."""

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
# Called with the read-outs, their micro-batch, its row numbers and whether these count; returns a loss, or None.
Use = Callable[[Tensor, BatchedDataDict, list[int], bool], Tensor | None]


class Export(NamedTuple):
    """A weight for generators: its unsharded shape, and a function that returns it, which all ranks must call."""

    shape: torch.Size
    make: Callable[[], Tensor]


class ReadRequest(NamedTuple):
    """The read-outs to compute of a micro-batch: `columns` numbers for each position.

    `readouts` makes them from each position's label and, if given, `beside` `[B, S, K]`. `labels`: the token ids, -100
    where `skip_masked_tokens` may skip the token. `rows`, `beside` and `labels` lie as the model takes them.
    """

    rows: Rows
    readouts: Callable[..., Sequence[ReadOut]]
    columns: int
    beside: Tensor | None = None
    labels: Tensor | None = None


class Backend(ABC):
    """This rank's part of the model, its gradients and weights, and the reference policy's weights."""

    model: nn.Module
    vocabulary: int  # the number of the model's token ids
    plain_shards = False  # whether parts of a weight are tensors by themselves, which an optimizer takes for weights

    def __init__(self, settings: Settings, init_reference_model: bool = True):
        self.settings = settings
        self.device = device_memory.join_world()
        self.rank, world = dist.get_rank(), dist.get_world_size()
        self.mesh = _mesh(settings, self.device)
        self.dp_rank, self.dp_size = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        stages, ranks = settings.pipeline.stages, settings.context_parallel_size
        self.coordinates = RankCoordinates(self.dp_rank, self.dp_size, world // self.dp_size // stages, stages)
        self.places_multiple = 2 * ranks if ranks > 1 else 1  # each rank gets two pieces of a sequence
        self.head_options: dict[str, Any] = {
            "temperature": settings.temperature,
            "bits": settings.bits,
            "logit_dtype": settings.logit_dtype,
        }
        self.has_reference_weights = False  # whether the model holds them now
        try:
            self.build_model()
            self.reference = device_memory.copies_on_cpu(self.state().items()) if init_reference_model else None
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def build_model(self) -> None:
        """Set `model`, sharded and with its weights, and `vocabulary`."""

    @abstractmethod
    def read_out(self, asked: ReadRequest) -> Tensor:
        """Return the read-outs `[B, S, columns]` of logits over the temperature; see `dtensor.causal_lm_read`."""

    @abstractmethod
    def whole_logits(self, rows: Rows, columns: int) -> Tensor:
        """Return the whole vocabulary's logits over the temperature, fp32 `[B, S, columns]`, on every rank."""

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
        """Wrap `x`, shaped like this rank's part of the weight `name`, as the DTensor of which `x` is this part."""
        return x

    def end_inference(self) -> None:
        """Free the unsharded weights that forward passes without a backward pass leave behind."""
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
        """Close whatever else would outlive this backend, also after `build_model` has failed."""
        return

    def mode(self) -> AbstractContextManager[None]:
        """Return the context of passes: layers too are batch-invariant if `batch_invariant_mode` is set."""
        return batch_invariant_mode() if self.settings.batch_invariant_mode else nullcontext()

    def run_passes(self, step: Step, batch: BatchedDataDict, read: Read, use: Use) -> None:
        """Run every pass of a step: `read` runs the model on a micro-batch; `use`, called where the pipeline ends,
        turns the result into a loss, which is differentiated, or into None."""
        for rows, counts in step.rows():
            micro_batch = self.micro_batch(batch, rows)
            loss = use(read(micro_batch), micro_batch, rows, counts)
            if loss is not None:
                loss.backward()

    def from_last_stage(self, found: T) -> T:
        """Return on every rank the last pipeline stage's `found`. Communicates: an all-gather over the stages."""
        return found

    def micro_batch(self, batch: BatchedDataDict, rows: list[int]) -> BatchedDataDict:
        micro_batch = batch.select_indices(rows)
        dynamic = self.settings.batching.kind == "dynamic"
        return micro_batch.cut(max(2, int(micro_batch["input_lengths"].max()))) if dynamic else micro_batch

    def bounds(self, rows: int | None, usual: int, tokens: int, at_most: int | None = None) -> MicroBatchBounds:
        """Return the bounds of a call's micro-batches. `rows`: the caller's micro-batch size, None for `usual`."""
        rows = usual if rows is None else check_positive("mbs (micro_batch_size)", rows)
        kind = self.settings.batching.kind
        return MicroBatchBounds(kind, rows, tokens, self.vocabulary, self.places_multiple, at_most)

    def rows(self, micro_batch: Mapping[str, Any]) -> Rows:
        """Lay out the micro-batch's tokens as the model takes them, padded or packed."""
        return Rows.of(micro_batch, self.settings.batching.kind == "packed", self.places_multiple)

    @contextmanager
    def use_reference_model(self) -> Iterator[None]:
        """Give the model the reference policy's weights for a while; host memory holds the model's own meanwhile.

        Entering the context again inside has no effect. Nothing can be trained, saved, loaded or refitted inside.
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
    """Return the whole of a DTensor on every rank, and any other tensor as it is."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def whole_vocabulary(logits: Tensor, tp_group: Group, vocab: VocabShard) -> Tensor:
    """Gather this rank's logits `[..., V/R]` to `[..., V]` on every rank; all must compute the same with the result.

    Communicates: forward 1 all-gather, backward nothing.
    """
    group = tensor_parallel_group(tp_group)
    if group_size(group) == 1:
        return logits
    width = (
        -(-vocab.start // group_rank(group)) if group_rank(group) else vocab.columns
    )  # of the first shard, the widest
    padded = F.pad(logits, (0, width - logits.shape[-1])) if width > logits.shape[-1] else logits
    found = gather_from_tensor_model_parallel_region(padded, group)
    return found if found.shape[-1] == vocab.size else found[..., : vocab.size].contiguous()

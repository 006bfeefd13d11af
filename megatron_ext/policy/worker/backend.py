"""The interface that both backends (DTensor, Megatron) implement: model, gradients, weights by name."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from megatron_ext.head import ReadOut, batch_invariant_mode
from megatron_ext.policy import device_memory
from megatron_ext.policy.config import Settings, read_config
from megatron_ext.policy.data.batch_plan import RankCoordinates
from megatron_ext.policy.data.packed_rows import Rows
from megatron_ext.policy.worker.optimizer import LossScale, make_optimizer, make_scheduler


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
    """A policy's model, optimizer and reference model, as far as they lie on this rank. See `PolicyWorker`."""

    parallel_key: str  # the part of the configuration with the parallel sizes
    _is_reference = False  # whether the model has the reference policy's weights now

    def __init__(self, config: Mapping[str, Any], init_optimizer: bool = True, init_reference_model: bool = True):
        self.cfg = config
        self.settings = read_config(config, self.parallel_key)
        self.device = device_memory.join_world()
        self.rank = dist.get_rank()
        self.mesh = _mesh(self.settings, self.device)
        self.dp_rank, self.dp_size = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        self.model = self._build_model()
        self.reference = device_memory.copies_on_cpu(self._state().items()) if init_reference_model else None
        self.optimizer = make_optimizer(self.model.parameters(), self.settings.optimizer) if init_optimizer else None
        self.scheduler = None if self.optimizer is None else make_scheduler(self.optimizer, self.settings.scheduler)
        self._loss_scale = LossScale(dynamic=self.settings.dtype == torch.float16)

    def _mode(self) -> AbstractContextManager[None]:
        """Return the context of passes: layers keep what `batch_invariant_mode` promises, as the head does."""
        return batch_invariant_mode() if self.settings.batch_invariant_mode else nullcontext()

    @abstractmethod
    def _build_model(self) -> nn.Module:
        """The sharded model, with weights."""

    @abstractmethod
    def _read_out(self, asked: ReadRequest) -> Tensor:
        """`[B, S, columns]`: read-outs of hidden states, over the temperature; see `dtensor.causal_lm_read`."""

    @abstractmethod
    def _whole_logits(self, rows: Rows, columns: int) -> Tensor:
        """fp32 `[B, S, columns]`: logits over the temperature, of the whole vocabulary on every rank."""

    @abstractmethod
    def _end_inference(self) -> None:
        """Called after passes without backward, which may leave whole weights behind."""

    @abstractmethod
    def _reduce_gradients(self) -> None:
        """Finish the sums of gradients over the ranks, after the last backward pass."""

    @abstractmethod
    def _gradient_norm(self) -> float:
        """Return the norm of all ranks' gradients together."""

    @abstractmethod
    def _state(self) -> dict[str, Tensor]:
        """The weights by name, each once: DTensors, or the same on all ranks. They share the model's memory."""

    @property
    @abstractmethod
    def _vocabulary(self) -> int:
        """Return the number of tokens that the model knows: all ids are below."""

    def _exports(self) -> dict[str, Export]:
        """The weights that generators get, by transformers' names."""
        return {name: Export(x.shape, partial(whole, x)) for name, x in self._state().items()}

    def _as_global(self, name: str, x: Tensor) -> Tensor:
        """A tensor shaped like this rank's part of the weight `name`, as the DTensor that it is a part of."""
        return x

    @property
    def _head_options(self) -> dict[str, Any]:
        settings = self.settings
        return {"temperature": settings.temperature, "bits": settings.bits, "logit_dtype": settings.logit_dtype}

    def _refuse_reference(self, act: str) -> None:
        if self._is_reference:
            raise ValueError(
                f"{act} inside use_reference_model(): the model has the reference's weights; leave it first"
            )

    def _zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def _move_model(self, device: torch.device) -> None:
        device_memory.move_buffers(self.model, device)
        if not self.settings.cpu_offload:
            self.model.to(device)

    @property
    def _coordinates(self) -> RankCoordinates:
        stages = self.settings.pipeline.stages
        return RankCoordinates(self.dp_rank, self.dp_size, dist.get_world_size() // self.dp_size // stages, stages)

    @property
    def _places_multiple(self) -> int:
        """Under context parallelism each sequence is cut into two pieces a rank."""
        ranks = self.settings.context_parallel_size
        return 2 * ranks if ranks > 1 else 1


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

"""The policy worker: one rank's part of a policy is trained, scored, sampled, saved and refitted.

A worker has parts, each with the state that is its own: a `Backend` (the model), a `Scorer`, a `Trainer` (the
optimizer), a `Refitter` (weights for generators), a `Generation` and `Checkpoints`. Its methods are those of the parts,
under the names of NeMo-RL's `DTensorPolicyWorker`, with these differences: losses get log-probabilities unless they ask
for logits, the handles of weights are for our `load_weights`, `prepare_refit_info` never returns None, and methods that
only NeMo-RL's worker itself calls are missing. This module adds the methods that move parts between a GPU and the host.

Legend: B rows of this data-parallel rank, S positions. Global ranks go through the mesh (dp, cp, tp), tp fastest.
"""

import inspect
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from operator import attrgetter
from typing import Any, ClassVar, Concatenate, ParamSpec, TypedDict, TypeVar, Unpack, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.policy import device_memory
from megatron_ext.policy.backend.base import Backend
from megatron_ext.policy.config import read_config
from megatron_ext.policy.worker.checkpoints import Checkpoints
from megatron_ext.policy.worker.generation import Generation
from megatron_ext.policy.worker.refitter import Refitter
from megatron_ext.policy.worker.scorer import Scorer
from megatron_ext.policy.worker.trainer import Trainer
from megatron_ext.sequence import cp_utils

P = ParamSpec("P")
T = TypeVar("T")
_PARTS: dict[str, str] = {}  # by the name of a worker's method, the part that has it


class NemoRLArguments(TypedDict, total=False):
    """Arguments that NeMo-RL's policy gives its workers; nothing depends on them here."""

    processor: Any
    worker_sharding_annotations: Any
    pre_init_communication_queue: Any


def _method(part: str, method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Make the worker's method that calls this method of a part, with the same signature and docstring."""
    _PARTS[method.__name__] = part

    @wraps(method)
    def call(self: Any, *args: P.args, **kwargs: P.kwargs) -> T:
        own = getattr(self, part)
        found: T = getattr(type(own), method.__name__)(own, *args, **kwargs)  # a backend's class may be a user's
        return found

    @wraps(method)
    def iterate(self: Any, *args: P.args, **kwargs: P.kwargs) -> Any:
        yield from cast(Iterator[Any], call(self, *args, **kwargs))

    return iterate if inspect.isgeneratorfunction(method) else call  # Ray's actors pass on what a generator yields


def _attribute(name: str) -> Any:
    """Make the worker's attribute that reads and sets `part.attribute`."""
    part, _, own = name.partition(".")
    return property(attrgetter(name), lambda worker, value: setattr(getattr(worker, part), own, value))


class PolicyWorker:
    """One rank's part of a policy's model, optimizer and reference model.

    A worker runs under torchrun, in an actor, or in a process alone: it joins the default process group, or makes it
    (NCCL on GPUs, gloo on the CPU). All ranks must call every method, with the same arguments except `data`.

    Args:
        config: the keys of `megatron_ext.policy.config.read_config`.
        tokenizer: saved by `save_checkpoint` to a `tokenizer_path`; `generate` reads its `pad_token_id`. May be None.
        weights_path, optimizer_path: a checkpoint to begin with.
        init_optimizer: False for a policy that does not train.
        init_reference_model: keep a copy of the first weights in host memory, as the reference policy.
        others: `processor`, `worker_sharding_annotations` and `pre_init_communication_queue`, which NeMo-RL passes;
            nothing depends on them.

    Raises:
        TypeError: an argument is unknown.
        ValueError: the configuration, or a checkpoint, cannot be used.
    """

    parallel_key: ClassVar[str]  # the part of the configuration with the parallel sizes
    backend_class: ClassVar[type[Backend]]

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: Any = None,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        **others: Unpack[NemoRLArguments],
    ):
        if unknown := sorted(others.keys() - NemoRLArguments.__annotations__.keys()):
            raise TypeError(f"{type(self).__name__} got {', '.join(unknown)}: it takes no such arguments; see its Args")
        if optimizer_path is not None and weights_path is None:
            raise ValueError(f"optimizer_path is {optimizer_path} without weights_path: pass the weights saved with it")
        self.backend = self.backend_class(read_config(config, self.parallel_key), init_reference_model)
        try:
            self.scorer = Scorer(self.backend)
            self.trainer = Trainer(self.backend, init_optimizer)
            self.refitter = Refitter(self.backend)
            self.generation = Generation(self.backend, self.refitter, config, tokenizer)
            self.checkpoints = Checkpoints(self.backend, self.trainer, tokenizer)
            self._call_overrides_from_parts()
            if weights_path is not None:
                self.load_checkpoint(weights_path, optimizer_path)
        except BaseException:
            self.backend.close()
            raise

    def _call_overrides_from_parts(self) -> None:
        """Let each part call the methods that a subclass of the worker overrides, instead of the part's own."""
        for name, part in _PARTS.items():
            if getattr(type(self), name) is not getattr(PolicyWorker, name):
                setattr(getattr(self, part), name, getattr(self, name))

    def __repr__(self) -> str:
        return f"{type(self).__name__}[rank={self.rank}]"

    settings = property(attrgetter("backend.settings"))  # read-only: all parts have read them
    cfg, device, rank = _attribute("generation.config"), _attribute("backend.device"), _attribute("backend.rank")
    mesh, dp_rank, dp_size = _attribute("backend.mesh"), _attribute("backend.dp_rank"), _attribute("backend.dp_size")
    model, reference = _attribute("backend.model"), _attribute("backend.reference")
    optimizer, scheduler = _attribute("trainer.optimizer"), _attribute("trainer.scheduler")

    @property
    def tokenizer(self) -> Any:
        return self.checkpoints.tokenizer

    @tokenizer.setter
    def tokenizer(self, tokenizer: Any) -> None:
        self.checkpoints.tokenizer = self.generation.tokenizer = tokenizer

    get_logprobs = _method("scorer", Scorer.get_logprobs)
    get_topk_logits = _method("scorer", Scorer.get_topk_logits)
    score = _method("scorer", Scorer.score)
    get_reference_policy_logprobs = _method("scorer", Scorer.get_reference_policy_logprobs)
    use_reference_model = _method("backend", Backend.use_reference_model)

    train = _method("trainer", Trainer.train)
    begin_train_step = _method("trainer", Trainer.begin_train_step)
    train_microbatch = _method("trainer", Trainer.train_microbatch)
    finish_train_step = _method("trainer", Trainer.finish_train_step)
    abort_train_step = _method("trainer", Trainer.abort_train_step)

    prepare_refit_info = _method("refitter", Refitter.prepare_refit_info)
    iter_weights = _method("refitter", Refitter.iter_weights)
    iter_weight_buckets = _method("refitter", Refitter.iter_weight_buckets)
    prepare_weights_for_ipc = _method("refitter", Refitter.prepare_weights_for_ipc)
    get_weights_ipc_handles = _method("refitter", Refitter.get_weights_ipc_handles)
    init_collective = _method("refitter", Refitter.init_collective)
    broadcast_weights_for_collective = _method("refitter", Refitter.broadcast_weights_for_collective)

    prepare_for_generation = _method("generation", Generation.prepare_for_generation)
    finish_generation = _method("generation", Generation.finish_generation)
    generate = _method("generation", Generation.generate)

    save_checkpoint = _method("checkpoints", Checkpoints.save_checkpoint)
    load_checkpoint = _method("checkpoints", Checkpoints.load_checkpoint)

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Move the model to the device and, without `keep_train_buffers`, the optimizer to host memory.

        The gradients of an open training step are kept in either case.
        """
        self.backend.move_model(self.device)
        self.model.eval()
        if not keep_train_buffers:
            self.offload_before_refit()

    def prepare_for_training(self) -> None:
        """Move model and optimizer to the device."""
        self.backend.move_model(self.device)
        self.model.train()
        if not self.settings.cpu_offload:
            device_memory.move_optimizer(self.optimizer, self.device)
        device_memory.free_cached_memory(self.device)

    def finish_training(self) -> None:
        """Do nothing: NeMo-RL's callers call it after training. Moves are made by `offload_before_refit`."""

    def finish_inference(self) -> None:
        """Move the model to host memory, after scoring."""
        self.trainer.refuse_open_step("finish_inference()")
        self.backend.move_model(torch.device("cpu"))
        self.model.eval()
        device_memory.free_cached_memory(self.device)

    def offload_before_refit(self) -> None:
        """Move the optimizer to host memory."""
        device_memory.move_optimizer(self.optimizer, torch.device("cpu"))
        device_memory.free_cached_memory(self.device)

    def offload_after_refit(self) -> None:
        """Move model and optimizer to host memory, and free the weights that were shared with other processes."""
        self.trainer.refuse_open_step("offload_after_refit()")
        self.refitter.free_held()
        self.backend.move_model(torch.device("cpu"))
        self.model.eval()
        self.offload_before_refit()

    def return_state_dict(self) -> dict[str, Tensor]:
        """Return the weights by name: DTensors, or tensors alike on all ranks, that share the model's memory."""
        return self.backend.state()

    def return_model_config(self) -> Any:
        """Return the model's configuration: transformers' or Megatron's object."""
        return self.model.config

    def is_alive(self) -> bool:
        return True

    def get_gpu_info(self) -> dict[str, Any]:
        """Return this rank's device, its host and, on a GPU, its memory in MiB."""
        info = {"rank": self.rank, "world_size": dist.get_world_size(), "device": str(self.device)}
        info |= {"device_id": device_memory.device_id(self.device), "node": platform.node()}
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            amounts = {
                "free": free,
                "total": total,
                "allocated": torch.cuda.memory_allocated(self.device),
                "reserved": torch.cuda.memory_reserved(self.device),
                "peak_allocated": torch.cuda.max_memory_allocated(self.device),
            }
            info |= {f"{name}_mib": amount / 2**20 for name, amount in amounts.items()}
        return info

    def get_free_memory_bytes(self) -> int:
        """Return the bytes that all processes leave free on this rank's GPU; of the host, without a GPU."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def report_device_id(self) -> str:
        """Return "GPU-..." as in NVML, or "CPU-" and the name of the host."""
        return device_memory.device_id(self.device)

    def reset_peak_memory_stats(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def start_gpu_profiling(self) -> None:
        """Start CUDA's profiler; do nothing on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.profiler.start()

    def stop_gpu_profiling(self) -> None:
        """Stop CUDA's profiler; do nothing on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.profiler.stop()

    def move_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the model's parameters and buffers to `device`, and return the model."""
        return self.move_buffer_to_device(model, device).to(device)

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """Move the model to this rank's device, its GPU or else the CPU, and return the model."""
        model = self.move_to_device(model, self.device)
        device_memory.free_cached_memory(self.device)
        return model

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """Move the model to host memory, and return it."""
        model = self.move_to_device(model, "cpu")
        device_memory.free_cached_memory(self.device)
        return model

    def move_buffer_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """Move the model's buffers, which FSDP2 leaves behind, to `device`, and return the model."""
        device_memory.move_buffers(model, torch.device(device))
        return model

    create_context_parallel_ctx = staticmethod(cp_utils.create_context_parallel_ctx)

    @staticmethod
    @contextmanager
    def train_context(cp_context: AbstractContextManager[Any] | None = None) -> Iterator[None]:
        """Enter the context of a pass: `cp_context`, made by `create_context_parallel_ctx`, or an empty one."""
        with cp_utils.get_train_context(False, False, cp_context):
            yield

    def shutdown(self) -> None:
        """Free shared weights and the generator's copy, and close the backend's groups."""
        self.refitter.close()
        self.finish_generation()
        self.backend.close()

"""The base of both policy workers: one rank's part of the model is trained, scored, saved and refitted.

`PolicyWorker` is what the backends have in common: training, scoring and refitting from the modules of these names, on
what `backend` asks them for; and here checkpoints, and where things lie. The interface is NeMo-RL's
`DTensorPolicyWorker`, but: losses get log-probabilities unless they ask for logits, the handles of weights are for our
`load_weights`, `prepare_refit_info` always has an answer, and what NeMo-RL's worker calls only itself is missing.

Legend: B rows of this data-parallel rank, S positions. Global ranks go through the mesh (dp, cp, tp), tp fastest.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_ext.policy import device_memory
from megatron_ext.policy.data.agreement_of_ranks import agree
from megatron_ext.policy.data.timer import Timer, timed
from megatron_ext.policy.worker.checkpoints import load_policy, save_policy
from megatron_ext.policy.worker.generation import Generating
from megatron_ext.policy.worker.partial_train_step import TrainSteps
from megatron_ext.sequence import cp_utils

# Arguments that NeMo-RL's policy gives its workers, and these do without.
_OTHERS = {"processor", "worker_sharding_annotations", "pre_init_communication_queue"}


class PolicyWorker(TrainSteps, Generating):
    """A policy's model, optimizer and reference model, as far as they lie on this rank.

    Runs under torchrun, in an actor, or in a process alone: it joins the default process group, or makes it (NCCL on
    GPUs, gloo on the CPU). All ranks call every method, with the same arguments but for `data`.

    Args:
        config: the keys of `megatron_ext.policy.config.read_config`.
        tokenizer: saved with checkpoints where it is asked for; else not needed.
        weights_path, optimizer_path: a checkpoint to begin with.
        init_optimizer: False for a policy that is only scored with.
        init_reference_model: keep a copy of the first weights in host memory, as the reference policy.
        others: `processor`, `worker_sharding_annotations` and `pre_init_communication_queue`, which NeMo-RL passes;
            nothing depends on them.

    Raises:
        ValueError: the configuration, or a checkpoint, cannot be used.
    """

    def __init__(
        self,
        config: Mapping[str, Any],
        tokenizer: Any = None,
        weights_path: str | None = None,
        optimizer_path: str | None = None,
        init_optimizer: bool = True,
        init_reference_model: bool = True,
        **others: Any,
    ):
        if unknown := sorted(others.keys() - _OTHERS):
            raise ValueError(
                f"{type(self).__name__} got {', '.join(unknown)}: it takes no such arguments; see its Args"
            )
        if optimizer_path is not None and weights_path is None:
            raise ValueError(f"optimizer_path is {optimizer_path} without weights_path: give the weights saved with it")
        self.tokenizer = tokenizer
        try:
            super().__init__(config, init_optimizer, init_reference_model)
            if weights_path is not None:
                self.load_checkpoint(weights_path, optimizer_path)
        except BaseException:
            self.shutdown()
            raise

    def __repr__(self) -> str:
        return f"{type(self).__name__}[rank={self.rank}]"

    def prepare_for_lp_inference(self, keep_train_buffers: bool = False) -> None:
        """Model on the device, optimizer in host memory; with `keep_train_buffers` it stays where it is.

        The gradients of an open training step are kept in either case.
        """
        self._move_model(self.device)
        self.model.eval()
        if not keep_train_buffers:
            self.offload_before_refit()

    def prepare_for_training(self, *_: Any, **__: Any) -> None:
        """Model and optimizer on the device. Arguments are for other implementations of the interface."""
        self._move_model(self.device)
        self.model.train()
        if not self.settings.cpu_offload:
            device_memory.move_optimizer(self.optimizer, self.device)
        device_memory.free_cached_memory(self.device)

    def finish_training(self, *_: Any, **__: Any) -> None:
        """Do nothing: NeMo-RL's callers call it after training. Moves are made by `offload_before_refit`."""

    def finish_inference(self) -> None:
        """Model to host memory, after scores that are all for now."""
        self._refuse_open_step("finish_inference()")
        self._move_model(torch.device("cpu"))
        self.model.eval()
        device_memory.free_cached_memory(self.device)

    def offload_before_refit(self) -> None:
        """Optimizer to host memory."""
        device_memory.move_optimizer(self.optimizer, torch.device("cpu"))
        device_memory.free_cached_memory(self.device)

    def offload_after_refit(self) -> None:
        """Model and optimizer to host memory; weights that were shared with other processes are released."""
        self._refuse_open_step("offload_after_refit()")
        self._free_held()
        self._move_model(torch.device("cpu"))
        self.model.eval()
        self.offload_before_refit()

    def save_checkpoint(
        self,
        weights_path: str,
        optimizer_path: str | None = None,
        tokenizer_path: str | None = None,
        checkpointing_cfg: Mapping[str, Any] | None = None,
        timer: Timer | None = None,
    ) -> None:
        """Writes the weights, and where asked optimizer with schedule, and tokenizer, to folders of these names.

        Weights and optimizer change together, or not at all, and only when every rank sees all that was written; see
        `megatron_ext.policy.checkpoint.sharded_files`. A path that is a link is followed.

        Args:
            checkpointing_cfg: NeMo-RL's configuration of checkpoints. What asks for files of another kind is refused;
                the other keys say when to save and what to keep, which is the caller's.
            timer: as NeMo-RL's, measures "save_checkpoint".

        Raises:
            ValueError: the ranks do not share a path, or it holds something else; on every rank.
            OSError: the files cannot be written, or read as they were written; on every rank.
                What the paths held before is still there.
        """
        if tokenizer_path is not None and self.tokenizer is None:
            raise ValueError("tokenizer_path without a tokenizer: give the worker one, or leave the path out")
        _check_format(checkpointing_cfg or {})
        self._refuse_reference("save_checkpoint()")

        def save_tokenizer() -> None:
            if self.rank == 0:
                self.tokenizer.save_pretrained(tokenizer_path)

        with timed(timer, "save_checkpoint"):
            save_policy(self, weights_path, optimizer_path)
            if tokenizer_path is not None:
                agree(save_tokenizer)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Reads what `save_checkpoint` wrote, in this or another layout. Executes nothing of it.

        Raises:
            ValueError: on every rank, if it is incomplete, damaged, of another model or optimizer, or of two saves.
                Nothing has changed.
        """
        self._refuse_reference("load_checkpoint()")
        self._refuse_open_step("load_checkpoint()")
        load_policy(self, weights_path, optimizer_path)

    def return_state_dict(self) -> dict[str, Tensor]:
        """The weights by name: DTensors that share the model's memory, or the same on all ranks."""
        return self._state()

    def return_model_config(self) -> Any:
        """The model's configuration: transformers' or Megatron's object."""
        return self.model.config

    def is_alive(self) -> bool:
        return True

    def get_gpu_info(self) -> dict[str, Any]:
        """This rank's device by name, and its memory in MiB."""
        return {"rank": self.rank, "world_size": dist.get_world_size(), **device_memory.device_info(self.device)}

    def get_free_memory_bytes(self) -> int:
        """Return the bytes that all processes leave free on this rank's GPU; of the host, without a GPU."""
        return device_memory.free_bytes(self.device)

    def report_device_id(self) -> str:
        """ "GPU-..." as NVML has it, or "CPU-" and the name of the host."""
        return device_memory.device_id(self.device)

    def reset_peak_memory_stats(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def start_gpu_profiling(self) -> None:
        """Starts CUDA's profiler; does nothing on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.profiler.start()

    def stop_gpu_profiling(self) -> None:
        """Stops CUDA's profiler; does nothing on the CPU."""
        if self.device.type == "cuda":
            torch.cuda.profiler.stop()

    def move_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """The model, parameters and buffers, on `device`; the same object."""
        return self.move_buffer_to_device(model, device).to(device)

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """The model on this rank's device: its GPU, or the CPU where the worker runs without one."""
        model = self.move_to_device(model, self.device)
        device_memory.free_cached_memory(self.device)
        return model

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """The model in host memory."""
        model = self.move_to_device(model, "cpu")
        device_memory.free_cached_memory(self.device)
        return model

    def move_buffer_to_device(self, model: nn.Module, device: str | torch.device) -> nn.Module:
        """The model with its buffers on `device`, which FSDP2 leaves behind; the same object."""
        device_memory.move_buffers(model, torch.device(device))
        return model

    create_context_parallel_ctx = staticmethod(cp_utils.create_context_parallel_ctx)

    @staticmethod
    @contextmanager
    def train_context(cp_context: AbstractContextManager[Any] | None = None) -> Iterator[None]:
        """The context of a pass through the model: `cp_context`, of `create_context_parallel_ctx`, or an empty one."""
        with cp_utils.get_train_context(False, False, cp_context):
            yield

    def shutdown(self) -> None:
        """Leaves nothing behind that outlives this process."""
        self._free_held()
        self.finish_generation()
        self._to_generators = None


def _check_format(checkpointing: Mapping[str, Any]) -> None:
    """Raises ValueError where NeMo-RL's configuration asks for files that `save_checkpoint` does not write."""
    for key in ("model_save_format", "save_consolidated", "is_peft", "is_async"):
        if checkpointing.get(key) not in (None, "torch_save" if key == "model_save_format" else False):
            raise ValueError(
                f"checkpointing_cfg.{key} is {checkpointing[key]!r}: checkpoints are torch.distributed.checkpoint's "
                f"files of whole weights, written before save_checkpoint() returns; leave the key out"
            )

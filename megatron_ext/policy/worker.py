"""A policy on this rank's share of the model: trains it, scores with it, saves it, hands its weights on.

`PolicyWorker` is what the backends have in common: training, scoring and refitting from the modules of these names, on
what `backend` asks them for; and here checkpoints, and where things lie. The interface is NeMo-RL's
`DTensorPolicyWorker`, but: losses get log-probabilities instead of logits, the handles of weights are for our
`load_weights`, `prepare_refit_info` always has an answer, and what NeMo-RL's worker calls only itself is missing.

Legend: B rows of this data-parallel rank, S positions. Global ranks go through the mesh (dp, cp, tp), tp fastest.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.policy import memory
from megatron_ext.policy.agreement import agree
from megatron_ext.policy.refitting import Refitting
from megatron_ext.policy.state import load_policy, save_policy
from megatron_ext.policy.training import Training

# Arguments that NeMo-RL's policy gives its workers, and these do without.
_OTHERS = {"processor", "worker_sharding_annotations", "pre_init_communication_queue"}


class PolicyWorker(Training, Refitting):
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

    def prepare_for_lp_inference(self) -> None:
        """Model on the device, optimizer in host memory."""
        self._move_model(self.device)
        self.model.eval()
        self.offload_before_refit()

    def prepare_for_training(self, *_: Any, **__: Any) -> None:
        """Model and optimizer on the device. Arguments are for other implementations of the interface."""
        self._move_model(self.device)
        self.model.train()
        if not self.settings.cpu_offload:
            memory.move_optimizer(self.optimizer, self.device)
        memory.free_cached_memory(self.device)

    def offload_before_refit(self) -> None:
        """Optimizer to host memory."""
        memory.move_optimizer(self.optimizer, torch.device("cpu"))
        memory.free_cached_memory(self.device)

    def offload_after_refit(self) -> None:
        """Model and optimizer to host memory; weights that were laid open are gone."""
        self._free_held()
        self._move_model(torch.device("cpu"))
        self.model.eval()
        self.offload_before_refit()

    def save_checkpoint(
        self, weights_path: str, optimizer_path: str | None = None, tokenizer_path: str | None = None
    ) -> None:
        """Writes the weights, and where asked optimizer with schedule, and tokenizer, to folders of these names.

        Weights and optimizer change together, or not at all; see `megatron_ext.policy.folders`.

        Raises:
            ValueError, OSError: on every rank.
        """
        if tokenizer_path is not None and self.tokenizer is None:
            raise ValueError("tokenizer_path without a tokenizer: give the worker one, or leave the path out")
        self._refuse_reference("save_checkpoint()")
        save_policy(self, weights_path, optimizer_path)

        def save_tokenizer() -> None:
            if self.rank == 0:
                self.tokenizer.save_pretrained(tokenizer_path)

        if tokenizer_path is not None:
            agree(save_tokenizer)

    def load_checkpoint(self, weights_path: str, optimizer_path: str | None = None) -> None:
        """Reads what `save_checkpoint` wrote, in this or another layout. Executes nothing of it.

        Raises:
            ValueError: on every rank, if it is incomplete, damaged, of another model or optimizer, or of two saves.
                Nothing has changed.
        """
        self._refuse_reference("load_checkpoint()")
        load_policy(self, weights_path, optimizer_path)

    def return_state_dict(self) -> dict[str, Tensor]:
        """The weights by name: DTensors that share the model's memory, or the same on all ranks."""
        return self._state()

    def is_alive(self) -> bool:
        return True

    def get_gpu_info(self) -> dict[str, Any]:
        """This rank's device by name, and its memory in MiB."""
        return {"rank": self.rank, "world_size": dist.get_world_size(), **memory.device_info(self.device)}

    def report_device_id(self) -> str:
        """ "GPU-..." as NVML has it, or "CPU-" and the name of the host."""
        return memory.device_id(self.device)

    def reset_peak_memory_stats(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def start_gpu_profiling(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.profiler.start()

    def stop_gpu_profiling(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.profiler.stop()

    def shutdown(self) -> None:
        """Leaves nothing behind that outlives this process."""
        self._free_held()
        self._to_generators = None

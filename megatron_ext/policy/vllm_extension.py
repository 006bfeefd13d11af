"""A policy's weights into a running vLLM, through the one call that its models have for weights: `load_weights`.

    llm = LLM(model, worker_extension_cls="megatron_ext.policy.vllm_extension.PolicyWeights", ...)
    refit_vllm(policy, llm)                        # on the actors' host, through shared memory or CUDA IPC

vLLM mixes the class into its worker, so that `collective_rpc` reaches its methods on every rank of the engine. The
weights come unsharded, under the Hub's names; vLLM itself fuses q, k and v, or experts, and shards them. Only bytes,
numbers and strings go through `collective_rpc`: an engine in a process of its own takes no other objects without
`VLLM_ALLOW_INSECURE_SERIALIZATION`.
The idea of an extension class for refitting is vLLM's (its examples of RLHF); NeMo-RL and verl have one each, too.
"""

import pickle
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatron_ext.distributed.group_between_jobs import JobsGroup
from megatron_ext.dtensor.pretrained.saving import Rename, hub_rename, renamed
from megatron_ext.policy.device_memory import device_id
from megatron_ext.policy.refit.weight_transfer import (
    WeightInfo,
    WeightsHandle,
    buckets,
    join_collective,
    read_weights,
    receive_buckets,
)

if TYPE_CHECKING:
    from megatron_ext.policy.ray_policy import RayPolicy


class PolicyWeights:
    """Methods added to vLLM's worker, under names that it does not have. They use its `model_runner`, `device`, `rank`.

    Weights are complete after `policy_weights_finish`.
    """

    model_runner: Any
    device: Any
    rank: int
    _policy_group: JobsGroup | None = None
    _policy_rename: Rename | None = None
    _policy_loaded: set[str] | None = None

    def policy_device_id(self) -> str:
        """Return the id of this worker's device, as `get_weights_ipc_handles` takes it."""
        return device_id(torch.device(self.device))

    def policy_weights_load(self, handles: bytes | Mapping[str, WeightsHandle]) -> None:
        """Load one bucket that the policy has shared. `handles`: the bucket's handles by device id, pickled or not.

        Raises:
            ValueError: no handle is for this worker's device; vLLM's model is quantized, or knows no such weight.
        """
        found: Mapping[str, WeightsHandle] = pickle.loads(handles) if isinstance(handles, bytes) else handles
        own = self.policy_device_id()
        if own not in found:
            raise ValueError(
                f"vLLM's rank {self.rank} runs on {own}, and the weights lie on {', '.join(found)}: place the engine "
                f"on the policy's devices, or send them by policy_weights_receive"
            )
        self._policy_load(read_weights(found[own]))

    def policy_weights_join(self, ip: str, port: int, first_rank: int, world_size: int) -> None:
        """Join the group of the policy's `init_collective(ip, port, world_size)` as rank `first_rank` plus this
        worker's rank in its engine; the policy is rank 0."""
        self._policy_group = join_collective(ip, port, first_rank + self.rank, world_size, self.device)

    def policy_weights_receive(self, info: bytes | WeightInfo, buffer_bytes: int) -> None:
        """Load the weights that the policy broadcasts. `info`: the policy's `prepare_refit_info()`, pickled or not;
        `buffer_bytes`: its `refit_buffer_bytes`.

        Raises:
            ValueError: before `policy_weights_join`; or, after all has been received, as in `policy_weights_load`.
        """
        if self._policy_group is None:
            raise ValueError("policy_weights_receive() came before policy_weights_join(); call that first")
        rows: WeightInfo = pickle.loads(info) if isinstance(info, bytes) else info
        receive_buckets(self._policy_load, self._policy_group, rows, buffer_bytes)

    def policy_weights_finish(self) -> None:
        """Check, after the last bucket, that every weight of vLLM's model has come.

        Raises:
            ValueError: the model has weights that did not come.
        """
        loaded, self._policy_loaded = self._policy_loaded, None
        if loaded is None:  # nothing was loaded, or the model does not report what it loaded
            return
        if missing := sorted(set(dict(self.model_runner.model.named_parameters())) - loaded):
            raise ValueError(
                f"vLLM's model did not get {', '.join(missing[:3])} ({len(missing)} weights): it must be built from "
                f"the policy's config"
            )

    def _policy_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        config = getattr(self.model_runner, "vllm_config", None)
        if getattr(config, "quant_config", None) is not None:
            raise ValueError("vLLM's model is quantized, and the policy sends plain weights: build it unquantized")
        if self._policy_rename is None:
            self._policy_rename = hub_rename(self._policy_structure)
        loaded = self.model_runner.model.load_weights(renamed(weights, self._policy_rename))
        if loaded is not None:
            self._policy_loaded = (self._policy_loaded or set()) | set(loaded)

    def _policy_structure(self) -> Any:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_config(self.model_runner.vllm_config.model_config.hf_config)


def refit_vllm(policy: "RayPolicy", llm: Any) -> None:
    """Copy the policy's weights into the engine, which must run on the actors' host and, on GPUs, on their GPUs.

    Args:
        llm: vLLM's `LLM`, or anything with its `collective_rpc(method, args=...)`, whose workers have `PolicyWeights`.

    Memory beside both models: one bucket of `refit_buffer_bytes`.
    """
    _, budget = policy.prepare_weights_for_ipc()
    try:
        devices = sorted(set(llm.collective_rpc("policy_device_id")))
        for bucket in buckets(policy.prepare_refit_info(), int(budget)):
            handles = policy.get_weights_ipc_handles([row.name for row in bucket], devices)
            llm.collective_rpc("policy_weights_load", args=(pickle.dumps(handles),))
        llm.collective_rpc("policy_weights_finish")
    finally:
        policy.free_weights()

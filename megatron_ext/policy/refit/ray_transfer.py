"""The weights of a policy of Ray actors, for generators in this process or elsewhere."""

import platform
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from megatron_ext.policy.device_memory import device_id, visible_devices
from megatron_ext.policy.ray.actors import RayActors
from megatron_ext.policy.refit.weight_transfer import WeightsHandle, buckets, load_weights, read_weights


class RayRefit(RayActors):
    """Actors whose workers pass weights to generators; see `megatron_ext.policy.worker.refitter`."""

    def get_gpu_info(self) -> list[dict[str, Any]]:
        """Return each rank's device, host and, on GPUs, memory in MiB."""
        return self._all("get_gpu_info")

    def prepare_refit_info(self) -> dict[str, Any]:
        return self._all("prepare_refit_info")[0]

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        return self._all("prepare_weights_for_ipc")[0]

    def get_weights_ipc_handles(
        self, keys: Iterable[str], devices: Collection[str] | None = None
    ) -> dict[str, WeightsHandle]:
        """Return the handles of `devices` (None: of all), by device id; see the worker's."""
        found: dict[str, WeightsHandle] = {}
        for handles in self._all("get_weights_ipc_handles", list(keys), devices):
            found |= handles
        return found

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        """Begin the workers' `init_collective`, where rank 0 waits for the generators; pass the result to `wait`."""
        return self._begin("init_collective", ip, port, world_size)

    def broadcast_weights_for_collective(self) -> list[Any]:
        """Begin to send the weights, while the generators receive them; pass the result to `wait`."""
        return self._begin("broadcast_weights_for_collective")

    def refit(self, model: nn.Module) -> None:
        """Copy the policy's weights into a plain model of this process, which must run on an actor's host.

        The weights come from the actor on the model's own device, or on another one that this process sees.

        Memory beside both models: one bucket of `refit_buffer_bytes`, on that device alone.

        Raises:
            ValueError: no actor is on a device of this process.
        """
        for handle in self._handles_for(next(model.parameters()).device):
            load_weights(model, handle)

    def iter_weights(self, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every weight of the policy, unsharded and in `precision`, by transformers' names. This process must run
        on an actor's host: weights are views of an actor's memory on `device`, or on another device that it sees.

        A weight may be used until the next one is asked for; copy it to keep it. For the names in files see
        `megatron_ext.dtensor.pretrained.saving`.

        Raises:
            ValueError: no actor is on a device of this process.
        """
        for handle in self._handles_for(torch.device(device)):
            yield from read_weights(handle)

    def free_weights(self) -> None:
        """Free the weights that were shared with other processes; do nothing if the actors have ended."""
        if self._failure is None:
            self.get_weights_ipc_handles([])

    def _handles_for(self, wanted: torch.device) -> Iterator[WeightsHandle]:
        """Yield handles of all weights, a bucket at a time, on `wanted` or another device that this process sees."""
        _, budget = self.prepare_weights_for_ipc()
        device = self._nearest(wanted)
        try:
            for bucket in buckets(self.prepare_refit_info(), int(budget)):
                names = [row.name for row in bucket]
                yield self.get_weights_ipc_handles(names, [device])[device]
        finally:
            self.free_weights()

    def _nearest(self, own: torch.device) -> str:
        """Return the id of a device that both this process and an actor on its host have: `own`'s, if they have it."""
        actors = {(info["device_id"], info["node"]) for info in self.get_gpu_info()}
        shared = [device for device in visible_devices() if (device, platform.node()) in actors]
        if not shared:
            raise ValueError(
                f"refit() on {platform.node()} sees {', '.join(visible_devices())}, the actors are on "
                f"{', '.join(f'{device} of {host}' for device, host in sorted(actors))}: the model must be on one of "
                "the actors' devices; otherwise use init_collective"
            )
        return device_id(own) if device_id(own) in shared else shared[0]

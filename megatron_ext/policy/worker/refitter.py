"""A worker's weights for generators under transformers' names: shared on the same device, or broadcast."""

from collections.abc import Collection, Iterable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from megatron_ext.distributed.group_between_jobs import JobsGroup
from megatron_ext.dtensor.pretrained.saving import Rename, hub_rename, renamed
from megatron_ext.policy import device_memory
from megatron_ext.policy.backend.base import Backend
from megatron_ext.policy.backend.model_factories import model_factories
from megatron_ext.policy.config import check_positive
from megatron_ext.policy.data.agreement_of_ranks import agree
from megatron_ext.policy.outside_waits import outside_wait
from megatron_ext.policy.refit import weight_transfer


class Refitter:
    """The weights of a policy for generators, the bucket that is shared with them, and the group for broadcasts."""

    def __init__(self, backend: Backend):
        self.backend, self.settings = backend, backend.settings
        self.held: weight_transfer.HeldWeights | None = None
        self.to_generators: JobsGroup | None = None

    def prepare_refit_info(self) -> dict[str, tuple[torch.Size, torch.dtype]]:
        """Return names, unsharded shapes and dtype of the weights that generators get, in order."""
        return {name: (x.shape, self.settings.dtype) for name, x in self.backend.exports().items()}

    @torch.no_grad()
    def iter_weights(self, hub_names: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of every weight that generators get, and the weight, unsharded in `precision` on the device.

        For generators that this module does not serve itself. Each weight is made when it is asked for, and all ranks
        must iterate to the end. A weight may share memory with the model: copy it if it must outlive the next step.

        Args:
            hub_names: True: the names of files on the Hugging Face Hub, as vLLM's `load_weights` takes them, with each
                expert by itself; False: those of `prepare_refit_info()`. Queries, keys and values, and gate and up, are
                separate weights in both cases; a generator that keeps them fused must join them.

        Communicates: the all-gathers that make each weight whole.
        """
        self.backend.refuse_reference("iter_weights()")
        self.backend.move_model(self.backend.device)
        weights = ((name, x.make().to(self.settings.dtype)) for name, x in self.backend.exports().items())
        yield from renamed(weights, self._hub_rename) if hub_names else weights

    def iter_weight_buckets(
        self, buffer_bytes: int | None = None, hub_names: bool = True
    ) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield weights in lists of at most `buffer_bytes` (None: `refit_buffer_bytes`); a larger weight is alone."""
        limit = self.settings.refit_buffer_bytes
        if buffer_bytes is not None:
            limit = check_positive("buffer_bytes", buffer_bytes)
        bucket: list[tuple[str, Tensor]] = []
        for name, weight in self.iter_weights(hub_names):
            if bucket and sum(x.nbytes for _, x in bucket) + weight.nbytes > limit:
                yield bucket
                bucket = []
            bucket.append((name, weight))
        if bucket:
            yield bucket

    @cached_property
    def _hub_rename(self) -> Rename:
        settings = self.settings
        return hub_rename(model_factories(settings.model, settings.gives_rewards, settings.config_overrides).make_empty)

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Return the name and size in bytes of each weight, and the bytes that should be asked for at a time."""
        self.backend.move_model(self.backend.device)
        sizes = [(name, shape.numel() * dtype.itemsize) for name, (shape, dtype) in self.prepare_refit_info().items()]
        return sizes, float(self.settings.refit_buffer_bytes)

    @torch.no_grad()
    def get_weights_ipc_handles(
        self, keys: Iterable[str], devices: Collection[str] | None = None
    ) -> dict[str, weight_transfer.WeightsHandle]:
        """Share these weights, unsharded, with processes on the same device; return `load_weights`'s handle by its id.

        Weights shared before are freed. One rank of each device shares the weights, and the others return {}.

        Args:
            keys: names of `prepare_refit_info()`.
            devices: ids of the devices to share on (see `report_device_id`), the same on all ranks; None: all.

        Communicates: the all-gathers that make each weight whole; the ids of the devices, with the arguments.

        Raises:
            ValueError: on every rank, if the model lacks a name, or another rank has other arguments.
        """
        self.backend.refuse_reference("get_weights_ipc_handles()")
        self.free_held()
        info = self.prepare_refit_info()
        keys = list(keys)
        rank, here = self.backend.rank, device_memory.device_id(self.backend.device)

        def asked() -> tuple[str, list[str], list[str] | None]:
            if unknown := [key for key in keys if key not in info]:
                raise ValueError(f"the model has no weights {unknown}: pass names of prepare_refit_info()")
            return here, keys, None if devices is None else sorted(devices)

        asked_for = agree(asked)
        if different := [rank for rank, other in enumerate(asked_for) if other[1:] != asked_for[0][1:]]:
            raise ValueError(
                f"get_weights_ipc_handles() was called with other keys or devices on ranks {different} than on rank 0: "
                f"all of them make each weight whole together; pass the same, in the same order, on every rank"
            )
        own = [place for place, *_ in asked_for].index(here) == rank and (devices is None or here in devices)
        chosen = weight_transfer.buckets({key: info[key] for key in keys})

        def lay_open() -> None:
            if own and chosen:
                self.held = weight_transfer.HeldWeights(chosen[0], self.backend.device)

        agree(lay_open)  # memory may be short on one rank
        exports = self.backend.exports()
        for row in chosen[0] if chosen else ():
            weight = exports[row.name].make()
            if self.held is not None:
                row.view(self.held.buffer).copy_(weight)
        if self.held is None:
            return {}
        self.held.finish()
        return {here: self.held.handle}

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Let rank 0 join the generators, which call `join_collective`, as rank 0 of a group of `world_size`.

        Raises:
            RuntimeError: on every rank, if a generator did not come in time.
        """

        def join() -> None:
            if self.backend.rank == 0:
                with outside_wait("the generators to join"):
                    self.to_generators = JobsGroup(ip, port, 0, world_size, self.backend.device)

        agree(join)

    @torch.no_grad()
    def broadcast_weights_for_collective(self) -> None:
        """Send all weights to the generators, which call `receive_weights`.

        Communicates: the all-gathers that make each weight whole; one broadcast for each bucket of weights, of
        `refit_buffer_bytes` at most; two collectives of a few bytes.

        Raises:
            ValueError: on every rank, before `init_collective`, or if a generator expects other buckets.
            RuntimeError: on every rank, if a generator did not come in time; call `init_collective` again then.
        """
        self.backend.refuse_reference("broadcast_weights_for_collective()")
        info, budget = self.prepare_refit_info(), self.settings.refit_buffer_bytes

        def joined() -> None:
            if self.backend.rank == 0 and self.to_generators is None:
                raise ValueError("broadcast_weights_for_collective() came before init_collective(); call that first")
            if self.to_generators is not None:
                with outside_wait("the generators to receive"):
                    weight_transfer.require_same_buckets(info, self.to_generators, budget)

        agree(joined)
        weights = ((name, x.make()) for name, x in self.backend.exports().items())
        try:
            if self.to_generators is not None:
                with outside_wait("the generators to receive"):
                    weight_transfer.send_weights(weights, info, self.to_generators, budget)
        finally:
            for _ in weights:  # the other ranks need this one's part, also where the generators are gone
                pass

    def free_held(self) -> None:
        """Free the weights that were shared with processes on the same device."""
        if self.held is not None:
            self.held.free()
            self.held = None

    def close(self) -> None:
        self.free_held()
        self.to_generators = None

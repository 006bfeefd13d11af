"""Weights from the trainer to processes that hold the plain model, through buffers of bounded size.

Weights are laid into buckets: one-dimensional byte buffers of at most `buffer_bytes` (a larger weight gets a bucket of
its own), with a `Row` for each weight that says where it lies. A bucket travels in one of three ways:

    same host, CPU     a block of shared memory
    same GPU           a CUDA IPC handle of the buffer
    elsewhere          a broadcast over a group of both jobs

Both sides make the same buckets from names, shapes and dtypes alone; before a broadcast they compare these.
"""

import functools
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron_ext.distributed.group_between_jobs import JobsGroup
from megatron_ext.policy.device_memory import device_id, visible_devices
from megatron_ext.policy.refit.shared_memory import BlockAddress, SharedBlock, map_block

WeightInfo = Mapping[str, tuple[torch.Size, torch.dtype]]
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class Row:
    """Position of a weight in its bucket."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Return the offset at which the next weight begins."""
        return self.offset + -(-self.nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    def view(self, buffer: Tensor) -> Tensor:
        """View the weight in its bucket's `buffer`, uint8 `[bytes]`."""
        return buffer[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


Bucket = list[Row]


def buckets(info: WeightInfo, buffer_bytes: float = math.inf) -> list[Bucket]:
    """Lay the weights into buckets, in their order, as many to a bucket as fit."""
    found: list[Bucket] = []
    for name, (shape, dtype) in info.items():
        row = Row(name, tuple(shape), dtype, found[-1][-1].end if found else 0)
        if not found or row.offset + row.nbytes > buffer_bytes:
            found.append([])
            row = replace(row, offset=0)
        found[-1].append(row)
    return found


@dataclass(frozen=True)
class CudaAddress:
    """Address of a buffer on the GPU with the id `device`: the function that opens it, and its arguments."""

    device: str
    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class WeightsHandle:
    """Handle with which another process reads a bucket."""

    rows: Bucket
    where: BlockAddress | CudaAddress


class HeldWeights:
    """One bucket, shared with other processes until `free()` is called or this process ends."""

    def __init__(self, bucket: Bucket, device: torch.device):
        self._block: SharedBlock | None = None
        if device.type == "cuda":
            from torch.multiprocessing.reductions import reduce_tensor

            self.buffer = torch.empty(bucket[-1].end, dtype=torch.uint8, device=device)
            where: BlockAddress | CudaAddress = CudaAddress(device_id(device), *reduce_tensor(self.buffer))
        else:
            self._block = SharedBlock(bucket[-1].end)
            self.buffer, where = self._block.buffer, self._block.address
        self.handle = WeightsHandle(bucket, where)

    def finish(self) -> None:
        """Wait for the device, which other processes do not do."""
        if self.buffer.device.type == "cuda":
            torch.cuda.synchronize(self.buffer.device)

    def free(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.uint8)
        if self._block is not None:
            self._block.free()


def read_weights(handle: WeightsHandle) -> Iterator[tuple[str, Tensor]]:
    """Yield names and weights of a bucket of another process on this host: views of its memory.

    The iterator ends after the GPU's work with the weights, since their owner may then reuse the memory.

    Raises:
        ValueError: the weights are freed, or lie on another host or on a GPU that this process does not see.
    """
    where = handle.where
    buffer = _on_this_gpu(where) if isinstance(where, CudaAddress) else map_block(where)
    yield from ((row.name, row.view(buffer)) for row in handle.rows)
    if buffer.device.type == "cuda":
        torch.cuda.synchronize(buffer.device)


def _on_this_gpu(where: CudaAddress) -> Tensor:
    """Open the buffer under this process's number of the GPU, which may differ from the owner's."""
    seen = visible_devices()
    if where.device not in seen:
        raise ValueError(
            f"the weights lie on {where.device}, and this process sees {', '.join(seen)}: run it on that GPU, or send "
            f"them by a broadcast"
        )
    call = inspect.signature(where.rebuild).bind(*where.arguments)
    call.arguments["storage_device"] = seen[where.device].index
    return where.rebuild(*call.args, **call.kwargs)


@torch.no_grad()
def load_weights(model: nn.Module, handle: WeightsHandle) -> None:
    """Copy a bucket into a plain model's parameters of the same names, in the parameters' dtype.

    Raises:
        ValueError: the model lacks a weight, or has it in another shape.
    """
    _copy_all(model.state_dict(), read_weights(handle))


def require_same_buckets(info: WeightInfo, group: JobsGroup, buffer_bytes: int) -> None:
    """Check, before every broadcast, that all ranks of the group send and receive the same buckets.

    Raises:
        ValueError: on every rank, if the buckets of a rank differ.
        RuntimeError: on every rank, if a rank did not come in time. The group is of no use then.
    """
    facts = [(name, tuple(shape), dtype) for name, (shape, dtype) in info.items()], buffer_bytes
    if different := group.differing(repr(facts)):
        raise ValueError(
            f"ranks {different} of {group.size} expect other buckets of weights than rank 0, the policy: pass every "
            "generator the policy's prepare_refit_info(), in its order, and its refit_buffer_bytes (here: "
            f"{len(info)} weights, {buffer_bytes} bytes)"
        )


@torch.no_grad()
def send_weights(weights: Iterable[tuple[str, Tensor]], info: WeightInfo, group: JobsGroup, buffer_bytes: int) -> None:
    """Broadcast the weights, unsharded and in the order of `info`, to the other ranks of the group, after
    `require_same_buckets`; see `receive_weights`."""
    weights = iter(weights)
    for bucket in buckets(info, buffer_bytes):
        buffer = torch.empty(bucket[-1].end, dtype=torch.uint8, device=group.device)
        for row, (name, weight) in zip(bucket, weights, strict=False):
            assert name == row.name
            row.view(buffer).copy_(weight)
        group.broadcast(buffer)


@torch.no_grad()
def receive_weights(model: nn.Module, group: JobsGroup, info: WeightInfo, buffer_bytes: int) -> None:
    """Receive the weights that the trainer broadcasts into a plain model, with the trainer's `info`, `buffer_bytes`.

    Communicates: a digest of the buckets through the store at which the group met, then one broadcast a bucket.

    Raises:
        ValueError: a rank of the group was given another `info` or `buffer_bytes`, on every rank, before anything is
            sent; the model lacks a weight, or has it in another shape, after all has been received.
        RuntimeError: as in `require_same_buckets`, before anything is sent.
    """
    receive_buckets(functools.partial(_copy_all, model.state_dict()), group, info, buffer_bytes)


def receive_buckets(
    take: Callable[[list[tuple[str, Tensor]]], None], group: JobsGroup, info: WeightInfo, buffer_bytes: int
) -> None:
    """Call `take` with each bucket that the trainer broadcasts: names and weights, which share one buffer.

    An error of `take` is raised after the last bucket, and `take` is not called again: the other ranks of the group
    wait for this one to receive.

    Raises:
        ValueError, RuntimeError: as in `require_same_buckets`.
    """
    require_same_buckets(info, group, buffer_bytes)
    fault: Exception | None = None
    for bucket in buckets(info, buffer_bytes):
        buffer = group.broadcast(torch.empty(bucket[-1].end, dtype=torch.uint8, device=group.device))
        try:
            if fault is None:
                take([(row.name, row.view(buffer)) for row in bucket])
        except Exception as error:
            fault = error
    if fault is not None:
        raise fault


def join_collective(
    ip: str, port: int, rank: int, world_size: int, device: torch.device | str = "cpu", timeout_s: float = 300
) -> JobsGroup:
    """Join the group of a trainer's `init_collective(ip, port, world_size)` as rank `rank`, at least 1."""
    return JobsGroup(ip, port, rank, world_size, device, timeout_s)


def _copy_all(state: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> None:
    for name, weight in weights:
        if name not in state or state[name].shape != weight.shape:
            found = f"has it as {list(state[name].shape)}" if name in state else "lacks it"
            raise ValueError(
                f"the weight {name} {list(weight.shape)} came, and the model {found}: both sides must hold the same "
                f"model; build the generator's from the policy's config"
            )
        state[name].copy_(weight)

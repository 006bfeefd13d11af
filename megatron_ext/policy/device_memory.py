"""Moves a worker's model and optimizer between GPU and CPU, and reports the GPU's free memory."""

import gc
import os
import platform
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from megatron_ext.dtensor import to_local_if_dtensor


def join_world() -> torch.device:
    """Join the default process group, if there is none (torchrun's, or a world of one); return this rank's device."""
    if not dist.is_initialized():
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        if "RANK" in os.environ:
            dist.init_process_group(backend)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if not torch.cuda.is_available() or "nccl" not in dist.get_backend():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", dist.get_rank() % torch.cuda.device_count())))
    torch.cuda.set_device(device)
    return device


def device_id(device: torch.device) -> str:
    """Return a name that no other device has: "GPU-..." as in NVML, or "CPU-" and the name of the host."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"CPU-{platform.node()}"


def visible_devices() -> dict[str, torch.device]:
    """The devices of this process by `device_id`, the CPU first."""
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    devices = [torch.device("cpu"), *(torch.device("cuda", i) for i in gpus)]
    return {device_id(device): device for device in devices}


def free_cached_memory(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers alone, which FSDP2 with offloaded parameters does not move."""
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


def move_optimizer(optimizer: Optimizer | None, device: torch.device) -> None:
    for state in optimizer.state.values() if optimizer is not None else ():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.dim():
                state[name] = value.to(device)


@torch.no_grad()
def copies_on_cpu(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copy the tensors' local parts to host memory, pinned where they come from a GPU."""
    found = {}
    for name, x in tensors:
        part = to_local_if_dtensor(x)
        found[name] = torch.empty_like(part, device="cpu", pin_memory=part.device.type == "cuda").copy_(part)
    return found


@torch.no_grad()
def exchange(tensors: Iterable[tuple[str, Tensor]], others: dict[str, Tensor]) -> None:
    """Swap the contents of the tensors' local parts with those of `others`, one tensor at a time."""
    for name, x in tensors:
        part = to_local_if_dtensor(x)
        held = part.to(others[name].device, copy=True)
        part.copy_(others[name])
        others[name].copy_(held)

"""A matmul and a collective in one, through symmetric memory: PyTorch's async tensor parallelism.

Each rank's rows are multiplied while the next rank's travel, by copies that the GPU's compute units have no part in
(https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487). The
GPUs must reach each other's memory, and be in one machine here.

Legend: T rows of all ranks, t of this rank; D input size, N outputs.
"""

import importlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.distributed.collectives import all_gather_object
from megatron_ext.distributed.groups import Group

_OVERLAP = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"  # torch's own switch
_found: WeakKeyDictionary[ProcessGroup, str | None] = WeakKeyDictionary()


class _Rank(NamedTuple):
    """A rank's machine, its GPU there (index and serial number), and its own reason against symmetric memory."""

    machine: str
    device: int
    gpu: str
    reason: str | None


def why_unavailable(group: ProcessGroup) -> str | None:
    """Return why the ranks of `group` cannot multiply through symmetric memory, None if they can; alike on all ranks.

    Communicates at the first call for a group: one exchange of each rank's machine and GPU.
    """
    if group not in _found:
        _found[group] = _reason(all_gather_object(_own_rank(group), group))
    return _found[group]


def _reason(ranks: Sequence[_Rank]) -> str | None:
    for rank in ranks:
        if rank.reason is not None:
            return rank.reason
    if len({rank.machine for rank in ranks}) > 1:
        return "the ranks are in several machines"
    if len({rank.gpu for rank in ranks}) < len(ranks):
        return "two ranks share a GPU"
    # torch tells GPUs apart by their index in the process.
    if len({rank.device for rank in ranks}) < len(ranks) and os.environ.get(_OVERLAP) != "1":
        return (
            f"ranks have different GPUs as cuda:{ranks[0].device}, which torch takes for one: let each process see all "
            f"GPUs of the machine (in Ray RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES=1), and have each call "
            f"torch.cuda.set_device with its own"
        )
    return None


def _own_rank(group: ProcessGroup) -> _Rank:
    """Return the machine that this rank runs on, its GPU, and its reason against symmetric memory."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    machine, reason = platform.node() + (boot.read_text() if boot.exists() else ""), _lacking(group)
    if not torch.cuda.is_available():
        return _Rank(machine, group.rank(), str(group.rank()), reason)
    own = torch.cuda.current_device()
    return _Rank(machine, own, str(getattr(torch.cuda.get_device_properties(own), "uuid", own)), reason)


def _lacking(group: ProcessGroup) -> str | None:
    if not torch.cuda.is_available():
        return "a rank has no GPU"
    try:
        memory = importlib.import_module("torch.distributed._symmetric_memory")
        torch.ops.symm_mem.fused_all_gather_matmul, torch.ops.symm_mem.fused_matmul_reduce_scatter  # noqa: B018
    except (ImportError, AttributeError):
        return f"torch {torch.__version__} has no such operators"
    own = torch.cuda.current_device()
    peers = (peer for peer in range(torch.cuda.device_count()) if peer != own)
    if not all(torch.cuda.can_device_access_peer(own, peer) for peer in peers):
        return "its GPUs do not reach each other's memory"
    tell = getattr(memory, "enable_symm_mem_for_group", None)
    if tell is not None and not hasattr(tell, "__deprecated__"):  # older versions need to be told the group
        tell(group.group_name)
    return None


def all_gather_matmul(x_tD: Tensor, w_DN: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return `(x @ w, x)` for the `x_TD` of all ranks."""
    assert group is not None
    x_TD, (y_TN,) = torch.ops.symm_mem.fused_all_gather_matmul(x_tD, [w_DN], 0, group.group_name)
    return y_TN, x_TD


def matmul_reduce_scatter(x_TD: Tensor, w_DN: Tensor, group: Group) -> Tensor:
    """Return this rank's rows `[t, N]` of the sum of every rank's `x @ w`; T divides by the ranks."""
    assert group is not None
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x_TD, w_DN, "sum", 0, group.group_name)

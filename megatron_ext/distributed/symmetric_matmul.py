"""A matmul and a collective in one, through symmetric memory: PyTorch's async tensor parallelism.

Each rank's rows are multiplied while the next rank's travel, by copies that the GPU's compute units have no part in
(https://discuss.pytorch.org/t/distributed-w-torchtitan-introducing-async-tensor-parallelism-in-pytorch/209487). It
takes GPUs that reach each other's memory, all in one machine here.

Legend: T rows of all ranks, t of this rank; D input size, N outputs.
"""

import importlib
import platform
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_ext.distributed.collectives import all_gather_object
from megatron_ext.distributed.groups import Group

_found: WeakKeyDictionary[ProcessGroup, str | None] = WeakKeyDictionary()


def why_unavailable(group: ProcessGroup) -> str | None:
    """None where the ranks of `group` can multiply through symmetric memory, else why not: the same on every rank.

    Communicates the first time that it is asked about a group: one exchange of what each rank has.
    """
    if group not in _found:
        ranks = all_gather_object(_own_machine(group), group)
        reasons = [reason for _, reason in ranks if reason is not None]
        if not reasons and len({machine for machine, _ in ranks}) > 1:
            reasons.append("the ranks are in several machines")
        _found[group] = reasons[0] if reasons else None
    return _found[group]


def _own_machine(group: ProcessGroup) -> tuple[str, str | None]:
    """Return the machine that this rank runs on, and what the machine lacks."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return platform.node() + (boot.read_text() if boot.exists() else ""), _lacking(group)


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
    """`(x @ w, x)` for the `x_TD` of all ranks."""
    assert group is not None
    x_TD, (y_TN,) = torch.ops.symm_mem.fused_all_gather_matmul(x_tD, [w_DN], 0, group.group_name)
    return y_TN, x_TD


def matmul_reduce_scatter(x_TD: Tensor, w_DN: Tensor, group: Group) -> Tensor:
    """This rank's rows `[t, N]` of the sum of every rank's `x @ w`; T divides by the ranks."""
    assert group is not None
    return torch.ops.symm_mem.fused_matmul_reduce_scatter(x_TD, w_DN, "sum", 0, group.group_name)

"""Collectives by multicast, in the symmetric memory that Megatron's inference sets up on GPUs behind an NVSwitch.

Symmetric memory lies at the same place on every rank, so that a kernel of one rank reads the sum of all ranks' values,
and writes to all ranks, in one instruction (NVIDIA's NVLS). For the few tokens of a decoding step that is quicker than
NCCL. The memory and the kernels are Megatron's; where it has set up none there is no `SymmetricTensor`, and the caller
uses the plain collectives.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, parallel_state

_KERNELS = "megatron.core.inference.communication.torch_symm_triton"
_MEMORY = "megatron.core.inference.symmetric_memory"  # Megatron-Core 0.17 and newer; before, parallel_state held it
_ELEMENTS_PER_THREAD = 8  # 16 bytes of bf16


@dataclass(frozen=True)
class SymmetricTensor:
    """A tensor at the start of the symmetric memory: what the next one is made of too.

    Attributes:
        tensor: `[S, ...]` bf16, this rank's own.
        handle: torch's handle of the memory.
        kernels: Megatron's module with the multicast kernels.
    """

    tensor: Tensor
    handle: Any
    kernels: Any

    def all_gather(self, x: Tensor, barrier_before: bool = False) -> Tensor:
        """Every rank's `[S/R, ...]` joined, in this tensor.

        `barrier_before` has the kernel wait until every rank has read what another all-gather left there before: only
        Megatron-Core 0.20 and newer ask for that, and can.
        """
        options = {"barrier_before": True} if barrier_before else {}
        self.kernels.multimem_all_gather(self.tensor, x.contiguous(), self.handle, **options)
        return self.tensor

    def reduce_scatter(self) -> Tensor:
        """This rank's `[S/R, ...]` of the sum of every rank's tensor."""
        tokens = self.tensor.shape[0] // self.handle.world_size
        out = self.tensor.new_empty(tokens, *self.tensor.shape[1:])
        self.kernels.multimem_reduce_scatter(out, self.tensor, self.handle)
        return out

    def reduce_scatter_add_norm_all_gather(self, residual: Tensor, norm_weight: Tensor, eps: float) -> Tensor:
        """This rank's `[S/R, ...]` of the sum, added to `residual`; the RMS norm of that is gathered in this tensor."""
        self.kernels.fused_multimem_rs_add_norm_ag(residual, self.tensor, self.handle, residual, norm_weight, eps)
        return residual


def symmetric_tensor(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device, group: Group
) -> SymmetricTensor | None:
    """A tensor in the symmetric memory of `group`; None where there is none, or not for such a tensor.

    All ranks get the same answer. What was in the memory before is overwritten: it holds one tensor at a time.
    """
    state, kernels = parallel_state(), sys.modules.get(_KERNELS)
    if state is None or kernels is None or group is not state.get_tensor_model_parallel_group(check_initialized=False):
        return None
    memory = _memory(state, group)
    if memory is None or not _kernels_take(shape, dtype, device):
        return None
    found = memory.maybe_get_tensor(list(shape), dtype=dtype)
    return None if found["handle"] is None else SymmetricTensor(found["tensor"], found["handle"], kernels)


def _memory(state: Any, group: Group) -> Any:
    """What Megatron's inference has set up; None: nothing."""
    if _MEMORY not in sys.modules:
        return getattr(state, "_GLOBAL_SYMMETRIC_MEMORY_BUFFER", None)
    manager = sys.modules[_MEMORY].SymmetricMemoryManager
    return manager.get_buffer("tp", process_group=group) if manager.is_initialized("tp") else None


def _kernels_take(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    return (
        device.type == "cuda"
        and dtype == torch.bfloat16
        and prod(shape[1:]) % _ELEMENTS_PER_THREAD == 0
        and torch.cuda.get_device_properties(device).major >= 9  # Hopper
    )

"""First values of sharded weights: those that Megatron draws, to the bit.

- On CPU (`use_cpu_initialization`): `init_method` fills the full weight in fp32 from torch's default CPU generator,
  which ranks seed alike, and each rank keeps its pieces. The same full weight at every tensor-parallel size.
- On the device: `init_method` fills each rank's shard from that rank's own stream of the RNG tracker, experts from the
  experts' stream. The full weight depends on the tensor-parallel size.
- On the device without an initialised tracker, where Megatron draws nothing: the full weight from the device's default
  generator, which ranks seed alike.

Nothing is communicated.
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import (
    Group,
    group_rank,
    group_size,
    parallel_state,
    require_tensor_parallel_group,
)
from megatron_ext.numerics.tensors import has_values
from megatron_ext.tensor_parallel._layers.parameter_attributes import set_tensor_model_parallel_attributes
from megatron_ext.tensor_parallel._random.generator_state import generator_of
from megatron_ext.tensor_parallel._random.process_tracker import Process
from megatron_ext.tensor_parallel._random.rng_tracker import EXPERT_PARALLEL, MODEL_PARALLEL

InitMethod = Callable[[Tensor], Any]


def device_for_parameters(use_cpu_initialization: bool) -> torch.device:
    """The device of new parameters: torch's default device if it was set (meta, say), the CPU if
    `use_cpu_initialization`, else that of the RNG tracker: the current CUDA device, if the process has one."""
    default = torch.get_default_device()
    if use_cpu_initialization or default.type != "cpu":
        return default
    return generator_of(getattr(Process.tracker, "device", None)).device


def piece_of(full: Tensor, dim: int, stride: int, rank: int, ranks: int) -> Tensor:
    """This rank's shard of `full`: every `ranks`-th of `stride * ranks` equal pieces along `dim`, joined."""
    pieces = full.chunk(stride * ranks, dim) if stride * ranks > 1 else (full,)
    return torch.cat(pieces[rank::ranks], dim) if stride > 1 else pieces[rank]


@torch.no_grad()
def initialize_on_cpu(
    weight: Tensor,
    init_method: InitMethod,
    dim: int,
    stride: int,
    rank: int,
    ranks: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Fill the shard `weight` from a full weight, which is drawn on the CPU and rounded to `dtype`, or the shard's."""
    full = torch.empty(_full_shape(weight, dim, ranks), dtype=torch.float32)
    init_method(full)
    full = full.to(dtype or weight.dtype)
    weight.copy_(piece_of(full, dim, stride, rank, ranks))
    return full


@torch.no_grad()
def initialize_on_device(
    weight: Tensor, init_method: InitMethod, dim: int, stride: int, group: Group, *, is_expert: bool = False
) -> None:
    """Fill the shard `weight` on its device, drawing as the top of this file says; skip a meta tensor."""
    if not has_values(weight):
        return
    tracker = _initialized_tracker()
    if tracker is not None:
        with tracker.fork(EXPERT_PARALLEL if is_expert else MODEL_PARALLEL):
            init_method(weight)
        return
    group = require_tensor_parallel_group(group, expert=is_expert)
    ranks = group_size(group)
    full = weight.new_empty(_full_shape(weight, dim, ranks))
    init_method(full)
    weight.copy_(piece_of(full, dim, stride, group_rank(group), ranks))


def _full_shape(weight: Tensor, dim: int, ranks: int) -> list[int]:
    return [n * ranks if i == dim else n for i, n in enumerate(weight.shape)]


def _initialized_tracker() -> Any:
    """Return the RNG tracker that was seeded: ours or, if Megatron's groups exist, Megatron's; None: neither."""
    megatron = sys.modules.get("megatron.core.tensor_parallel.random") if parallel_state() is not None else None
    trackers = (Process.tracker, getattr(megatron, "_CUDA_RNG_STATE_TRACKER", None))
    return next((tracker for tracker in trackers if tracker is not None and tracker.get_states()), None)


def _initialize_affine_weight_gpu(
    weight: Tensor,
    init_method: InitMethod,
    partition_dim: int,
    stride: int = 1,
    is_expert: bool = False,
) -> None:
    """Initialise a shard on its device and say how it is sharded. Megatron's name for it."""
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    initialize_on_device(weight, init_method, partition_dim, stride, None, is_expert=is_expert)


def _initialize_affine_weight_cpu(
    weight: Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: InitMethod,
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    world_size: int | None = None,
    skip_set_tensor_parallel_attributes: bool = False,
) -> Tensor | None:
    """Initialise a shard from a full `[output_size, input_size]` weight drawn on the CPU. Megatron's name for it.

    The full weight is rounded to `params_dtype` before it is cut. `rank` and `world_size`: None: those of Megatron's
    tensor-parallel group. Returns the full weight if `return_master_weight`.

    Raises:
        ValueError: the sizes don't fit each other.
    """
    if rank is None or world_size is None:
        group = require_tensor_parallel_group()
        rank, world_size = group_rank(group), group_size(group)
    whole = (output_size, input_size)
    if per_partition_size * world_size != whole[partition_dim] or per_partition_size % stride:
        raise ValueError(
            f"per_partition_size is {per_partition_size}: dimension {partition_dim} of [{output_size}, {input_size}] "
            f"must be {world_size} ranks times it, and it must divide by the stride {stride}"
        )
    if not skip_set_tensor_parallel_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    full = initialize_on_cpu(weight, init_method, partition_dim, stride, rank, world_size, params_dtype)
    return full if return_master_weight else None

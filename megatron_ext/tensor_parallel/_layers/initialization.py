"""Initialization of sharded weights: the same full weight for every tensor-parallel size.

`init_method` is always given a tensor of the full shape (it may look at fan-in and fan-out), and each rank keeps its
pieces. Where the random numbers come from:

- On CPU (`use_cpu_initialization`): the full weight is drawn in fp32 from torch's default CPU generator, on every rank;
  ranks seed that alike. The same weights as Megatron's, to the bit.
- On the device, alone (TP 1): from the RNG tracker's stream, as in Megatron. The same weights as Megatron's.
- On the device, shared (TP > 1): each rank's stream has a seed of its own (first rank's + its rank), so that dropout
  masks differ between them. The full weight comes from another one, that of the first rank as it would be alone: every
  rank replays it under the name `<stream>/full-weights`. Then each rank draws its shard's worth from its own stream and
  throws it away, so that what is drawn after that, dropout masks say, is drawn as in Megatron.
- Without an initialised tracker: the full weight from the device's default generator, which ranks seed alike.

So the weights are those of TP 1 where a model's layers are built right after seeding. Where other code has drawn from
the stream before (Megatron's own layers in the same model), they are still the same at every TP size above 1, drawn
from a seed of their own lest they repeat those numbers. Nothing is communicated.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Generator, Tensor

from megatron_ext.distributed.groups import (
    Group,
    group_rank,
    group_size,
    parallel_state,
    require_tensor_parallel_group,
)
from megatron_ext.head.validation.readable_values import has_values
from megatron_ext.tensor_parallel._layers.parameter_attributes import set_tensor_model_parallel_attributes
from megatron_ext.tensor_parallel._random.generator_state import generator_of
from megatron_ext.tensor_parallel._random.process_tracker import Process
from megatron_ext.tensor_parallel._random.rng_tracker import EXPERT_PARALLEL, MODEL_PARALLEL

InitMethod = Callable[[Tensor], Any]

_APART = 1 << 31  # far from the seeds of all streams, and within the 32 bits that CPU generators look at


def device_for_parameters(use_cpu_initialization: bool) -> torch.device:
    """Where new parameters go: torch's default device if it was set (meta, say), the CPU if `use_cpu_initialization`,
    else where the RNG tracker draws: on the current CUDA device, if the process has one."""
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
    """Fill the shard `weight` from a full weight drawn on the CPU in fp32.

    Gives the full weight in `dtype` (None: the shard's), to which it is rounded first.
    """
    full = torch.empty(_full_shape(weight, dim, ranks), dtype=torch.float32)
    init_method(full)
    full = full.to(dtype or weight.dtype)
    weight.copy_(piece_of(full, dim, stride, rank, ranks))
    return full


@torch.no_grad()
def initialize_on_device(
    weight: Tensor, init_method: InitMethod, dim: int, stride: int, group: Group, *, is_expert: bool = False
) -> None:
    """Fill the shard `weight` from a full weight drawn on its device, from the stream described above.

    A weight without values (meta, fake) is left as it is, and the streams too.
    """
    if not has_values(weight):
        return
    ranks = group_size(group)
    tracker = _initialized_tracker()
    name = EXPERT_PARALLEL if is_expert else MODEL_PARALLEL
    fork = nullcontext if tracker is None else tracker.fork
    if ranks > 1:
        full = weight.new_empty(_full_shape(weight, dim, ranks))
        stream = () if tracker is None else (_full_weight_stream(tracker, name, group_rank(group)),)
        with fork(*stream):
            init_method(full)
        if tracker is not None:
            with fork(name):
                init_method(weight)
        weight.copy_(piece_of(full, dim, stride, group_rank(group), ranks))
    else:
        with fork(*(() if tracker is None else (name,))):
            init_method(weight)


def _full_shape(weight: Tensor, dim: int, ranks: int) -> list[int]:
    return [n * ranks if i == dim else n for i, n in enumerate(weight.shape)]


def _initialized_tracker() -> Any:
    """The RNG tracker that was seeded: ours, or among Megatron's groups its own; None where none was."""
    megatron = sys.modules.get("megatron.core.tensor_parallel.random") if parallel_state() is not None else None
    trackers = (Process.tracker, getattr(megatron, "_CUDA_RNG_STATE_TRACKER", None))
    return next((tracker for tracker in trackers if tracker is not None and tracker.get_states()), None)


def _full_weight_stream(tracker: Any, name: str, rank: int) -> str:
    """The stream that replays the first rank's `name`, started when it is first asked for after seeding."""
    full = f"{name}/full-weights"
    states = tracker.get_states()
    if full not in states:
        if name not in states:
            raise ValueError(
                f"the RNG tracker has the streams {sorted(states)}, none named {name!r} to draw weights from: "
                f"call model_parallel_cuda_manual_seed(seed) first"
            )
        own = states[name]
        graph_safe = isinstance(own, Generator)
        generator = own.clone_state() if graph_safe else Generator(generator_of().device)
        if not graph_safe:
            generator.set_state(own)
        seed, now = generator.initial_seed(), generator.get_state()
        untouched = torch.equal(generator.manual_seed(seed).get_state(), now)
        generator.manual_seed(seed - rank if untouched else seed - rank + _APART)
        states[full] = generator if graph_safe else generator.get_state()
        tracker.set_states(states)
    return full


def _initialize_affine_weight_gpu(
    weight: Tensor,
    init_method: InitMethod,
    partition_dim: int,
    stride: int = 1,
    is_expert: bool = False,
    *,
    tp_group: Group = None,
) -> None:
    """Initialise a shard on its device and say how it is sharded. Megatron's name for it."""
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    group = require_tensor_parallel_group(tp_group, expert=is_expert)
    initialize_on_device(weight, init_method, partition_dim, stride, group, is_expert=is_expert)


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

    `params_dtype` rounds the full weight before it is cut. `rank` and `world_size`: of Megatron's tensor-parallel group
    where they are not given. Gives the full weight if `return_master_weight`.

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

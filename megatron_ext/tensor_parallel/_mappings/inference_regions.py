"""The all-gather and the reduce-scatter for decoding that Megatron calls outside of layers.

By multicast in Megatron's symmetric memory where its inference has set up some, by the plain collectives of `mappings`
elsewhere, with the same results.
"""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, group_size, require_tensor_parallel_group
from megatron_ext.distributed.symmetric_memory import symmetric_tensor
from megatron_ext.tensor_parallel.mappings import (
    gather_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)


def inference_all_gather_from_tensor_model_parallel_region(
    x: Tensor, tp_group: Group, config: Any, barrier_before: bool = False
) -> Tensor:
    """Every rank's `[..., H/R]` joined to `[..., H]`. One all-gather; no gradient through symmetric memory.

    Args:
        x: this rank's part, of any dtype.
        tp_group: the ranks that hold the parts; None: Megatron's tensor-parallel group.
        config: read is `inference_disable_triton_nvls_kernels`: True asks for the plain collective.
        barrier_before: another all-gather in the same symmetric memory may come right before this one.

    Raises:
        ValueError: several ranks run, and which of them hold the parts is unknown.
    """
    group = require_tensor_parallel_group(tp_group)
    ranks = group_size(group)
    memory = None
    if ranks > 1 and x.dim() > 1 and _may_multicast(config):
        memory = symmetric_tensor([x.shape[0] * ranks, *x.shape[1:]], x.dtype, x.device, group)
    if memory is None:
        return gather_from_tensor_model_parallel_region(x, group=group)
    return torch.cat(memory.all_gather(x, barrier_before).chunk(ranks), -1)


def inference_reduce_scatter_to_sequence_parallel_region(x: Tensor, tp_group: Group, config: Any) -> Tensor:
    """This rank's `[S/R, ...]` of the sum of every rank's `[S, ...]`. One reduce-scatter; arguments as above.

    Raises:
        ValueError: S does not divide by R, or which ranks share is unknown.
    """
    group = require_tensor_parallel_group(tp_group)
    memory = None
    if group_size(group) > 1 and x.dim() > 0 and x.shape[0] % group_size(group) == 0 and _may_multicast(config):
        memory = symmetric_tensor(list(x.shape), x.dtype, x.device, group)
    if memory is None:
        return reduce_scatter_to_sequence_parallel_region(x, group=group)
    memory.tensor.copy_(x)
    return memory.reduce_scatter()


def _may_multicast(config: Any) -> bool:
    return not getattr(config, "inference_disable_triton_nvls_kernels", False)

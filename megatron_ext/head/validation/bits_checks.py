"""Checks of what `bits` asks for and cannot have."""

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import group_rank
from megatron_ext.head.call.leaves import LEAVES, leaves_fault
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.numerics.fixed_order import functions_fault
from megatron_ext.numerics.readable_values import has_values


def bits_fault(head: ResolvedHead, ranks: int, hidden: Tensor, readouts: Sequence[Any]) -> ValueError | None:
    """Return the fault of this rank's shard, or its processor, given bits that are not "fast"; what every rank sees
    is raised."""
    bits = head.bits
    if hidden.is_cuda and importlib.util.find_spec("triton") is None:
        raise ValueError(
            f'bits is "{bits}" and hidden is on {hidden.device}: on CUDA its products are Triton\'s, which is not '
            f'installed; install triton, or pass bits="fast"'
        )
    if not hidden.is_cuda and hidden.device.type not in ("cpu", "meta"):
        raise ValueError(f'bits is "{bits}" and hidden is on {hidden.device}: only CPUs and CUDA have it; pass "fast"')
    for readout in readouts:
        if readout.by_leaf is None and (readout.needs_logits or readout.rows):
            raise ValueError(
                f'bits is "{bits}" and {type(readout).__name__} is read, which does not say that its sums have one '
                f"order: set its attribute by_leaf, as ReadOut describes it; or pass "
                f'bits="fast", or turn off batch_invariant_mode or VLLM_BATCH_INVARIANT, where they ask for others'
            )
    fault = None
    if has_values(hidden) and not hidden.is_cuda:
        fault = functions_fault(torch.get_num_threads())
    if bits != "tensor_parallel":
        return fault
    if LEAVES % ranks:
        raise ValueError(f'bits is "tensor_parallel" over {ranks} ranks: it must be 1, 2, 4 or 8; use bits="batch"')
    return leaves_fault(head.vocab, ranks, group_rank(head.group)) or fault

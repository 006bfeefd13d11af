"""Log-probabilities with the bits of an inference engine's batch-invariant kernels, and of Megatron's.

With `bits="batch"` and a `logit_dtype` of 16 bits, on CUDA: logits have the bits of theirs then, since both products
sum in steps of the same size, one after the other. What is left is the softmax: the order of its sums, and that its
logarithm and both differences are rounded to fp32.

Over several ranks each shard has sums of its own, which are joined as always: an engine gathers its logits first.
"""

import importlib
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.call import statistics
from megatron_ext.head.call.resolved_head import ResolvedHead
from megatron_ext.head.call.statistics import MAX, SUM_EXP, Statistics


def applies(call: ResolvedHead, x_TD: Tensor) -> bool:
    """Return whether a call's log-probabilities are taken as an engine takes them."""
    return call.rounds and call.bits == "batch" and x_TD.is_cuda


def write_sums(z_tV: Tensor, stats_Kt: Tensor, bias_V: Tensor | None, counted: int, call: ResolvedHead) -> None:
    """Sums of exponentials in that order, over those in `stats_Kt`."""
    _kernels().write_sums(z_tV, stats_Kt, bias_V, counted, call.softcap, call.temperature)


def combined(stats_RKT: Tensor, own_KT: Tensor, shift_T: Tensor, call: ResolvedHead, like: Tensor) -> Statistics:
    """`statistics.combine`, of a whole vocabulary with an engine's roundings, in fp32, where they apply."""
    stats = statistics.combine(stats_RKT, own_KT, shift_T, call)
    if len(stats_RKT) > 1 or not applies(call, like):
        return stats
    total_T = stats_RKT[0, SUM_EXP, :-1].masked_fill(stats_RKT[0, MAX, :-1] == -torch.inf, 1.0)
    return stats._replace(log_sum=_kernels().log(total_T).double(), target=stats.target.float().double())


def _kernels() -> Any:
    return importlib.import_module("megatron_ext.head.kernels.engine_softmax")

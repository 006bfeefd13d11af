"""NeMo-RL's functions on a sharded vocabulary that its cross-tokenizer distillation calls.

Logits are `[B, S, V/R]` of equal shards in rank order, or `[B, S, V]` without `tp_group`; of a DTensor the local tensor
is taken. What they return is fp32 (fp64 for fp64).
"""

import torch
from torch import Tensor

from megatron_ext import head
from megatron_ext.distributed.groups import Group, check_group, group_size
from megatron_ext.head.checks import check_option
from megatron_ext.model_utils.arguments import check_dims, columns_of, local, number, whole_if_none
from megatron_ext.model_utils.top_k import gather_logits_at_global_indices
from megatron_ext.numerics.tensors import accumulation_dtype
from megatron_ext.tensor_parallel.mappings import gather_from_tensor_model_parallel_region


def vocab_parallel_log_softmax(logits: Tensor, temperature: float, *, tp_group: Group = None) -> Tensor:
    """`[B, S, V/R]`: log-probabilities of this rank's columns, of logits divided by the temperature. Differentiable.

    Communicates: 1 collective, backward 1.

    Raises:
        ValueError: the temperature is not above 0; what `megatron_ext.head.vocab_parallel_log_softmax` refuses.
    """
    temperature = number(temperature)
    check_option("temperature", temperature)
    own = local(logits)
    if temperature != 1 and own.is_floating_point():
        own = own.to(accumulation_dtype(own.dtype)) / temperature
    return head.vocab_parallel_log_softmax(own, tp_group=whole_if_none(tp_group))


def vocab_parallel_full_log_softmax(logits: Tensor, temperature: float, *, tp_group: Group = None) -> Tensor:
    """`[B, S, V]`: `vocab_parallel_log_softmax` of all ranks' columns, for computation that all ranks repeat.

    Communicates: 2 collectives, backward 1.
    """
    own = vocab_parallel_log_softmax(logits, temperature, tp_group=tp_group)
    return own if group_size(tp_group) == 1 else gather_from_tensor_model_parallel_region(own, tp_group)


def vocab_parallel_gather_columns(logits: Tensor, column_indices: Tensor, *, tp_group: Group = None) -> Tensor:
    """`[B, S, K]`: the logits of the token ids `column_indices` `[K]` at every position. Differentiable.

    -1 gives 0. Communicates: 1 collective, backward none.

    Raises:
        ValueError: `column_indices` are not `[K]`; what `gather_logits_at_global_indices` refuses.
    """
    own = local(logits)
    check_dims("column_indices is", column_indices, 1, "it must be [K] token ids, the same at every position")
    start, end = columns_of(own, None, check_group(tp_group))
    indices = column_indices.to(own.device).expand(*own.shape[:2], -1)
    return gather_logits_at_global_indices(own, indices, tp_group, vocab_start_index=start, vocab_end_index=end)


def vocab_parallel_argmax(logits: Tensor, *, tp_group: Group = None) -> Tensor:
    """`[B, S]`, int64: the likeliest token id at every position, among equals the lowest. No gradient.

    Communicates: 1 collective.
    """
    with torch.no_grad():
        return head.vocab_topk(local(logits), 1, tp_group=whole_if_none(tp_group))[1].squeeze(-1)

"""NeMo-RL's functions on a sharded vocabulary: top-k, distillation from a teacher's, and those of cross-tokenizer
distillation (`vocab_parallel_*`).

The latter take logits `[B, S, V/R]` in equal shards in rank order, or `[B, S, V]` without `tp_group`; of a DTensor they
take the local tensor. They return fp32 (fp64 for fp64).

Legend: B sequences, S positions, V vocabulary, R tensor-parallel and W context-parallel ranks, K tokens per position.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ext import head
from megatron_ext.distributed.groups import UNSHARDED, Group, check_group, group_size
from megatron_ext.head.checks import check_option, or_refuse
from megatron_ext.model_utils.arguments import (
    check_dims,
    check_logits,
    chunk_tokens,
    columns_of,
    local,
    number,
    shard,
    whole_if_none,
    without_padding,
)
from megatron_ext.model_utils.logits import shard_of_dtensor, sharding_group
from megatron_ext.numerics.tensors import accumulation_dtype
from megatron_ext.sequence.host_values import on_device
from megatron_ext.sequence.targets import PaddedParts
from megatron_ext.tensor_parallel.mappings import gather_from_tensor_model_parallel_region


def distributed_vocab_topk(
    vocab_parallel_logits: Tensor,
    k: int,
    tp_group: Group,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the k largest logits of the whole vocabulary, and their token ids, at each position of `[B, S, V/R]`.

    A k above the vocabulary is cut to it, as NeMo-RL does.

    Returns:
        `[B, S, k]` values in descending order, fp32 (fp64 for fp64), and `[B, S, k]` int64 global ids; among equals the
        lowest id comes first. The values are differentiable.

    Communicates: 1 all-gather of k candidates a rank; nothing with a `tp_group` of None, which means whole logits.

    Raises:
        ValueError: on every rank, if k is below 1, or the columns are not this rank's.
    """
    check_logits(vocab_parallel_logits)
    columns, k = vocab_parallel_logits.shape[-1], number(k)
    vocab = shard(vocab_start_index, vocab_end_index, columns, tp_group)
    return head.vocab_topk(
        vocab_parallel_logits,
        min(k, columns * group_size(tp_group)) if isinstance(k, int) else k,
        tp_group=whole_if_none(tp_group),
        vocab=vocab,
        chunk_tokens=chunk_tokens(chunk_size, vocab_parallel_logits.shape[0]),
    )


def gather_logits_at_global_indices(
    vocab_parallel_logits: Tensor,
    global_indices: Tensor,
    tp_group: Group = None,
    cp_group: Group = None,
    *,
    vocab_start_index: int,
    vocab_end_index: int,
    chunk_size: int | None = None,
) -> Tensor:
    """Return the logits `[B, S, K]` of the tokens `global_indices` `[B, S, K]` at each position of `[B, S/W, V/R]`.

    Args:
        vocab_parallel_logits: with `cp_group` this rank's zigzag part of the sequence, which may be padded behind.
        global_indices: whole on every rank. -1 stands for no token and gives 0.
        tp_group, cp_group: None: not shared.

    Returns:
        The whole sequence on every rank, fp32 (fp64 for fp64). Differentiable; gradients of all context-parallel ranks
        add up.

    Communicates: 1 all-gather over `tp_group`, backward none; 1 all-gather over `cp_group`, backward 1 reduce-scatter
    (2 and 2 where the sequence is padded further than S needs).

    Raises:
        ValueError: shapes that do not fit, ids or columns outside the vocabulary; on every rank.
    """
    check_logits(vocab_parallel_logits)
    batch, positions, columns = vocab_parallel_logits.shape
    chunk = chunk_tokens(chunk_size, batch)
    _check_indices("global_indices", global_indices, batch)
    ids, there = without_padding(global_indices)
    parts = PaddedParts(ids.shape[1], positions, cp_group, "global_indices")
    indices = parts.split(ids, 0)

    def compute() -> Tensor:
        vocab = shard(vocab_start_index, vocab_end_index, columns, tp_group)
        group = whole_if_none(tp_group)
        return head.gather_logits(vocab_parallel_logits, indices, tp_group=group, vocab=vocab, chunk_tokens=chunk)

    return parts.whole(*or_refuse(compute, indices.shape, vocab_parallel_logits)).where(there, 0.0)


def get_distillation_topk_logprobs_from_logits(
    student_logits: Tensor,
    teacher_topk_logits: Tensor,
    teacher_topk_indices: Tensor,
    zero_outside_topk: bool,
    calculate_entropy: bool,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Group = None,
    context_parallel_group: Group = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return student's and teacher's log-probabilities of the teacher's K likeliest tokens, aligned for distillation.

    Args:
        student_logits: `[B, S/W, V/R]` with `vocab_parallel_group`; a DTensor sharded over a mesh dim "tp"; or whole,
            `[B, S, V]`. With `context_parallel_group` this rank's zigzag part, which may be padded behind. A DTensor
            whose sequence is sharded over a mesh dim "cp" brings that group along, if none is given.
        teacher_topk_logits, teacher_topk_indices: `[B, S, K]`, whole on every rank: the teacher's prediction at each
            position. An index of -1 stands for no token: the student's logit, or log-probability with
            `zero_outside_topk`, is 0 there.
        zero_outside_topk: the student's probabilities are those of its whole vocabulary, and the teacher's are 0
            outside of the K; False: both are distributions over the K tokens.
        calculate_entropy: with `zero_outside_topk`, also the student's sum of p log p over its vocabulary.
        vocab_parallel_rank: this rank's own rank in the group, and no other; None: read from the group.

    Returns:
        `[B, S - 1, K]` of the student, differentiable, `[B, S - 1, K]` of the teacher, and `[B, S - 1]` sums of p log p
        or None; fp32 (fp64 for fp64). The last position, which predicts nothing, is left out.

    Communicates: over the vocabulary 1 all-gather, backward none; over `context_parallel_group` 1 all-gather, backward
    1 reduce-scatter.

    Raises:
        ValueError: shapes that do not fit, ids or columns outside the vocabulary; on every rank.
    """
    logits, group, vocab, cp_group = student_logits, vocab_parallel_group, None, context_parallel_group
    if vocab_parallel_group is None and isinstance(student_logits, DTensor):
        logits, group, vocab = shard_of_dtensor(student_logits)
        cp_group = cp_group or sharding_group(student_logits, "cp", 1)
    check_logits(logits)
    _check_indices("teacher_topk_indices", teacher_topk_indices, logits.shape[0])
    if teacher_topk_logits.shape != teacher_topk_indices.shape:
        raise ValueError(
            f"teacher_topk_logits has shape {tuple(teacher_topk_logits.shape)}, teacher_topk_indices "
            f"{tuple(teacher_topk_indices.shape)}: both must be [batch, sequence, K], of the whole sequence"
        )
    columns = logits.shape[-1]
    ids, there = without_padding(on_device(teacher_topk_indices, logits.device))
    parts = PaddedParts(ids.shape[1], logits.shape[1], cp_group, "teacher_topk_indices")
    indices = parts.split(ids, 0)
    with_entropy = zero_outside_topk and calculate_entropy

    def compute() -> Any:
        own = vocab or shard(*columns_of(logits, vocab_parallel_rank, group), columns, group)
        sharding: dict[str, Any] = {"tp_group": whole_if_none(group), "vocab": own}
        if not zero_outside_topk:
            return head.gather_logits(logits, indices, **sharding)
        if not with_entropy:
            return head.gather_log_probs(logits, indices, **sharding)
        found, entropy = head.gather_log_probs(logits, indices, **sharding, return_entropy=True)
        return torch.cat([found, -entropy.unsqueeze(-1)], -1)

    batch, positions, k = indices.shape
    found = parts.whole(*or_refuse(compute, (batch, positions, k + with_entropy), logits))[:, :-1]
    student = found[..., :k].where(there[:, :-1], 0.0)
    student = student if zero_outside_topk else _over_last_dim(student)
    teacher = _over_last_dim(on_device(teacher_topk_logits, student.device).to(student.dtype))[:, :-1]
    return student, teacher, found[..., k] if with_entropy else None


def vocab_parallel_log_softmax(logits: Tensor, temperature: float, *, tp_group: Group = None) -> Tensor:
    """`[B, S, V/R]`: log-probabilities of this rank's columns, of logits divided by the temperature. Differentiable.

    Communicates: 1 collective, backward 1.

    Raises:
        ValueError: the temperature is not above 0; or `megatron_ext.head.vocab_parallel_log_softmax` raised it.
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
        ValueError: `column_indices` are not `[K]`; or `gather_logits_at_global_indices` raised it.
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


def _check_indices(argument: str, indices: Tensor, batch: int) -> None:
    rule = f"it must be [{batch}, sequence, K], batch size as of the logits; pass token ids of whole sequences"
    check_dims(f"{argument} is", indices, 3, rule)
    if indices.shape[0] != batch:
        raise ValueError(f"{argument} is {tuple(indices.shape)}: {rule}")


def _over_last_dim(logits: Tensor) -> Tensor:
    """Return log-probabilities over the last dim, which every rank has whole."""
    return head.vocab_parallel_log_softmax(logits, tp_group=UNSHARDED)

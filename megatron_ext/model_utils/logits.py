"""NeMo-RL's entry points: from logits and unshifted token ids to the log-probability of every next token.

Legend: B sequences, S tokens of each, V vocabulary, R tensor-parallel and W context-parallel ranks; in packs T tokens
of N documents.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from megatron_ext.distributed.groups import Group, VocabShard
from megatron_ext.model_utils.arguments import check_logits, columns_of, next_log_probs, number
from megatron_ext.sequence.host_values import on_device
from megatron_ext.sequence.targets import PackedTargets, PaddedTargets, PermutedTargets, Targets


def from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Group,
    inference_only: bool = False,
    cp_group: Group = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
) -> Tensor:
    """Compute log-probabilities of next tokens from logits sharded over the vocabulary, and maybe over the sequence.

    Args:
        vocab_parallel_logits: `[B, S/W, V/R]`, any floating dtype; with `cp_group` this rank's zigzag part. The
            sequence may be padded behind: S is then the padded length.
        target: `[B, S]`, integers: the token ids themselves, whole; they are shifted inside. -100 and -1 give 0.
        vocab_start_index, vocab_end_index: this rank's columns; all ranks have the same number, in rank order.
        tp_group: the ranks that share the vocabulary; None: the logits are whole.
        inference_only: nothing is saved, and the result needs no gradient.
        cp_group: the ranks that share the sequence; None: it is whole.
        chunk_size: sequence positions at a time; None: chosen from the sizes. It changes memory, not the result.
        sampling_params: top-k and top-p: an object like `TrainingSamplingParams`. A token that is filtered out gets
            -inf. The temperature is not read: the caller has divided the logits by it.

    Returns:
        `[B, S - 1]` (S that of `target`), fp32 (fp64 for fp64), the whole sequence on every rank. Under context
        parallelism gradients of all ranks' losses add up.

    Communicates: 1 all-gather over `tp_group`, backward none (top-p alone: up to 2 a chunk); 1 all-gather over
    `cp_group`, backward 1 reduce-scatter (2 and 2 where the sequence is padded further than `target` needs).

    Raises:
        ValueError: shapes that do not fit, target ids or columns outside the vocabulary, sampling parameters out of
            their ranges, sequences padded to different lengths on ranks of `cp_group`; on every rank.
    """
    check_logits(vocab_parallel_logits)
    targets = PaddedTargets(target, vocab_parallel_logits.shape[:2], cp_group)
    columns = (vocab_start_index, vocab_end_index)
    return next_log_probs(
        vocab_parallel_logits, targets, columns, tp_group, chunk_size, sampling_params, inference_only
    )


def from_parallel_logits_to_logprobs_packed_sequences(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    cu_seqlens_padded: Tensor,
    unpacked_seqlen: int,
    vocab_start_index: int,
    vocab_end_index: int,
    group: Group,
    inference_only: bool = False,
    cp_group: Group = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
    target_is_pre_rolled: bool = False,
    *,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """`from_parallel_logits_to_logprobs` of documents laid end to end; the result is a row for each.

    Args:
        vocab_parallel_logits: `[1, T/W, V/R]`; with `cp_group` this rank's zigzag parts of all documents.
        target: `[1, T]`, unshifted; if `target_is_pre_rolled` `[1, T/W]`, shifted and split already.
        cu_seqlens_padded: integers `[N + 1]`, where each document begins among the T tokens of all ranks, padding
            counted. On any device: nothing waits for its values.
        unpacked_seqlen: length of a document's row, before its shift.
        group: the tensor-parallel group.
        cu_seqlens: integers `[N + 1]`, the documents without the padding behind each of them. With it padding gets
            zeros, and may reach beyond `unpacked_seqlen`. Without it padding cannot be told from tokens: places beyond
            `unpacked_seqlen` are cut off.

    The other arguments and the communication are those of `from_parallel_logits_to_logprobs`.

    Returns:
        `[N, unpacked_seqlen - 1]`, zeros behind each document's last prediction.

    Raises:
        ValueError: as in `from_parallel_logits_to_logprobs`; and if `cu_seqlens_padded` lies on the CPU: it does not go
            from 0 to T, a length does not divide by 2W (at W > 1), or by `cu_seqlens` a document is longer than
            `unpacked_seqlen`. On a GPU `torch._assert_async` stops the device instead.
    """
    check_logits(vocab_parallel_logits)
    targets = PackedTargets(
        target,
        vocab_parallel_logits.shape[:2],
        cp_group,
        cu_seqlens_padded,
        number(unpacked_seqlen),
        target_is_pre_rolled,
        cu_seqlens,
    )
    columns = (vocab_start_index, vocab_end_index)
    return next_log_probs(vocab_parallel_logits, targets, columns, group, chunk_size, sampling_params, inference_only)


def get_next_token_logprobs_from_logits(
    input_ids: Tensor,
    next_token_logits: Tensor,
    seq_index: Tensor | None = None,
    vocab_parallel_rank: int | None = None,
    vocab_parallel_group: Group = None,
    context_parallel_group: Group = None,
    sampling_params: Any = None,
    chunk_size: int | None = None,
) -> Tensor:
    """Compute log-probabilities of next tokens from whole logits, shards of logits or a DTensor.

    Args:
        input_ids: `[B, S]`, the token ids themselves, on any device.
        next_token_logits: `[B, S/W, V/R]` with `vocab_parallel_group`, as Megatron has them; a DTensor; or whole
            logits, `[B, S, V]`.
        seq_index: for a DTensor: see `get_logprobs_from_vocab_parallel_logits`.
        vocab_parallel_rank: this rank's own rank in the group, and no other; None: read from the group.
        vocab_parallel_group, context_parallel_group: the ranks that share vocabulary and sequence; None: not shared.
        sampling_params, chunk_size: as for `from_parallel_logits_to_logprobs`.

    Returns, communicates, raises: as in `from_parallel_logits_to_logprobs`.
    """
    if vocab_parallel_group is None and isinstance(next_token_logits, DTensor):
        return get_logprobs_from_vocab_parallel_logits(
            next_token_logits, input_ids, seq_index, chunk_size, sampling_params
        )
    check_logits(next_token_logits)
    if not isinstance(input_ids, Tensor):
        raise ValueError(f"input_ids is {type(input_ids).__name__}: it must be token ids [batch, sequence], a tensor")
    start, stop = columns_of(next_token_logits, vocab_parallel_rank, vocab_parallel_group)
    return from_parallel_logits_to_logprobs(
        next_token_logits,
        on_device(input_ids, next_token_logits.device),
        start,
        stop,
        vocab_parallel_group,
        cp_group=context_parallel_group,
        chunk_size=chunk_size,
        sampling_params=sampling_params,
    )


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: Tensor | DTensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
) -> Tensor:
    """Compute log-probabilities of next tokens from DTensor logits.

    Args:
        vocab_parallel_logits: `[B, S, V]` on a mesh with a dim "tp", over which V is sharded; under context parallelism
            S is sharded over the dim "cp".
        input_ids: `[B, S]`, the token ids themselves; under context parallelism a DTensor with S sharded over "cp".
        seq_index: integers `[S]`: under context parallelism the sequence position of each entry of the joined shards.
        chunk_size, sampling_params: as for `from_parallel_logits_to_logprobs`.

    Returns, communicates, raises: as in `dtensor_from_parallel_logits_to_logprobs`. Also a ValueError for logits that
    are sharded otherwise, or for `seq_index` without a mesh dim "cp".
    """
    names = vocab_parallel_logits.device_mesh.mesh_dim_names or ()
    if seq_index is not None and "cp" not in names:
        raise ValueError(
            f"seq_index is given, and the logits' mesh has the dims {list(names)}: it belongs to a sequence sharded "
            f'over a dim "cp"; pass None'
        )
    logits, group, vocab = shard_of_dtensor(vocab_parallel_logits)
    check_logits(logits)
    targets = _targets(input_ids, logits.shape[:2], seq_index)
    return next_log_probs(logits, targets, vocab, group, chunk_size, sampling_params)


def dtensor_from_parallel_logits_to_logprobs(
    vocab_parallel_logits: Tensor,
    target: DTensor | Tensor,
    vocab_start_index: int,
    vocab_end_index: int,
    tp_group: Group,
    inference_only: bool = False,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
) -> Tensor:
    """Compute log-probabilities of next tokens from the local part of DTensor logits.

    Args:
        vocab_parallel_logits: `[B, S/W, V/R]`, this rank's plain tensor.
        target: `[B, S]`, the token ids themselves, whole; or a DTensor that shards S over a mesh dim "cp".
        seq_index: integers `[S]`: under context parallelism the sequence position of each entry of the joined shards.

    The other arguments are those of `from_parallel_logits_to_logprobs`.

    Returns:
        `[B, S - 1]`, fp32 (fp64 for fp64), the whole sequence on every rank. Under context parallelism the gradient of
        a result goes to the rank that computed it, from its own loss: see `PermutedTargets`.

    Communicates: as in `from_parallel_logits_to_logprobs` over `tp_group`; over "cp" 1 all-gather of tokens and 1 of
    results, backward none.

    Raises:
        ValueError: as in `from_parallel_logits_to_logprobs`; or a target is sharded over "cp" otherwise than along S,
            or without `seq_index`.
    """
    check_logits(vocab_parallel_logits)
    targets = _targets(target, vocab_parallel_logits.shape[:2], seq_index)
    columns = (vocab_start_index, vocab_end_index)
    return next_log_probs(
        vocab_parallel_logits, targets, columns, tp_group, chunk_size, sampling_params, inference_only
    )


def shard_of_dtensor(logits: DTensor) -> tuple[Tensor, Group, VocabShard]:
    """Return this rank's tensor of logits sharded over the mesh dim "tp", with its group and columns."""
    group = sharding_group(logits, "tp", logits.dim() - 1)
    if group is None:
        raise ValueError(
            f"logits are placed {logits.placements} on a mesh with the dims "
            f'{list(logits.device_mesh.mesh_dim_names or ())}: a dim "tp" must shard their vocabulary, Shard(-1); '
            f"redistribute them, or let the lm head keep them sharded"
        )
    return logits.to_local(), group, VocabShard.chunk(logits.shape[-1], group)


def sharding_group(x: DTensor, name: str, dim: int) -> Group:
    """Return the group of the mesh dim `name`, if it shards `dim` of `x`; else None."""
    names = x.device_mesh.mesh_dim_names or ()
    placement = x.placements[names.index(name)] if name in names else None
    shards = isinstance(placement, Shard) and placement.dim % x.dim() == dim
    return x.device_mesh.get_group(name) if shards else None


def _targets(target: Tensor, shape_BP: torch.Size, seq_index: Tensor | None) -> Targets:
    if not isinstance(target, DTensor):
        return PaddedTargets(target, shape_BP, None)
    names, mine = target.device_mesh.mesh_dim_names or (), target.to_local()
    if "cp" not in names or target.device_mesh.size(names.index("cp")) == 1:
        return PaddedTargets(mine, shape_BP, None)
    group = sharding_group(target, "cp", 1)
    if seq_index is None or group is None:
        raise ValueError(
            f"target is placed {target.placements} over the mesh dims {list(names)}, and seq_index is "
            f"{'given' if seq_index is not None else None}: under context parallelism target must be Shard(1) over "
            f'"cp", and seq_index the position of every place of the joined shards'
        )
    return PermutedTargets(mine, shape_BP, group, seq_index)

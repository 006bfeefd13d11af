"""NeMo-RL's entry points for logits that are DTensors: of Hugging Face models under tensor and context parallelism.

Legend: B sequences, S tokens of each, V vocabulary, R tensor-parallel and W context-parallel ranks.
"""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from megatron_ext.distributed.groups import Group, VocabShard, group_size
from megatron_ext.model_utils.arguments import check_logits, next_log_probs
from megatron_ext.sequence.targets import PaddedTargets, PermutedTargets, Targets


def get_logprobs_from_vocab_parallel_logits(
    vocab_parallel_logits: DTensor,
    input_ids: Tensor | DTensor,
    seq_index: Tensor | None = None,
    chunk_size: int | None = None,
    sampling_params: Any = None,
) -> Tensor:
    """Log-probabilities of next tokens from DTensor logits.

    Args:
        vocab_parallel_logits: `[B, S, V]` on a mesh with a dim "tp", over which V is sharded; under context parallelism
            S is sharded over the dim "cp".
        input_ids: `[B, S]`, the token ids themselves; under context parallelism a DTensor with S sharded over "cp".
        seq_index: integers `[S]`: under context parallelism the position of every place of the joined shards.
        chunk_size, sampling_params: as for `from_parallel_logits_to_logprobs`.

    Returns, communicates, raises: as `dtensor_from_parallel_logits_to_logprobs`. Also a ValueError: logits that are not
    sharded so, or `seq_index` without a mesh dim "cp".
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
    """Log-probabilities of next tokens from the local part of DTensor logits.

    Args:
        vocab_parallel_logits: `[B, S/W, V/R]`, this rank's plain tensor.
        target: `[B, S]`, the token ids themselves, whole; or a DTensor that shards S over a mesh dim "cp".
        seq_index: integers `[S]`: under context parallelism the position of every place of the joined shards.

    The other arguments are those of `from_parallel_logits_to_logprobs`.

    Returns:
        `[B, S - 1]`, fp32 (fp64 for fp64), the whole sequence on every rank. Under context parallelism the gradient of
        a result goes to the rank that computed it, from its own loss: see `PermutedTargets`.

    Communicates: as `from_parallel_logits_to_logprobs` over `tp_group`; over "cp" 1 all-gather of tokens and 1 of
    results, backward none.

    Raises:
        ValueError: as there; a target sharded over "cp" otherwise than along S, or without `seq_index`.
    """
    check_logits(vocab_parallel_logits)
    targets = _targets(target, vocab_parallel_logits.shape[:2], seq_index)
    columns = (vocab_start_index, vocab_end_index)
    return next_log_probs(
        vocab_parallel_logits, targets, columns, tp_group, chunk_size, sampling_params, inference_only
    )


def shard_of_dtensor(logits: DTensor) -> tuple[Tensor, Group, VocabShard]:
    """This rank's tensor of logits sharded over the mesh dim "tp", its group and columns."""
    mesh, last = logits.device_mesh, logits.dim() - 1
    names = mesh.mesh_dim_names or ()
    placement = logits.placements[names.index("tp")] if "tp" in names else None
    if not isinstance(placement, Shard) or placement.dim not in (-1, last):
        raise ValueError(
            f'logits are placed {logits.placements} on a mesh with the dims {list(names)}: a dim "tp" must shard their '
            f"vocabulary, Shard(-1); redistribute them, or let the lm head keep them sharded"
        )
    group = mesh.get_group("tp")
    return logits.to_local(), group, VocabShard.chunk(logits.shape[last], group)


def sequence_group(logits: DTensor) -> Group:
    """The ranks that share the sequence of `[B, S, V]`: those of the mesh dim "cp", if it shards S; else None."""
    names = logits.device_mesh.mesh_dim_names or ()
    placement = logits.placements[names.index("cp")] if "cp" in names else None
    if not isinstance(placement, Shard) or placement.dim not in (1, 1 - logits.dim()):
        return None
    return logits.device_mesh.get_group("cp")


def _targets(target: Tensor, shape_BP: torch.Size, seq_index: Tensor | None) -> Targets:
    if not isinstance(target, DTensor):
        return PaddedTargets(target, shape_BP, None)
    names, mine = target.device_mesh.mesh_dim_names or (), target.to_local()
    group = target.device_mesh.get_group("cp") if "cp" in names else None
    if group_size(group) == 1:
        return PaddedTargets(mine, shape_BP, None)
    placement = target.placements[names.index("cp")]
    if seq_index is None or not isinstance(placement, Shard) or placement.dim not in (1, 1 - target.dim()):
        raise ValueError(
            f'target is placed {placement} over the mesh dim "cp", and seq_index is '
            f"{'given' if seq_index is not None else None}: under context parallelism target must be Shard(1), and "
            f"seq_index the position of every place of the joined shards"
        )
    return PermutedTargets(mine, shape_BP, group, seq_index)

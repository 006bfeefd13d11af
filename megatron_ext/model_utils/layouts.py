"""NeMo-RL's moves of tensors between ranks: along the sequence, and from tokens to vocabulary and back."""

from typing import Any

from torch import Tensor

from megatron_ext.distributed.groups import Group, check_group, group_size
from megatron_ext.model_utils.functions import PlainFunction
from megatron_ext.sequence.parts import SequenceParts
from megatron_ext.sequence.zigzag import split_zigzag
from megatron_ext.tensor_parallel.mappings import all_to_all_hp2sp, all_to_all_sp2hp


def _get_tokens_on_this_cp_rank(input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1) -> Tensor:
    """`1 / cp_size` of `input_ids` along `seq_dim`: chunks `cp_rank` and `2 * cp_size - 1 - cp_rank` of `2 * cp_size`.

    Raises:
        ValueError: the length does not divide by `2 * cp_size`; there is no such rank or dim.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank is {cp_rank} and cp_size {cp_size}: cp_rank must be from 0 to cp_size - 1")
    if not -input_ids.dim() <= seq_dim < input_ids.dim():
        raise ValueError(
            f"seq_dim is {seq_dim} and input_ids have shape {tuple(input_ids.shape)}: it must be one of their dims; "
            f"pass seq_dim=0 for a single sequence"
        )
    return split_zigzag(input_ids, cp_size, cp_rank, seq_dim)


class AllGatherCPTensor(PlainFunction):
    """The whole sequence from every rank's zigzag part, along `seq_dim`.

    The gradient is summed over the ranks: what each does with the whole counts. Where all ranks compute the same loss
    of it, their mean of gradients (Megatron's and FSDP's, over context-parallel ranks too) is that of one process.

    Communicates: 1 all-gather; backward 1 reduce-scatter.

    Raises:
        ValueError: this rank's part has an odd length.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, cp_group: Group, seq_dim: int = 1) -> Tensor:
        return SequenceParts(cp_group).gather(tensor, seq_dim)


def allgather_cp_sharded_tensor(tensor: Tensor, cp_group: Group, seq_dim: int = 1) -> Tensor:
    """`AllGatherCPTensor` as a function."""
    return AllGatherCPTensor.apply(tensor, cp_group, seq_dim)


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """From a shard of the vocabulary to a share of the tokens: `[B*S, V/R]` to `[B*S/R, V]`.

    Without a group, or with one of a single rank, the logits are whole and returned as they are.

    Communicates: 1 all-to-all, and 1 backward.

    Raises:
        ValueError: the logits are not 2-D, or the ranks do not divide the tokens.
    """
    _check_2d("vocab_parallel_logits", vocab_parallel_logits, 0, tp_group)
    return vocab_parallel_logits if tp_group is None else all_to_all_hp2sp(vocab_parallel_logits, tp_group)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """From a share of the tokens to a shard of the vocabulary: `[B*S/R, V]` to `[B*S, V/R]`. Undoes `all_to_all_vp2sq`.

    Communicates: 1 all-to-all, and 1 backward.

    Raises:
        ValueError: the logits are not 2-D, or the ranks do not divide the vocabulary.
    """
    _check_2d("seq_parallel_logits", seq_parallel_logits, 1, tp_group)
    return seq_parallel_logits if tp_group is None else all_to_all_sp2hp(seq_parallel_logits, tp_group)


def _check_2d(argument: str, logits: Tensor, split: int, tp_group: Group) -> None:
    ranks = group_size(check_group(tp_group))
    if not isinstance(logits, Tensor) or logits.dim() != 2 or logits.shape[split] % ranks:
        found = f"has shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else f"is {type(logits).__name__}"
        raise ValueError(
            f"{argument} {found}: it must be 2-D, with a dim {split} that divides by the "
            f"{ranks} ranks of tp_group; flatten batch and sequence, and pad"
        )

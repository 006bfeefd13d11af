"""NeMo-RL's moves of tensors between ranks: along the sequence, from tokens to vocabulary and back, and sums."""

from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, check_group, group_rank, group_size
from megatron_ext.model_utils.arguments import local
from megatron_ext.model_utils.functions import PlainFunction
from megatron_ext.sequence.context_parallel_parts import SequenceParts
from megatron_ext.sequence.zigzag import gather_parts, split_zigzag
from megatron_ext.tensor_parallel.mappings import (
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    reduce_from_tensor_model_parallel_region,
)


def _get_tokens_on_this_cp_rank(input_ids: Tensor, cp_rank: int, cp_size: int, seq_dim: int = 1) -> Tensor:
    """Return chunks `cp_rank` and `2 * cp_size - 1 - cp_rank` of the `2 * cp_size` of `input_ids` along `seq_dim`.

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

    The gradient is summed over the ranks, each of which may use the whole sequence. If all ranks compute the same loss
    of it, the mean of their gradients (Megatron's and FSDP's, over context-parallel ranks too) is that of one process.

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


def cp_load_balanced_to_contiguous(x: Tensor, *, cp_group: Group = None, seq_dim: int = 1) -> Tensor:
    """Turn this rank's zigzag part of a sequence into its contiguous part, of the same length, along `seq_dim`.

    Without a group, or with a group of one rank, return `x` as it is. Of a DTensor take the local tensor.

    Communicates: 1 all-gather; backward 1 reduce-scatter.

    Raises:
        ValueError: this rank's part has an odd length.
    """
    if group_size(check_group(cp_group, "cp_group")) == 1:
        return x
    whole = allgather_cp_sharded_tensor(local(x), cp_group, seq_dim)
    return whole.chunk(group_size(cp_group), seq_dim)[group_rank(cp_group)].contiguous()


def cp_shift_next(x: Tensor, cp_group: Group = None, *, fill: float) -> Tensor:
    """Shift dim 1 by one position: at t stands `x[:, t + 1]` of the whole sequence, and `fill` at its end.

    Args:
        x: `[B, P, ...]`, of any dtype: with `cp_group` this rank's contiguous part, in rank order, equally long.

    Returns:
        The shape of `x`. Differentiable across the ranks too.

    Communicates: 1 all-gather of a position; backward 1 reduce-scatter, where `x` needs a gradient.

    Raises:
        ValueError: `x` has no dim 1, or nothing along it.
    """
    if not isinstance(x, Tensor) or x.dim() < 2 or x.shape[1] == 0:
        found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"x is {found}: it must be [batch, sequence, ...] with at least one position; pass a tensor")
    ranks, rank = group_size(check_group(cp_group, "cp_group")), group_rank(cp_group)
    first = gather_parts(x[:, :1].contiguous(), cp_group, 1)
    after = first.narrow(1, (rank + 1) % ranks, 1)  # the last rank takes it too: all must meet in backward
    return torch.cat([x[:, 1:], after.masked_fill(after.new_full((), rank == ranks - 1, dtype=torch.bool), fill)], 1)


class _AllReduceSum(PlainFunction):
    """The sum over `group`; the gradient goes back as it is, because all ranks repeat the computation behind the sum.

    Without a group, or with one of a single rank, it is `x` itself. Communicates: 1 all-reduce; backward nothing.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        if group_size(check_group(group, "group")) == 1:
            return x
        return reduce_from_tensor_model_parallel_region(x, group)


def group_all_reduce_sum_with_grad(x: Tensor, group: Group) -> Tensor:
    """`_AllReduceSum` as a function."""
    return _AllReduceSum.apply(x, group)


def group_all_reduce_sum(x: Tensor, group: Group) -> Tensor:
    """Return the sum over `group`, without a gradient. Communicates: 1 all-reduce."""
    return _AllReduceSum.apply(x.detach(), group)


def all_to_all_vp2sq(vocab_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """Exchange a shard of the vocabulary for a share of the tokens: `[B*S, V/R]` to `[B*S/R, V]`.

    Without a group, or with one of a single rank, the logits are whole and returned as they are.

    Communicates: 1 all-to-all, and 1 backward.

    Raises:
        ValueError: the logits are not 2-D, or the ranks do not divide the tokens.
    """
    _check_2d("vocab_parallel_logits", vocab_parallel_logits, 0, tp_group)
    return vocab_parallel_logits if tp_group is None else all_to_all_hp2sp(vocab_parallel_logits, tp_group)


def all_to_all_sq2vp(seq_parallel_logits: Tensor, tp_group: Group) -> Tensor:
    """Exchange a share of the tokens for a shard of the vocabulary: `[B*S/R, V]` to `[B*S, V/R]`.

    Undoes `all_to_all_vp2sq`.

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

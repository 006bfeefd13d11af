"""Splitting tensors and vocabularies over tensor-parallel ranks. Drop-in for Megatron's module."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group, group_rank, group_size, require_tensor_parallel_group


def divide(numerator: int, denominator: int) -> int:
    """Return `numerator / denominator`.

    Raises:
        ValueError: the division has a remainder.
    """
    if numerator % denominator:
        raise ValueError(
            f"numerator is {numerator}: it must divide by the denominator {denominator}; "
            f"pad it to {padded_length(numerator, denominator)}"
        )
    return numerator // denominator


def padded_length(length: int, ranks: int) -> int:
    """Return the smallest multiple of `ranks` that is at least `length`."""
    return -(-length // ranks) * ranks


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> list[Tensor]:
    """Split `[..., H]` into `num_partitions` equal pieces `[..., H/num_partitions]`: views, or contiguous copies.

    Raises:
        ValueError: the last dim does not divide.
    """
    if num_partitions < 1 or tensor.dim() == 0 or tensor.shape[-1] % num_partitions:
        raise ValueError(
            f"tensor has shape {tuple(tensor.shape)} and num_partitions is {num_partitions}: the last dim must divide "
            f"by it, and it must be at least 1; pad the last dim"
        )
    pieces = tensor.chunk(num_partitions, dim=-1)
    return [piece.contiguous() for piece in pieces] if contiguous_split_chunks else list(pieces)


def split_tensor_into_1d_equal_chunks(tensor: Tensor, new_buffer: bool = False, tp_group: Group = None) -> Tensor:
    """Return this rank's part `[ceil(numel / R)]` of the flattened tensor, which all ranks have. Sends nothing.

    The part is a view, or a copy with `new_buffer` or if the tensor is not contiguous. If the elements do not
    divide by the R ranks, the last parts end in zeros, and `gather_split_1d_tensor` leaves those out again: the true
    count travels with the part as its attribute `unpadded_numel`.
    """
    group = require_tensor_parallel_group(tp_group)
    flat, ranks = tensor.reshape(-1), group_size(group)
    chunk = padded_length(flat.numel(), ranks) // ranks
    start = min(chunk * group_rank(group), flat.numel())
    part = flat[start : start + chunk]
    if flat.numel() % ranks:
        part = F.pad(part, (0, chunk - part.numel()))
        part.unpadded_numel = flat.numel()  # type: ignore[attr-defined]
    elif new_buffer:
        part = part.clone()
    return part


def gather_split_1d_tensor(tensor: Tensor, tp_group: Group = None) -> Tensor:
    """Join every rank's part, flat: the inverse of `split_tensor_into_1d_equal_chunks`. One all-gather, no gradient.

    A part that lost its attribute `unpadded_numel` on the way (in a copy, say) is gathered with its zeros at the end.
    """
    group = require_tensor_parallel_group(tp_group)
    joined = collectives.all_gather(tensor.detach().reshape(-1), group)
    return joined[: getattr(tensor, "unpadded_numel", None)]


class VocabUtility:
    """Token ids `[first, last)` that a rank owns, when all ranks own equally many."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank, world_size: int
    ) -> Sequence[int]:
        """The range of `rank` when every rank owns `per_partition_vocab_size` ids."""
        first = rank * per_partition_vocab_size
        return first, first + per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> Sequence[int]:
        """The range of `rank` when `global_vocab_size` ids are split over `world_size` ranks.

        Raises:
            ValueError: `global_vocab_size` does not divide by `world_size`.
        """
        if global_vocab_size % world_size:
            raise ValueError(
                f"global_vocab_size {global_vocab_size} must divide by world_size {world_size}; "
                f"pad it to {padded_length(global_vocab_size, world_size)}"
            )
        return VocabUtility.vocab_range_from_per_partition_vocab_size(global_vocab_size // world_size, rank, world_size)

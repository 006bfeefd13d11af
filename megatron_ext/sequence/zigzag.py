"""The head-tail ("zigzag") layout of context parallelism: which positions of a sequence each rank holds.

With W ranks a sequence is cut into 2W chunks of equal length, and rank r holds chunk r and chunk 2W-1-r. Under a causal
mask early chunks cost little and late ones much, so that with one of each every rank has the same work. Packed
sequences ("THD") are cut document by document, and a rank holds its pieces of all documents one after the other.

The layout is Megatron-Core's (`get_batch_on_this_cp_rank`) and Transformer Engine's (`thd_get_partitioned_indices`).
Splitting, merging and gathering are differentiable; only `gather_zigzag` and `gather_parts` communicate.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_ext.distributed.collectives import all_gather, reduce_scatter
from megatron_ext.distributed.groups import Group, group_size

# The error on the other ranks if one rank has a fault of its own.
REFUSED = "another rank of cp_group refused its arguments (its own error says which): they must fit on every rank"


def split_zigzag(x: Tensor, ranks: int, rank: int, dim: int = 0) -> Tensor:
    """Return the part of the whole sequence `x` that `rank` holds: two chunks joined, `1 / ranks` of `x` along `dim`.

    `x` may have any dtype. Its gradient is zero outside of this part.

    Raises:
        ValueError: the length does not divide by `2 * ranks`.
    """
    if ranks == 1:
        return x
    size = check_length(x.shape[dim], ranks)
    return torch.cat([x.narrow(dim, chunk * size, size) for chunk in (rank, 2 * ranks - 1 - rank)], dim)


def merge_zigzag(x: Tensor, ranks: int, dim: int = 0) -> Tensor:
    """Return the whole sequence from all ranks' parts joined in rank order along `dim`, as after an all-gather.

    Raises:
        ValueError: the length does not divide by `2 * ranks`.
    """
    if ranks == 1:
        return x
    chunks = x.split(check_length(x.shape[dim], ranks), dim)
    # Chunk r is at place 2r, chunk 2W-1-r at place 2r+1: take the even places upward, then the odd ones downward.
    return torch.cat(chunks[0::2] + chunks[::-2], dim)


def zigzag_positions(length: int, ranks: int, rank: int, device: torch.device | str | None = None) -> Tensor:
    """Return the positions in the whole sequence of the tokens that `rank` holds, int64 `[length / ranks]`.

    Raises:
        ValueError: `length` does not divide by `2 * ranks`.
    """
    return split_zigzag(torch.arange(length, device=device), ranks, rank)


def thd_partition_indices(cu_seqlens: Tensor, total: int, ranks: int, rank: int) -> Tensor:
    """Return the indices of a packed sequence's tokens that `rank` holds, as `thd_get_partitioned_indices` of
    Transformer Engine does.

    Args:
        cu_seqlens: integers `[documents + 1]`, where each document begins (padding counted), and the end of the last.
        total: number of tokens in the pack, `cu_seqlens[-1]`.
        ranks, rank: size of the context-parallel group, and this rank's index in it.

    Returns:
        int32 `[total / ranks]` on the device of `cu_seqlens`; no host synchronisation.

    Raises:
        ValueError: `cu_seqlens` is not 1-D or not integer; its values do not start at 0, do not end at `total`, fall,
            or give a document whose length does not divide by `2 * ranks`. Values are checked on CPU; on CUDA a wrong
            value stops the device (`torch._assert_async`); fake tensors and compiled code are not checked.
    """
    check_cu_seqlens(cu_seqlens, total, multiple=2 * ranks if ranks > 1 else 1)
    start = cu_seqlens.to(torch.int64) // ranks  # where each document begins among the tokens of one rank
    place = torch.arange(total // ranks, device=cu_seqlens.device)
    document = torch.searchsorted(start[1:].contiguous(), place, right=True)
    first = start[document]
    size = start[document + 1] - first
    half, inside = size // 2, place - first
    chunks_before = torch.where(inside < half, rank, 2 * (ranks - 1) - rank)
    return (place + first * (ranks - 1) + half * chunks_before).to(torch.int32)


def gather_zigzag(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Return the whole sequence, gathered along `dim` from the ranks' parts.

    Communicates: one all-gather; backward one reduce-scatter, which sums the gradients of all ranks.

    Raises:
        ValueError: this rank's part has an odd length.
    """
    ranks = group_size(group)
    check_length(x.shape[dim] * ranks, ranks)
    return merge_zigzag(gather_parts(x, group, dim), ranks, dim)


def gather_parts(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Join every rank's `x` along `dim` in rank order. Communicates one all-gather; backward one reduce-scatter."""
    return _Exchange.apply(x, group, dim, True) if group_size(group) > 1 else x


class _Exchange(torch.autograd.Function):
    """All-gather (`gather`) or reduce-scatter along a dim; the backward of each is the other."""

    @staticmethod
    def forward(ctx, x, group, dim, gather):
        ctx.group, ctx.dim, ctx.gather = group, dim, gather
        return all_gather(x, group, dim) if gather else reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, ctx.group, ctx.dim, not ctx.gather), None, None, None


def check_cu_seqlens(cu_seqlens: Tensor, total: int, multiple: int = 1, argument: str = "cu_seqlens") -> None:
    """Raise ValueError unless `cu_seqlens` begins with 0, never falls, ends at `total`, and has lengths that divide by
    `multiple`."""
    if cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point():
        raise ValueError(
            f"{argument} is {cu_seqlens.dtype} {list(cu_seqlens.shape)}: it must be integers [documents + 1]; "
            f"pass the cumulative document lengths, beginning with 0"
        )
    lengths = cu_seqlens.diff()
    right = (cu_seqlens[0] == 0) & (cu_seqlens[-1] == total) & ((lengths >= 0) & (lengths % multiple == 0)).all()
    demand(
        right,
        lambda found: (
            f"{argument}{found} for {total} tokens: it must go from 0 to {total} and never fall, "
            f"with document lengths that divide by {multiple}; pad each document to the next multiple of {multiple}"
        ),
        cu_seqlens,
    )


def demand(right: Tensor, message: Callable[[str], str], of: Tensor) -> None:
    """Raise ValueError if `right` is False, a bool tensor computed from the values of `of`, which the message shows.

    On other devices than the CPU a False stops the device, without a host synchronisation. Fake tensors, and tensors of
    a graph that is being compiled, are not checked.
    """
    if torch.compiler.is_compiling() or isinstance(right, FakeTensor):
        return
    if right.is_cuda or right.device.type != "cpu":
        torch._assert_async(right, message(""))
    elif not right:
        raise ValueError(message(f" is {of.tolist()}"))


def check_length(length: int, ranks: int) -> int:
    """Return the length of each of the `2 * ranks` chunks of a sequence; raises ValueError unless `length` divides."""
    if length % (2 * ranks):
        raise ValueError(
            f"the sequence has length {length}: over {ranks} context-parallel ranks it must be a multiple of "
            f"2 * {ranks} = {2 * ranks}; pad it to {-(-length // (2 * ranks)) * 2 * ranks}"
        )
    return length // (2 * ranks)

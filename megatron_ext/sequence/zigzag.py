"""The head-tail ("zigzag") layout of context parallelism: which positions of a sequence live on which rank.

With W ranks a sequence is cut into 2W chunks of equal length, and rank r holds chunk r and chunk 2W-1-r. Under a causal
mask an early chunk is cheap and a late one dear, so that every rank gets the same work. Packed sequences ("THD") are
cut document by document, and a rank's pieces of all documents follow each other.

The layout is Megatron-Core's (`get_batch_on_this_cp_rank`) and Transformer Engine's (`thd_get_partitioned_indices`).
Splitting and merging communicate nothing and are differentiable; `gather_zigzag` is the one exchange.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from megatron_ext.distributed.collectives import all_gather, reduce_scatter
from megatron_ext.distributed.groups import Group, group_size

# What the other ranks say where one has a fault of its own.
REFUSED = "another rank of cp_group refused its arguments (its own error says which): they must fit on every rank"


def split_zigzag(x: Tensor, ranks: int, rank: int, dim: int = 0) -> Tensor:
    """`rank`'s part of the whole sequence `x`: its two chunks joined, `1 / ranks` of `x` along `dim`. Any dtype.

    The gradient is that of this rank's part, zero elsewhere.

    Raises:
        ValueError: the length does not divide by `2 * ranks`.
    """
    if ranks == 1:
        return x
    size = check_length(x.shape[dim], ranks)
    return torch.cat([x.narrow(dim, chunk * size, size) for chunk in (rank, 2 * ranks - 1 - rank)], dim)


def merge_zigzag(x: Tensor, ranks: int, dim: int = 0) -> Tensor:
    """The whole sequence from all ranks' parts joined in rank order along `dim`, as an all-gather leaves them.

    Raises:
        ValueError: the length does not divide by `2 * ranks`.
    """
    if ranks == 1:
        return x
    chunks = x.split(check_length(x.shape[dim], ranks), dim)
    # Rank r brings chunk r at place 2r and chunk 2W-1-r at place 2r+1: first the heads upward, then the tails downward.
    return torch.cat(chunks[0::2] + chunks[::-2], dim)


def zigzag_positions(length: int, ranks: int, rank: int, device: torch.device | str | None = None) -> Tensor:
    """int64 `[length / ranks]`: the places in the whole sequence of the tokens that `rank` holds.

    Raises:
        ValueError: `length` does not divide by `2 * ranks`.
    """
    return split_zigzag(torch.arange(length, device=device), ranks, rank)


def thd_partition_indices(cu_seqlens: Tensor, total: int, ranks: int, rank: int) -> Tensor:
    """Return the tokens of a packed sequence that `rank` holds, as Transformer Engine's `thd_get_partitioned_indices`.

    Args:
        cu_seqlens: integers `[documents + 1]`, where each document begins (padding included), and the end of the last.
        total: number of tokens in the pack, `cu_seqlens[-1]`.
        ranks, rank: size of the context-parallel group, and this rank's place in it.

    Returns:
        int32 `[total / ranks]` on the device of `cu_seqlens`; no host synchronisation.

    Raises:
        ValueError: `cu_seqlens` is not 1-D or not integer; its values do not start at 0, do not end at `total`, fall,
            or belong to a document whose length does not divide by `2 * ranks`. Values are checked on CPU; on CUDA a
            wrong one stops the device (`torch._assert_async`); fake tensors and `torch.compile` are not checked.
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
    """The whole sequence from this rank's part, along `dim`.

    Communicates: one all-gather; backward one reduce-scatter, so that every rank's use of the whole counts.

    Raises:
        ValueError: this rank's part has an odd length.
    """
    ranks = group_size(group)
    check_length(x.shape[dim] * ranks, ranks)
    return merge_zigzag(gather_parts(x, group, dim), ranks, dim)


def gather_parts(x: Tensor, group: Group, dim: int = 0) -> Tensor:
    """Every rank's `x` joined along `dim` in rank order. One all-gather; backward one reduce-scatter."""
    return _Exchange.apply(x, group, dim, True) if group_size(group) > 1 else x


class _Exchange(torch.autograd.Function):
    """All ranks' parts joined (`gather`), or this rank's part of their sum: each is the other's gradient."""

    @staticmethod
    def forward(ctx, x, group, dim, gather):
        ctx.group, ctx.dim, ctx.gather = group, dim, gather
        return all_gather(x, group, dim) if gather else reduce_scatter(x, group, dim)

    @staticmethod
    def backward(ctx, grad):
        return _Exchange.apply(grad, ctx.group, ctx.dim, not ctx.gather), None, None, None


def check_cu_seqlens(cu_seqlens: Tensor, total: int, multiple: int = 1, argument: str = "cu_seqlens") -> None:
    """Hold `cu_seqlens` to its rules: 0, never falling, lengths that divide by `multiple`, `total`."""
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
    """Raises ValueError unless `right`, a bool tensor made from the values of `of`, which the message may show.

    Off the CPU a wrong one stops the device, without a host synchronisation; fake tensors, and those of a graph that is
    being compiled, are not looked at.
    """
    if torch.compiler.is_compiling() or isinstance(right, FakeTensor):
        return
    if right.is_cuda or right.device.type != "cpu":
        torch._assert_async(right, message(""))
    elif not right:
        raise ValueError(message(f" is {of.tolist()}"))


def check_length(length: int, ranks: int) -> int:
    """The length of each of the `2 * ranks` chunks of a sequence of `length`, which must divide."""
    if length % (2 * ranks):
        raise ValueError(
            f"the sequence has length {length}: over {ranks} context-parallel ranks it must be a multiple of "
            f"2 * {ranks} = {2 * ranks}; pad it to {-(-length // (2 * ranks)) * 2 * ranks}"
        )
    return length // (2 * ranks)

"""Gather, scatter, reduce-scatter and all-to-all along a tensor's first or last dim, with shapes checked.

No gradients here; `mappings.py` pairs these functions. Shapes: R ranks, S sequence (first dim), H hidden (last dim).
`group` None is Megatron's tensor-parallel group, or no sharding in a process that stands alone.
"""

from collections.abc import Sequence

from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group, group_rank, group_size, require_tensor_parallel_group
from megatron_ext.tensor_parallel.utils import padded_length

Sizes = Sequence[int] | Tensor | None


def find_group(group: Group) -> Group:
    return require_tensor_parallel_group(group, argument="group")


def length_of(input_: Tensor, dim: int) -> int:
    if input_.dim() == 0:
        raise ValueError("input_ is a scalar: a mapping needs a dim to split or join; pass input_.reshape(1)")
    return input_.shape[dim]


def check_divides(input_: Tensor, dim: int, group: Group, otherwise: str = "") -> None:
    length, ranks = length_of(input_, dim), group_size(group)
    if length % ranks:
        raise ValueError(
            f"input_ has shape {tuple(input_.shape)}: the length {length} of its {'last' if dim else 'first'} dim must "
            f"divide by the {ranks} ranks of the group; pad it to {padded_length(length, ranks)}{otherwise}"
        )


def listed_sizes(sizes: Sizes) -> list[int] | None:
    """Split sizes as integers; those of a tensor on a device are waited for, once."""
    if sizes is None:
        return None
    return [int(n) for n in (sizes.tolist() if isinstance(sizes, Tensor) else sizes)]


def _checked_sizes(argument: str, sizes: Sizes, group: Group) -> list[int] | None:
    listed = None if group_size(group) == 1 else listed_sizes(sizes)
    if listed is not None and (len(listed) != group_size(group) or min(listed) < 0):
        raise ValueError(
            f"{argument} is {listed}: it must hold one length >= 0 for each of the {group_size(group)} ranks of the "
            f"group; pass the number of rows of every rank, in rank order"
        )
    return listed


def _rows_of_each(input_: Tensor, input_split_sizes: Sizes, group: Group) -> list[int] | None:
    """The number of `input_`'s rows that belong to each rank; None: equally many."""
    sizes = _checked_sizes("input_split_sizes", input_split_sizes, group)
    if sizes is None:
        check_divides(input_, 0, group, ", or give input_split_sizes")
    elif sum(sizes) != length_of(input_, 0):
        raise ValueError(
            f"input_split_sizes is {sizes}, which adds up to {sum(sizes)}: it must add up to the {input_.shape[0]} "
            f"rows of input_ (shape {tuple(input_.shape)}); pass how many of them belong to each rank"
        )
    return sizes


def same(input_: Tensor, group: Group) -> Tensor:
    find_group(group)
    return input_


def _reduce(input_: Tensor, group: Group) -> Tensor:
    """The sum of every rank's `input_`. One all-reduce."""
    return collectives.all_reduce(input_, find_group(group))


def _split_along_last_dim(input_: Tensor, group: Group) -> Tensor:
    """This rank's piece `[..., H/R]` of `[..., H]`. Nothing is sent."""
    group = find_group(group)
    check_divides(input_, -1, group)
    return collectives.contiguous(input_.chunk(group_size(group), -1)[group_rank(group)])


def _split_along_first_dim(input_: Tensor, group: Group, input_split_sizes: Sizes = None) -> Tensor:
    """This rank's piece `[S/R, ...]` of `[S, ...]`, or its number of rows in `input_split_sizes`. Nothing is sent."""
    group = find_group(group)
    sizes = _rows_of_each(input_, input_split_sizes, group)
    pieces = input_.chunk(group_size(group)) if sizes is None else input_.split(sizes)
    return collectives.contiguous(pieces[group_rank(group)])


def _gather_along_last_dim(input_: Tensor, group: Group) -> Tensor:
    """Every rank's `[..., H/R]`, joined to `[..., H]`. One all-gather."""
    length_of(input_, -1)
    return collectives.all_gather(input_, find_group(group), dim=-1)


def _reduce_scatter_along_last_dim(input_: Tensor, group: Group) -> Tensor:
    """This rank's piece `[..., H/R]` of the sum of every rank's `[..., H]`. One reduce-scatter."""
    group = find_group(group)
    check_divides(input_, -1, group)
    return collectives.reduce_scatter(input_, group, dim=-1)


def _gather_along_first_dim(
    input_: Tensor, group: Group, output_split_sizes: Sizes = None, use_global_buffer: bool = False
) -> Tensor:
    """Every rank's `[S/R, ...]`, joined to `[S, ...]`. One all-gather, also of uneven pieces.

    `use_global_buffer` changes nothing: in a buffer that all calls share, a second result would overwrite the first.
    """
    group = find_group(group)
    own = length_of(input_, 0)
    sizes = _checked_sizes("output_split_sizes", output_split_sizes, group)
    if sizes is not None and sizes[group_rank(group)] != own:
        raise ValueError(
            f"output_split_sizes is {sizes}, which gives this rank ({group_rank(group)}) {sizes[group_rank(group)]} "
            f"rows: its input_ has {own} (shape {tuple(input_.shape)}); pass every rank's number of rows, in rank order"
        )
    return collectives.all_gather(input_, group, sizes=sizes)


def _reduce_scatter_along_first_dim(
    input_: Tensor, group: Group, input_split_sizes: Sizes = None, use_global_buffer: bool = False
) -> Tensor:
    """This rank's piece `[S/R, ...]` of the sum of every rank's `[S, ...]`. One reduce-scatter."""
    group = find_group(group)
    sizes = _rows_of_each(input_, input_split_sizes, group)
    return collectives.reduce_scatter(input_, group, sizes=sizes)


def exchange(group: Group, input: Tensor, output_split_sizes: Sizes, input_split_sizes: Sizes) -> Tensor:
    group = find_group(group)
    received = _checked_sizes("output_split_sizes", output_split_sizes, group)
    sent = _rows_of_each(input, input_split_sizes, group)
    if received is None:
        check_divides(input, 0, group, ", or give output_split_sizes")
    return collectives.all_to_all(input, group, received, sent)

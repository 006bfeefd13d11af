"""Mappings of tensors between tensor-parallel ranks, forward and backward. Drop-in for Megatron's module.

Mappings come in dual pairs: the gradient of each half is the other half, applied to the gradient.

    half        sends                           other half        sends
    copy        nothing                         reduce            all-reduce
    scatter     nothing: keeps the own piece    gather            all-gather              (last or first dim)
    all-gather  all-gather                      reduce-scatter    reduce-scatter          (last or first dim)
    all-to-all  all-to-all, sizes (out, in)     all-to-all        all-to-all, sizes (in, out)

So backward sends the collective of the table's other half, gradients of gradients are right as well, and nothing is
sent in a group of one rank. The pair that a gather belongs to depends on the computation that follows: all ranks repeat
it (their gradients are equal: keep the own piece), or each rank does a part of it (sum the gradients).

For every function here: `input_` may be non-contiguous, and is never written; the result lies on its device, has its
dtype and is contiguous (of `copy`: is the input). `group` is the process group, None for Megatron's tensor-parallel one
or, in a process that stands alone, for no sharding. ValueError if the group is None and cannot be found, does not hold
this rank, or if a shape does not fit; all ranks that pass the same shapes raise alike, before anything is sent.

Split sizes say how much a rank sends and receives, and are taken on trust: only another exchange, of the sizes, could
show that the ranks disagree. Sizes that are wrong on some ranks alone are an error on those that see it, and the others
wait for them until torch's timeout, as with Megatron's own functions.

The pairs and their names are those of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053; sequence parallelism:
Korthikanti et al., 2022, arXiv:2205.05198).
"""

from collections.abc import Callable

from torch import Tensor
from torch.autograd import Function

from megatron_ext.distributed.groups import Group, group_size
from megatron_ext.tensor_parallel._mappings.along_one_dim import (
    Sizes,
    _gather_along_first_dim,
    _gather_along_last_dim,
    _reduce,
    _reduce_scatter_along_first_dim,
    _reduce_scatter_along_last_dim,
    _split_along_first_dim,
    _split_along_last_dim,
    check_divides,
    exchange,
    find_group,
    length_of,
    listed_sizes,
    same,
)
from megatron_ext.tensor_parallel.utils import split_tensor_along_last_dim as split_tensor_along_last_dim


class _Mapping(Function):
    """An autograd function that computes its class's `run(input_, group)` and, as gradient, `dual(gradient, group)`.

    An exporter calls `symbolic` of a mapping in place of `forward`. This name and those in `ctx` are Megatron's, for
    code that calls the parts by themselves.
    """

    run: Callable[..., Tensor]
    dual: Callable[..., Tensor]

    def __init_subclass__(cls) -> None:
        run, dual = cls.run, cls.dual

        def symbolic(graph, input_, group):
            return run(input_, group)

        def forward(ctx, input_, group):
            ctx.group = group
            return run(input_, group)

        def backward(ctx, grad_output):
            return dual(grad_output, ctx.group), None

        cls.symbolic = staticmethod(symbolic)  # type: ignore[attr-defined]
        cls.forward, cls.backward = staticmethod(forward), staticmethod(backward)  # type: ignore[method-assign]


# The duals are looked up when a gradient runs: of two that name each other one is defined first.
class _CopyToModelParallelRegion(_Mapping):
    run, dual = same, lambda *gradient: _ReduceFromModelParallelRegion.apply(*gradient)


class _ReduceFromModelParallelRegion(_Mapping):
    run, dual = _reduce, lambda *gradient: _CopyToModelParallelRegion.apply(*gradient)


class _ScatterToModelParallelRegion(_Mapping):
    run, dual = _split_along_last_dim, lambda *gradient: _GatherFromModelParallelRegion.apply(*gradient)


class _GatherFromModelParallelRegion(_Mapping):
    run, dual = _gather_along_last_dim, lambda *gradient: _ScatterToModelParallelRegion.apply(*gradient)


class _AllGatherFromTensorParallelRegion(_Mapping):
    run, dual = _gather_along_last_dim, lambda *gradient: _ReduceScatterToTensorParallelRegion.apply(*gradient)


class _ReduceScatterToTensorParallelRegion(_Mapping):
    run, dual = _reduce_scatter_along_last_dim, lambda *gradient: _AllGatherFromTensorParallelRegion.apply(*gradient)


class _ScatterToSequenceParallelRegion(_Mapping):
    run, dual = _split_along_first_dim, lambda *gradient: _GatherFromSequenceParallelRegion.apply(*gradient, False)


class _ScatterUnevenly(Function):
    """The mapping `_ScatterToSequenceParallelRegion` with as many rows for each rank as the split sizes say."""

    @staticmethod
    def forward(ctx, input_, group, input_split_sizes):
        ctx.group, ctx.sizes = group, input_split_sizes
        return _split_along_first_dim(input_, group, input_split_sizes)

    @staticmethod
    def backward(ctx, grad_output):
        return _GatherFromSequenceParallelRegion.apply(grad_output, ctx.group, False, ctx.sizes), None, None


class _GatherFromSequenceParallelRegion(Function):
    @staticmethod
    def symbolic(
        graph, input_, group, tensor_parallel_output_grad=True, output_split_sizes=None, use_global_buffer=False
    ):
        return _gather_along_first_dim(input_, group, output_split_sizes)

    @staticmethod
    def forward(ctx, input_, group, tensor_parallel_output_grad=True, output_split_sizes=None, use_global_buffer=False):
        ctx.group, ctx.output_split_sizes = group, listed_sizes(output_split_sizes)
        ctx.tensor_parallel_output_grad = tensor_parallel_output_grad
        return _gather_along_first_dim(input_, group, ctx.output_split_sizes)

    @staticmethod
    def backward(ctx, grad_output):
        group, sizes = ctx.group, ctx.output_split_sizes
        if ctx.tensor_parallel_output_grad:
            gradient = _ReduceScatterToSequenceParallelRegion.apply(grad_output, group, sizes)
        elif sizes is None:
            gradient = _ScatterToSequenceParallelRegion.apply(grad_output, group)
        else:
            gradient = _ScatterUnevenly.apply(grad_output, group, sizes)
        return gradient, None, None, None, None


class _ReduceScatterToSequenceParallelRegion(Function):
    @staticmethod
    def symbolic(graph, input_, group, input_split_sizes=None, use_global_buffer=False):
        return _reduce_scatter_along_first_dim(input_, group, input_split_sizes)

    @staticmethod
    def forward(ctx, input_, group, input_split_sizes=None, use_global_buffer=False):
        ctx.group, ctx.input_split_sizes = group, listed_sizes(input_split_sizes)
        return _reduce_scatter_along_first_dim(input_, group, ctx.input_split_sizes)

    @staticmethod
    def backward(ctx, grad_output):
        gradient = _GatherFromSequenceParallelRegion.apply(grad_output, ctx.group, True, ctx.input_split_sizes)
        return gradient, None, None, None


class _AllToAll(Function):
    @staticmethod
    def forward(ctx, group, input, output_split_sizes, input_split_sizes, use_nccl_stream=False):
        ctx.group = group
        ctx.output_split_sizes = listed_sizes(output_split_sizes)
        ctx.input_split_sizes = listed_sizes(input_split_sizes)
        return exchange(group, input, ctx.output_split_sizes, ctx.input_split_sizes)

    @staticmethod
    def backward(ctx, *grad_output):
        gradient = _AllToAll.apply(ctx.group, *grad_output, ctx.input_split_sizes, ctx.output_split_sizes)
        return None, gradient, None, None, None


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Return `input_` itself, for computation of which every rank does a part. Backward: one all-reduce."""
    return _CopyToModelParallelRegion.apply(input_, group)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """The sum of every rank's `input_`. One all-reduce; backward sends nothing."""
    return _ReduceFromModelParallelRegion.apply(input_, group)


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """This rank's piece `[..., H/R]` of `[..., H]`, which all ranks have. Sends nothing; backward: one all-gather."""
    return _ScatterToModelParallelRegion.apply(input_, group)


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Every rank's `[..., H/R]` joined to `[..., H]`, for computation that all ranks repeat. One all-gather;
    backward sends nothing."""
    return _GatherFromModelParallelRegion.apply(input_, group)


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """This rank's piece `[S/R, ...]` of `[S, ...]`, which all ranks have. Sends nothing; backward: one all-gather."""
    return _ScatterToSequenceParallelRegion.apply(input_, group)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group = None,
    output_split_sizes: Sizes = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Every rank's `[S/R, ...]` joined to `[S, ...]`. One all-gather.

    Args:
        tensor_parallel_output_grad: True: each rank does a part of the computation that follows, and backward sums the
            gradients, in one reduce-scatter; False: all ranks repeat it, and backward sends nothing.
        output_split_sizes: every rank's number of rows, in rank order, if they differ: R integers or a tensor.
        use_global_buffer: accepted, changes nothing: no two results ever share memory.
    """
    return _GatherFromSequenceParallelRegion.apply(
        input_, group, tensor_parallel_output_grad, output_split_sizes, use_global_buffer
    )


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor, group: Group = None, input_split_sizes: Sizes = None, use_global_buffer: bool = False
) -> Tensor:
    """This rank's piece `[S/R, ...]` of the sum of every rank's `[S, ...]`. One reduce-scatter; backward:
    one all-gather.

    Args:
        input_split_sizes: every rank's number of rows, in rank order, if they differ: R integers or a tensor.
        use_global_buffer: accepted, changes nothing: no two results ever share memory.
    """
    return _ReduceScatterToSequenceParallelRegion.apply(input_, group, input_split_sizes, use_global_buffer)


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """Every rank's `[..., H/R]` joined to `[..., H]`, for computation of which each rank does a part. One all-gather;
    backward: one reduce-scatter."""
    return _AllGatherFromTensorParallelRegion.apply(input_, group)


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Group = None) -> Tensor:
    """This rank's piece `[..., H/R]` of the sum of every rank's `[..., H]`. One reduce-scatter; backward:
    one all-gather."""
    return _ReduceScatterToTensorParallelRegion.apply(input_, group)


def all_to_all(
    group: Group,
    input_: Tensor,
    output_split_sizes_: Sizes = None,
    input_split_sizes: Sizes = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """Send the i-th piece of the rows `[N, ...]` to rank i; join the pieces that the ranks sent here, in rank order.

    One all-to-all, and one backward. Split sizes are R integers or a tensor of them: rows received from each rank and
    rows sent to each; None: equal pieces. The group has no default: the caller must name the ranks that exchange.
    `use_nccl_stream` is accepted and changes nothing: torch chooses the stream, and the result is waited for.
    """
    if group is None:
        raise ValueError("group is None: an all-to-all needs to be told its ranks; pass for instance the expert group")
    return _AllToAll.apply(group, input_, output_split_sizes_, input_split_sizes)


def all_to_all_sp2hp(input_: Tensor, group: Group = None) -> Tensor:
    """Split hidden units over the ranks instead of tokens: `[..., H]`, N tokens, becomes `[N*R, H/R]`. One all-to-all,
    and one backward."""
    group = find_group(group)
    check_divides(input_, -1, group)
    hidden, ranks = input_.shape[-1], group_size(group)
    pieces_RNh = input_.reshape(-1, ranks, hidden // ranks).transpose(0, 1)
    return _AllToAll.apply(group, pieces_RNh.reshape(-1, hidden // ranks), None, None)


def all_to_all_hp2sp(input_: Tensor, group: Group = None) -> Tensor:
    """Split tokens over the ranks instead of hidden units: `[..., H/R]`, N*R tokens, becomes `[N, H]`. One all-to-all,
    and one backward."""
    group = find_group(group)
    hidden, ranks = length_of(input_, -1), group_size(group)
    received = _AllToAll.apply(group, input_.reshape(-1, hidden), None, None)
    return received.reshape(ranks, -1, hidden).transpose(0, 1).reshape(-1, ranks * hidden)

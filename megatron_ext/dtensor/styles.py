"""Parallel styles that torch lacks: fused projections, norms over sharded rows, blocks that gather their tokens once.

Legend: B rows, S tokens, D hidden size, R tensor-parallel ranks.
"""

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import group_rank, group_size
from megatron_ext.numerics import cpu_products


class RotaryEmbedParallel(ParallelStyle):
    """Style that leaves a rotary embedding as it is, for plans written for NeMo-RL, which name this style.

    The module reads only dtype and device of a sharded residual stream, and positions of the whole sequence, so that it
    needs no change.
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False):
        super().__init__()

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return module


class WholeTokens(ParallelStyle):
    """Style of a block that needs all tokens of the residual stream `[B, S, D]`, whose placement is `stream`.

    The block's input becomes a replicated DTensor, once for all its linear layers, so that its gradients are summed
    once too. With `local` the block computes on plain tensors, the same on every rank, and its output gets the
    placement `stream` again.
    """

    def __init__(self, stream: Placement, local: bool = False):
        super().__init__()
        self.stream, self.local = stream, local

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if self.local and self.stream == Replicate():
            return module

        def gather(module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
            hidden = args[0] if args else kwargs["hidden_states"]
            if not isinstance(hidden, DTensor):
                hidden = DTensor.from_local(hidden, device_mesh, [self.stream], run_check=False)
            hidden = hidden.redistribute(placements=[Replicate()])
            if self.local:
                hidden = hidden.to_local()
            return ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})

        def scatter(module: nn.Module, args: tuple, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            first = DTensor.from_local(first, device_mesh, [Replicate()], run_check=False)
            first = first.redistribute(placements=[self.stream]).to_local()
            return (first, *output[1:]) if isinstance(output, tuple) else first

        module.register_forward_pre_hook(gather, with_kwargs=True)
        if self.local:
            module.register_forward_hook(scatter)
        return module


class AttentionHeads(WholeTokens):
    """Style of attention with sharded heads: counts of heads, and the parameters `per_head` (dim 0), become local."""

    def __init__(self, stream: Placement, per_head: Sequence[str] = ()):
        super().__init__(stream)
        self.per_head = tuple(per_head)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self.per_head:
            shard_parameter(module, name, device_mesh, Shard(0))
        config: Any = module.config
        ranks = device_mesh.size()
        give_heads(module, config.num_attention_heads // ranks, config.num_key_value_heads // ranks)
        return super()._apply(module, device_mesh)


def give_heads(attention: Any, heads: int, groups: int) -> None:
    """Let `attention` compute with `heads` query heads and `groups` heads of keys and values; parameters stay."""
    # A copy of the config, which all layers share: a fused projection is split by its counts.
    attention.config = copy.copy(attention.config)
    attention.config.num_attention_heads, attention.config.num_key_value_heads = heads, groups
    for name, count in (("num_heads", heads), ("num_attention_heads", heads), ("num_key_value_heads", groups)):
        if isinstance(attention.__dict__.get(name), int):
            attention.__dict__[name] = count


class FusedColwise(ParallelStyle):
    """Style of a linear layer whose output is several parts in a row (gate and up; q, k, v), each cut over the ranks.

    Parameters stay contiguous shards under their own names, as with ColwiseParallel, so that checkpoints and
    `full_tensor` need not know the parts. A rank computes with other rows than those of its shard: each forward
    exchanges rows of the weight by an all-to-all, `1/R` of the weight a rank, and each backward rows of its gradient.

    Args:
        parts: sizes of the parts, each a multiple of the number of ranks; None: two halves.
        input_layouts: as for ColwiseParallel.
    """

    def __init__(self, parts: Sequence[int] | None = None, *, input_layouts: Placement | None = None):
        super().__init__()
        self.parts, self.input_layouts = parts, Replicate() if input_layouts is None else input_layouts

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Linear)
        parts = tuple(self.parts or (module.out_features // 2,) * 2)
        if any(size % device_mesh.size() for size in parts):
            raise ValueError(
                f"a fused projection has parts of sizes {list(parts)}: they must be multiples of the "
                f"{device_mesh.size()} tensor-parallel ranks; use a smaller tensor-parallel size"
            )
        for name, _ in list(module.named_parameters()):
            shard_parameter(module, name, device_mesh, Shard(0))

        def forward(hidden: Tensor) -> Tensor:
            if not isinstance(hidden, DTensor):
                hidden = DTensor.from_local(hidden, device_mesh, [self.input_layouts], run_check=False)
            whole = hidden.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
            bias = None if module.bias is None else own_parts(module.bias, parts)
            return cpu_products.linear(whole, own_parts(module.weight, parts), bias)

        module.forward = forward  # type: ignore[method-assign, assignment]
        return module


class ShardedNorm(ParallelStyle):
    """Style of a norm whose input is sharded along dim `dim`; DTensor sums the norm's statistics over the ranks.

    Parameters are sharded along their dim 0. The norm may compute anything that DTensor supports.
    """

    def __init__(self, dim: int = -1):
        super().__init__()
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters()):
            shard_parameter(module, name, device_mesh, Shard(0))

        def wrap(module: nn.Module, args: tuple) -> tuple:
            dim = self.dim % args[0].dim()
            return (DTensor.from_local(args[0], device_mesh, [Shard(dim)], run_check=False), *args[1:])

        def unwrap(module: nn.Module, args: tuple, output: DTensor) -> Tensor:
            dim = self.dim % output.dim()
            return output.redistribute(placements=[Shard(dim)]).to_local()

        module.register_forward_pre_hook(wrap)
        module.register_forward_hook(unwrap)
        return module


class ShardwiseModule(ParallelStyle):
    """Style of a module that each rank runs on its own shard of an activation, with parameters whole on all ranks.

    The gradients of its parameters are summed over the ranks. The module may compute anything.
    """

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> nn.Module:
        for name, _ in list(module.named_parameters()):
            owner, _, own = name.rpartition(".")
            shard_parameter(module.get_submodule(owner), own, device_mesh, Replicate())
        compute = module.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            local = {name: p.to_local(grad_placements=[Partial()]) for name, p in module.named_parameters()}
            with local_parameters(module, local):
                return compute(*args, **kwargs)

        module.forward = forward
        return module


@contextmanager
def local_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Put these tensors in the place of the parameters of `module` inside the context."""
    places = {name: (module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in tensors}
    parameters = {name: owner._parameters.pop(own) for name, (owner, own) in places.items()}
    for name, (owner, own) in places.items():
        owner.__dict__[own] = tensors[name]
    try:
        yield
    finally:
        for name, (owner, own) in places.items():
            del owner.__dict__[own]
            owner._parameters[own] = parameters[name]


def shard_parameter(module: nn.Module, name: str, mesh: DeviceMesh, placement: Placement) -> None:
    """Make a parameter of `module` a DTensor on `mesh`. All ranks must hold the same values of it, or it is on meta."""
    parameter = module.get_parameter(name)
    if not isinstance(parameter, DTensor):
        distributed = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(distributed, requires_grad=parameter.requires_grad))


def own_parts(parameter: Tensor, parts: Sequence[int], dim: int = 0) -> Tensor:
    """Return this rank's piece of every part of a fused parameter, a DTensor sharded along `dim` over a 1-D mesh.

    Args:
        parts: the sizes of the parts, which add up to the size of `dim`; each is a multiple of R.

    Returns:
        The pieces one after the other along `dim`, in a plain tensor, differentiable. Communicates one all-to-all of
        1/R of the parameter, backward too.
    """
    assert isinstance(parameter, DTensor)
    local = parameter.to_local().movedim(dim, 0)
    return _OwnParts.apply(local, tuple(parts), parameter.device_mesh.get_group()).movedim(0, dim)


class _OwnParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chunk: Tensor, parts: tuple[int, ...], group: Any) -> Tensor:
        sends, received = _pieces(parts, group_size(group), group_rank(group))
        sizes = [sum(b - a for a, b in runs) for runs in sends]
        ctx.runs = [run for runs in sends for run in runs]
        ctx.sizes, ctx.received, ctx.group = sizes, received, group
        return collectives.all_to_all(torch.cat([chunk[a:b] for a, b in ctx.runs]), group, received, sizes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rows = collectives.all_to_all(grad, ctx.group, ctx.sizes, ctx.received)
        chunk, done = torch.empty_like(rows), 0
        for a, b in ctx.runs:
            chunk[a:b] = rows[done : done + b - a]
            done += b - a
        return chunk, None, None


def _pieces(parts: tuple[int, ...], ranks: int, rank: int) -> tuple[list[list[tuple[int, int]]], list[int]]:
    """Return, for each rank, the runs of this rank's chunk that it computes with, and the rows that it sends here."""
    size = sum(parts) // ranks
    starts = [0, *accumulate(parts)]

    def runs(chunk: int, reader: int) -> list[tuple[int, int]]:
        found = []
        for start, part in zip(starts, parts, strict=False):
            first = start + reader * part // ranks
            a, b = max(first, chunk * size), min(first + part // ranks, (chunk + 1) * size)
            if a < b:
                found.append((a - chunk * size, b - chunk * size))
        return found

    received = [sum(b - a for a, b in runs(chunk, rank)) for chunk in range(ranks)]
    return [runs(rank, reader) for reader in range(ranks)], received


def source_of(function: Any) -> str:
    """Return the Python source of a function beneath its decorators; "" if it cannot be read."""
    try:
        return inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""

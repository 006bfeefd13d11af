"""Gradients of parameters that every tensor-parallel rank holds whole, in models whose plan is not ours.

A plan names the modules that are cut. All other parameters stay whole on every rank. If such a parameter is applied to
a sharded activation, each rank has a part of its gradient. For modules that are known, the parts are summed
(`with_summed_gradients`); the first backward pass finds all other cases (`check_first_gradients`).
"""

import functools
import traceback
from collections.abc import Iterator
from fnmatch import fnmatch
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from megatron_ext.distributed.collectives import all_gather
from megatron_ext.distributed.groups import Group
from megatron_ext.dtensor.gradients import to_local_if_dtensor
from megatron_ext.dtensor.layers import Plan, scalar_functions
from megatron_ext.dtensor.output.stand_ins import class_of, forward_of
from megatron_ext.dtensor.piecewise import Cut, adds_up, computes_in_pieces
from megatron_ext.dtensor.styles import FusedColwise, ShardwiseModule

_TOLERANCE = 0.05  # as a share of a gradient's norm; unsummed parts differ by about the whole norm


def modules_of(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """List the modules, with names, that a key of a plan stands for; it may have wildcards between its dots."""
    found = [("", model)]
    for atom in path.split("."):
        found = [
            (f"{name}.{inner}".removeprefix("."), child)
            for name, module in found
            for inner, child in module.named_children()
            if fnmatch(inner, atom)
        ]
    return found


def cuts_heads(model: nn.Module, plan: Plan) -> bool:
    """Tell whether `plan` cuts the heads of every `self_attn` of `model`, so that each rank has heads of its own."""
    styles = _styles(model, plan)
    blocks = {name: module for name, module in model.named_modules() if name.endswith(".self_attn")}
    return all(_cut(block, name, styles).row for name, block in blocks.items() if list(block.children()))


def with_summed_gradients(model: nn.Module, plan: Plan) -> Plan:
    """Return `plan` with a style for each known module that it leaves out and that runs on shards.

    These modules are activation functions with parameters of one number, if the pieces of their block add up to the
    block, and norms of queries and keys over the channels of a head.
    """
    styles, added = _styles(model, plan), Plan()
    for name, block, cut in _cut_blocks(model, styles):
        functions = [child for child in scalar_functions(block) if f"{name}.{child}" not in styles]
        if functions and adds_up(block, cut):
            added |= {f"{name}.{child}": ShardwiseModule() for child in functions}
        for norm, projection in (("q_norm", "q_proj"), ("k_norm", "k_proj")):
            child = getattr(block, norm, None)
            shapes = {tuple(p.shape) for p in child.parameters()} if isinstance(child, nn.Module) else set()
            left_out = projection in cut.column and f"{name}.{norm}" not in styles
            if left_out and shapes == {(getattr(block, "head_dim", None),)}:
                added[f"{name}.{norm}"] = ShardwiseModule()
    return {**plan, **added}


def cut_in_vain(model: nn.Module, plan: Plan) -> str | None:
    """Return the name of a block that `plan` cuts although its pieces do not compute pieces of the whole; or None.
    Blocks in which the plan has styles other than columns, halves of columns, and rows are not checked."""
    styles = _styles(model, plan)
    for name, block, cut in _cut_blocks(model, styles):
        inside = [path for path in styles if path.startswith(f"{name}.")]
        of_parts = any(getattr(styles[f"{name}.{child}"], "parts", None) for child in cut.column)
        looked_at = len(inside) <= len(cut.column) + len(cut.row) and not of_parts
        if looked_at and computes_in_pieces(block, cut) is False:
            return name
    return None


def tell_of_cut_parameters(model: nn.Module) -> None:
    """Have `model`'s forward raise a ValueError that explains why DTensor cannot compute with a cut parameter, which no
    plan shows; torch's own error names an operator, or nothing."""
    own = forward_of(model)

    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return own(self, *args, **kwargs)
        except Exception as error:
            frame = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][-1]
            of_torch = str(frame.f_globals.get("__name__")).startswith("torch.distributed.tensor")
            if isinstance(error, ValueError) or not (of_torch or "mixed torch.Tensor and DTensor" in str(error)):
                raise
            raise ValueError(
                f"tensor parallelism of {class_of(model).__name__} is not supported (its forward computes with a "
                f"parameter that is cut, in a way that DTensor does not know: {type(error).__name__} {error}); run it "
                f"data parallel alone, or pass a custom_parallel_plan without that module (often the embedding)"
            ) from error

    model.forward = MethodType(forward, model)


def unequal_gradients(model: nn.Module, tp_group: Group) -> list[str]:
    """List the parameters that all ranks of `tp_group` hold whole, and whose gradients differ between the ranks.

    Communicates one all-gather of four numbers a parameter.
    """
    sketches = {name: _sketch(parameter) for name, parameter in _replicated(model)}
    if not sketches:
        return []
    found = all_gather(torch.stack([*sketches.values()])[None], tp_group)  # [ranks, parameters, 4]
    norms, apart = found[..., 0].amax(0), (found - found[:1]).abs().amax((0, 2))
    noise = norms.max() * torch.finfo(torch.float32).eps
    wrong = (apart > _TOLERANCE * norms) & (apart > noise)
    return [name for name, odd in zip(sketches, wrong.tolist(), strict=True) if odd]


def check_first_gradients(model: nn.Module, layers: Any, tp_group: Group) -> None:
    """Have the first backward pass of `model` raise ValueError, on every rank of `tp_group`, if gradients of replicated
    parameters differ between these ranks. Later passes are not checked."""

    kind = type(model).__name__.removeprefix("FSDP")  # FSDP2 derives a class

    def compare() -> None:
        if all(parameter.grad is None for parameter in model.parameters()):
            return  # FSDP2 is still accumulating unreduced gradients
        handle.remove()
        if odd := unequal_gradients(model, tp_group):
            raise ValueError(
                f"{', '.join(odd[:3])} {'and others ' if len(odd) > 3 else ''}of {kind} are on every "
                f"tensor-parallel rank, and their gradients differ between the ranks: the plan cuts what they are "
                f"applied to, and does not say how their gradients are summed; name their modules in a "
                f"custom_parallel_plan, or use tensor-parallel size 1"
            )

    def behind_others() -> None:  # queues again: FSDP2's callback, which waits for gradients, may come after `begin`
        Variable._execution_engine.queue_callback(compare)

    def begin(grad: Tensor) -> None:
        Variable._execution_engine.queue_callback(behind_others)

    def watch(layer: nn.Module, args: tuple, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if torch.is_grad_enabled() and hidden.requires_grad:
            hidden.register_hook(begin)

    handle = layers[-1].register_forward_hook(watch)


def _styles(model: nn.Module, plan: Plan) -> dict[str, ParallelStyle]:
    return {name: style for path, style in plan.items() for name, _ in modules_of(model, path)}


def _cut_blocks(model: nn.Module, styles: dict[str, ParallelStyle]) -> Iterator[tuple[str, nn.Module, Cut]]:
    """Yield the modules that have both children cut along their outputs and children cut along their inputs."""
    for name, block in model.named_modules():
        cut = _cut(block, name, styles)
        if cut.column and cut.row:
            yield name, block, cut


def _cut(block: nn.Module, path: str, styles: dict[str, ParallelStyle]) -> Cut:
    """Return the children of `block` whose outputs are sharded, and those whose inputs are sharded."""
    column, row, shard = [], [], (Shard(-1),)
    found = {name: styles.get(f"{path}.{name}") for name, _ in block.named_children()}
    halves = [name for name, style in found.items() if isinstance(style, FusedColwise)]
    for name, style in found.items():
        if name in halves or (isinstance(style, ColwiseParallel) and style.output_layouts == shard):
            column.append(name)
        elif isinstance(style, RowwiseParallel) and style.input_layouts == shard:
            row.append(name)
    return Cut(column, row, halves)


def _replicated(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that are not on a tensor-parallel mesh dim, or replicated on it, with their names."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor) and parameter.device_mesh.ndim > 1:
            tp = (parameter.device_mesh.mesh_dim_names or ()).index("tp")
            if not parameter.placements[tp].is_replicate():
                continue
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def _sketch(parameter: nn.Parameter) -> Tensor:
    """Return the norm of a gradient and its products with three fixed vectors, fp64 `[4]`; zeros without a gradient."""
    if parameter.grad is None:
        return torch.zeros(4, dtype=torch.float64, device=to_local_if_dtensor(parameter).device)
    flat = to_local_if_dtensor(parameter.grad).detach().flatten().double()
    at = torch.arange(1, flat.numel() + 1, dtype=torch.float64, device=flat.device)
    return torch.stack([flat.norm(), flat.sum(), *(flat @ torch.cos(at * angle) for angle in (1.0, 2.3))])

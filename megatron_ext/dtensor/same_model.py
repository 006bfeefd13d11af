"""Check that all ranks are about to shard the same model in the same way."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ParallelStyle

from megatron_ext.distributed.groups import Group
from megatron_ext.distributed.same_on_ranks import require_same
from megatron_ext.dtensor.layers import Plan


def refuse_parallel(model: nn.Module) -> None:
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise ValueError(
            f"{type(model).__name__} has parameters that are DTensors: it is parallel already; parallelize a model "
            f"once, before FSDP2 or any other sharding"
        )


def require_same_model(
    model: nn.Module, plan: Plan, options: Any, meshes: Sequence[DeviceMesh | None], fault: Exception | None
) -> None:
    """Raise on every rank unless all have the same of these, and none a fault; see `require_same`."""
    groups, device = groups_of(meshes)
    kinds = [(name, p.shape, p.dtype, p.requires_grad, p.is_meta) for name, p in model.named_parameters()]
    facts = {
        "the model's class or parameters": (type(model).__qualname__, kinds),
        "the model's weights": _some_weights(model) if fault is None else None,
        "the plan": [(name, type(style).__qualname__, _settings(style)) for name, style in plan.items()],
        "the options": options,
    }
    require_same("parallelize", facts, groups, device, fault)


def groups_of(meshes: Sequence[DeviceMesh | None]) -> tuple[list[Group], str]:
    """The groups of these meshes, and where they communicate."""
    found = [mesh for mesh in meshes if mesh is not None]
    return [group for mesh in found for group in mesh.get_all_groups()], found[0].device_type if found else "cpu"


def _settings(value: Any) -> Any:
    """Return a parallel style's settings in a form that is the same on every rank: without addresses of objects."""
    if isinstance(value, ParallelStyle):
        return [(name, _settings(setting)) for name, setting in vars(value).items()]
    if isinstance(value, tuple | list):
        return [_settings(one) for one in value]
    plain = value is None or isinstance(value, bool | int | float | str | Placement)
    return value if plain else type(value).__qualname__


def _some_weights(model: nn.Module) -> list[float]:
    """A few elements of every parameter, evenly spread: enough to tell weights that were drawn from other seeds."""
    samples = []
    for parameter in model.parameters():
        if not parameter.is_meta and parameter.numel():
            flat = parameter.detach().flatten()
            samples.append(flat[:: -(-flat.numel() // 8)].double())
    return torch.cat([sample.cpu() for sample in samples]).tolist() if samples else []

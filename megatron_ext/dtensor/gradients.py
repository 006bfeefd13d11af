"""The norm of all gradients of a sharded model, each counted once, and clipping by it."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from megatron_ext.distributed.collectives import all_reduce
from megatron_ext.distributed.groups import Group, group_rank

Parameters = Iterable[Tensor] | Tensor


def to_local_if_dtensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, without autograd; any other tensor as it is."""
    with torch.no_grad():
        return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def get_grad_norm(
    parameters: Parameters,
    dp_group: Group = None,
    tp_group: Group = None,
    norm_type: float = 2,
    dtype: torch.dtype = torch.float32,
    *,
    dp_cp_group: Group = None,
) -> float:
    """Norm of the gradients of all parameters of a model, as of one vector.

    A gradient counts once, however many ranks hold it: of copies on several ranks (DTensor's Replicate, or plain
    tensors) only the first rank's is counted.

    Args:
        parameters: this rank's parameters; the same number, with the same placements, on all ranks of both groups.
        dp_group, dp_cp_group: the data- and context-parallel ranks, under either name.
        tp_group: the tensor-parallel ranks.
        norm_type: p of the p-norm, `inf` too.
        dtype: the dtype of the sum.

    Returns:
        The norm, the same on every rank. Communicates one scalar all-reduce a group.

    Raises:
        ValueError: gradients that are still to be summed over ranks (DTensor's Partial).
    """
    parameters = _listed(parameters)
    groups = (dp_group if dp_cp_group is None else dp_cp_group, tp_group)
    norm_type = float(norm_type)
    largest = norm_type == float("inf")
    counts = functools.cache(functools.partial(_counts, groups))  # few layouts, many gradients
    parts = []
    for parameter in parameters:
        grad = parameter.grad
        if isinstance(grad, DTensor):
            grad = grad.to_local() if counts(grad.device_mesh, grad.placements) else None
        elif grad is not None and not counts():
            grad = None
        if grad is not None:
            parts.append(torch.linalg.vector_norm(grad, norm_type, dtype=dtype))
    total = torch.zeros((), dtype=dtype, device=_device(parameters))
    if parts:
        norms = torch.stack([part.to(total.device) for part in parts])
        total = norms.max() if largest else norms.pow(norm_type).sum()
    for group in groups:
        total = all_reduce(total, group, "max" if largest else "sum")
    return total.item() if largest else total.item() ** (1 / norm_type)


@torch.no_grad()
def clip_grad_by_total_norm_(
    parameters: Parameters,
    max_grad_norm: float,
    total_norm: float | Tensor,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Scale gradients of any dtype in place by `max_grad_norm / total_norm` if that is below 1. Communicates nothing.

    Args:
        parameters: this rank's parameters.
        max_grad_norm: the largest norm allowed.
        total_norm: the present norm, from `get_grad_norm`.
        dtype: the dtype of the products, each of which is rounded once to its gradient's own dtype.
    """
    coefficient = max_grad_norm / (float(total_norm) + 1e-6)
    if coefficient >= 1.0:
        return
    for parameter in _listed(parameters):
        if parameter.grad is not None:
            grad = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            grad.copy_(grad.to(dtype) * coefficient)


def _listed(parameters: Parameters) -> list[Tensor]:
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def _counts(groups: Sequence[Group], mesh: Any = None, placements: Sequence[Placement] = ()) -> bool:
    """Return whether this rank counts its piece of a gradient with these placements, or, without a mesh, the whole."""
    for dim, placement in enumerate(placements):
        if placement.is_partial():
            raise ValueError(
                f"a gradient has placements {placements}: Partial ones are not summed over ranks yet; reduce them "
                f"first, as FSDP2 does"
            )
        if placement.is_replicate() and mesh.get_local_rank(dim) != 0:
            return False
    known = set() if mesh is None else set(mesh.mesh.flatten().tolist())
    for group in groups:
        shared = group is not None and not known.issuperset(dist.get_process_group_ranks(group))
        if shared and group_rank(group) != 0:
            return False
    return True


def _device(parameters: list[Tensor]) -> torch.device | str:
    """Return the device on which the groups communicate, by the mesh, as offloaded parameters are on the CPU."""
    if not parameters:
        return "cpu"
    first = parameters[0]
    return first.device_mesh.device_type if isinstance(first, DTensor) else first.device

"""Tensor-parallel attributes of parameters that Megatron reads elsewhere, such as `partition_dim`.

`tensor_model_parallel`: the tensor is one shard of a larger one, cut along `partition_dim` into `partition_stride`
times as many pieces as there are ranks (pieces go to the ranks in turn). Gradient norms, clipping and checkpoints read
these.
`is_qkv`, `qkv_split_shapes` and `expert_tp` are set by others and travel along.

Megatron's generalized tensor parallelism marks parameters too: `is_gtp_weight_remat` on a weight that it cuts,
`allreduce=False` on an expert's.
"""

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from megatron_ext.distributed.groups import (
    Group,
    generalized_tensor_parallel_group,
    group_rank,
    require_tensor_parallel_group,
)

_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS: dict[str, Any] = {
    "expert_tp": False,
    "is_qkv": False,
    "qkv_split_shapes": None,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Record on `tensor` how it is sharded. Recording the same again changes nothing.

    Raises:
        ValueError: `tensor` has another record: two layers would disagree about one tensor.
    """
    new = {"tensor_model_parallel": is_parallel, "partition_dim": dim, "partition_stride": stride}
    for name, value in new.items():
        before = getattr(tensor, name, value)
        if before != value:
            raise ValueError(
                f"{name} of the tensor is already {before}, not {value}: a tensor is sharded in one way only; "
                f"delete the attribute first if it really changes"
            )
    for name, value in new.items():
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Give `tensor` the attributes that it lacks, with defaults that say that it is not sharded."""
    for name, value in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Give `destination_tensor` the attributes that `source_tensor` has."""
    copy_attributes(_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS, destination_tensor, source_tensor)


def param_is_not_tensor_parallel_duplicate(
    param: Tensor, tp_group: Group = None, expert_tp_group: Group = None
) -> bool:
    """True if this rank counts `param` in a sum over the tensor-parallel ranks: a shard, or the first of the copies.

    Copies of an expert's parameter (`allreduce=False`) are told apart over `expert_tp_group`, where one is given.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    group = expert_tp_group if expert_tp_group is not None and not getattr(param, "allreduce", True) else tp_group
    return group_rank(require_tensor_parallel_group() if group is None else group) == 0


def param_is_not_gtp_duplicate(param: Tensor) -> bool:
    """True if this rank counts `param` in a sum over the ranks of generalized tensor parallelism; True without it."""
    if getattr(param, "is_gtp_weight_remat", False):
        return True
    return group_rank(generalized_tensor_parallel_group(expert=not getattr(param, "allreduce", True))) == 0


def copy_gtp_attributes(destination: Tensor, source: Tensor) -> None:
    """Give `destination` what `source` says about generalized tensor parallelism."""
    copy_attributes(("is_gtp_weight_remat", "allreduce", "gtp_replica_group", "pad_length"), destination, source)


def copy_attributes(names: Iterable[str], destination: Tensor, source: Tensor) -> None:
    """Give `destination` those of the attributes `names` that `source` has."""
    for name in names:
        if hasattr(source, name):
            setattr(destination, name, getattr(source, name))

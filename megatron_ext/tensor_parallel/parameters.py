"""What Megatron code elsewhere asks a parameter about tensor parallelism, kept as plain attributes of the tensor.

`tensor_model_parallel`: the tensor is one shard of a larger one, cut along `partition_dim` into `partition_stride`
times as many pieces as there are ranks (pieces are dealt out in turn). Gradient norms, clipping and checkpoints read
these.
`is_qkv` and `expert_tp` are set by others and travel along.
"""

from typing import Any

from torch import Tensor

from megatron_ext.distributed.groups import Group, group_rank, require_tensor_parallel_group

_MODEL_PARALLEL_ATTRIBUTE_DEFAULTS: dict[str, Any] = {
    "expert_tp": False,
    "is_qkv": False,
    "tensor_model_parallel": False,
    "partition_dim": -1,
    "partition_stride": 1,
}


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Say how `tensor` is sharded. Saying the same again changes nothing.

    Raises:
        ValueError: it already says otherwise: two layers would disagree about one tensor.
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
    """Give `tensor` those of the attributes that it lacks, saying that it is not sharded."""
    for name, value in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS.items():
        if not hasattr(tensor, name):
            setattr(tensor, name, value)


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Give `destination_tensor` the attributes that `source_tensor` has."""
    for name in _MODEL_PARALLEL_ATTRIBUTE_DEFAULTS:
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Tensor, tp_group: Group = None) -> bool:
    """Whether this rank counts `param` in a sum over the tensor-parallel ranks: a shard, or the first of the copies."""
    if getattr(param, "tensor_model_parallel", False):
        return True
    return group_rank(require_tensor_parallel_group(tp_group)) == 0

"""Weights that generalized tensor parallelism cuts once more, over ranks that share nothing else of the layer's work.

Between the products every rank holds a piece of its tensor-parallel shard: the whole shard is gathered for a product,
and a gradient of it is reduce-scattered into the pieces' `main_grad`. Megatron-Core (from 0.19 on, with Transformer
Engine) has the class of these parameters, with reused buffers, prefetches and CUDA graphs. The class follows
Transformer Engine's protocol of distributed weights, which the layers here use: `materialize_group_for_forward` and
`_for_backward` return the whole shard, by an all-gather that may have been sent ahead, in a buffer that other weights
use later.

Legend: N rows of the whole shard, D columns, T tokens.
"""

from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_ext import main_grad
from megatron_ext.distributed.groups import Group, group_rank, group_size, parallel_state
from megatron_ext.tensor_parallel import gtp_api


def is_distributed(weight: Any) -> bool:
    """Return whether a rank holds only a piece of its shard, by Transformer Engine's protocol."""
    return getattr(weight, "is_distributed_weight", False)


def cut_weight(layer: Any, group: Group, replicas: Group, sent_ahead: bool) -> int:
    """Cut the weight of a layer into pieces, one for each rank of `group`; return the number of pieces.

    `replicas` hold copies of this rank's piece, for checkpoints; None: Megatron's data-parallel ranks outside of
    `group`. `sent_ahead`: the product before this layer's starts its all-gather.
    """
    ranks = group_size(group)
    if ranks == 1 or layer.weight is None:
        return ranks
    if not gtp_api.HAVE_GTP:
        raise ValueError(
            f"generalized tensor parallelism shards each weight over {ranks} ranks, which needs Megatron-Core 0.19 or "
            "newer with Transformer Engine 2.20; set its size to 1, or install them"
        )
    gtp_api.wrap_module_params_gtp(layer, ["weight"], group)
    layer.weight._need_weight_prefetch = sent_ahead
    if replicas is not None:
        layer.weight.gtp_replica_group = replicas
    return ranks


def shape_of_shard(weight: Any) -> tuple[int, ...]:
    """Return the shape of this rank's whole shard: that of `weight` unless `weight` is distributed."""
    if not is_distributed(weight):
        return tuple(weight.shape)
    return (weight.shape[0] * weight.gtp_remat_size - weight.pad_length, *weight.shape[1:])


def check_main_grad(weight: Any) -> None:
    """Raise ValueError unless a distributed weight has the buffer that its gradient goes to."""
    if getattr(weight, "main_grad", None) is None:
        raise ValueError(
            "weight.main_grad is missing, and under generalized tensor parallelism a weight's gradient is added only "
            "there; wrap the model in Megatron's DistributedDataParallel"
        )


def reduce_gradient(weight: Any, dy_TN: Tensor, x_TD: Tensor) -> Tensor | None:
    """Add `dy.T @ x` of all ranks to the pieces' `main_grad`; return what backward returns for the weight.

    The product has the dtype of `main_grad`. Communicates: a reduce-scatter, which may end only after the backward of
    earlier weights; then None is returned.
    """
    dw_ND = weight.grad_buffer().zero_()
    if not dy_TN.is_cuda:  # CUDA adds products of 16 bits in fp32
        dy_TN, x_TD = dy_TN.to(dw_ND.dtype), x_TD.to(dw_ND.dtype)
    main_grad.add_product(dw_ND, dy_TN, x_TD)
    return weight.finalize_group_grads(dw_ND)


def table_of_lookup(weight: Any) -> Tensor:
    """Return this rank's whole table for a lookup, with a gradient; `weight` itself unless it is distributed.

    Communicates: an all-gather forward, a reduce-scatter backward.
    """
    if not is_distributed(weight):
        return weight
    return gtp_api.GTPEmbeddingWeight.apply(weight)


def copies_of_piece(weight: Any) -> Group:
    """Return the group of ranks that hold copies of this rank's piece of a distributed weight."""
    own = getattr(weight, "gtp_replica_group", None)
    if own is not None:
        return own
    state = parallel_state()
    if state is None and group_size(weight.group) == dist.get_world_size():
        return None
    if state is None:
        raise ValueError(
            "pg_collection has gtp_remat and neither dp_cp nor, of experts, expt_dp, and Megatron's parallel_state is "
            "not initialised: which ranks hold copies of a piece is unknown, and one of them writes it; pass them in "
            "pg_collection when the layer is built"
        )
    if not getattr(weight, "allreduce", True):
        return state.get_expert_data_parallel_group(with_gtp_remat=False)
    return state.get_data_parallel_group(with_context_parallel=True, with_gtp_remat=False)


def piece_of(weight: Any) -> tuple[int, int]:
    """Return this rank's piece of its shard of a distributed weight, and the number of pieces; (0, 1) of any other."""
    return (group_rank(weight.group), group_size(weight.group)) if is_distributed(weight) else (0, 1)

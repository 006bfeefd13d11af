"""The sharded state dict of the layers, for Megatron's dist_checkpointing.

Its `ShardedTensor` says where in the whole tensor a rank's piece lies, and `replica_id` which of several equal pieces
is written: the one that is all zeros. Megatron's own classes are used. Whoever saves a sharded checkpoint has imported
them; we look them up where he left them and import nothing.
"""

import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any

from torch import Tensor

from megatron_ext.distributed.groups import Group, data_parallel_group, group_rank, group_size

Offsets = Iterable[tuple[int, int, int]]  # (axis, this piece, number of pieces), of axes that lie before the tensor's


def _mapping() -> ModuleType:
    module = sys.modules.get("megatron.core.dist_checkpointing.mapping")
    if module is None:
        raise ValueError(
            "sharded_state_dict makes Megatron-Core's ShardedTensor, and megatron.core.dist_checkpointing is not "
            "imported: import it first, or use state_dict() for this rank's tensors alone"
        )
    return module


def _copies(metadata: Mapping[str, Any] | None) -> Group:
    """The group of ranks that hold copies of this rank's parameters."""
    given = (metadata or {}).get("dp_cp_group")
    return data_parallel_group() if given is None else given


def sharded_tensor(
    tensor: Tensor,
    key: str,
    axis: int | None,
    sharded_offsets: Offsets,
    tp_group: Group,
    metadata: Mapping[str, Any] | None,
    **options: Any,
) -> Any:
    """Megatron's ShardedTensor of `tensor`, cut along `axis` over `tp_group`; None: the ranks hold copies.

    A DTensor was cut before, along dimension 0 over the data-parallel ranks (PyTorch's FSDP2); its local part is taken.
    """
    rank, ranks = group_rank(tp_group), group_size(tp_group)
    if axis is None:
        return sharded_pieces(tensor, key, {}, sharded_offsets, metadata, copy=rank, **options)
    return sharded_pieces(tensor, key, {axis: (rank, ranks)}, sharded_offsets, metadata, **options)


def sharded_pieces(
    tensor: Tensor,
    key: str,
    pieces: Mapping[int, tuple[int, int]],
    sharded_offsets: Offsets,
    metadata: Mapping[str, Any] | None,
    *,
    copy: int = 0,
    **options: Any,
) -> Any:
    """Megatron's ShardedTensor of a tensor cut along axes: `{axis: (this piece, number of pieces)}`.

    `copy` numbers equal pieces, besides those of the data-parallel ranks. A DTensor: see `sharded_tensor`.
    """
    offsets = list(sharded_offsets)
    copies = _copies(metadata)
    replica_id = (0, copy, group_rank(copies))
    pieces = dict(pieces)
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
        position, number = pieces.get(0, (0, 1))
        pieces[0] = (position * group_size(copies) + group_rank(copies), number * group_size(copies))
        replica_id = (0, copy, 0)
    own = [(dim + len(offsets), *piece) for dim, piece in pieces.items()]
    return _mapping().ShardedTensor.from_rank_offsets(
        key, tensor, *offsets, *own, replica_id=replica_id, prepend_axis_num=len(offsets), **options
    )


def sharded_object(
    value: Any, key: str, sharded_offsets: Offsets, tp_group: Group, metadata: Mapping[str, Any] | None
) -> Any:
    """Megatron's ShardedObject of `value`, of which every rank of `tp_group` holds a copy."""
    offsets = sorted(sharded_offsets)
    shape = tuple(pieces for _, _, pieces in offsets) or (1,)
    position = tuple(piece for _, piece, _ in offsets) or (0,)
    replica_id = (0, group_rank(tp_group), group_rank(_copies(metadata)))
    return _mapping().ShardedObject(key, value, shape, position, replica_id)


def sharded_linear(
    state: Mapping[str, Any],
    axes: Mapping[str, int],
    prefix: str,
    sharded_offsets: Offsets,
    tp_group: Group,
    metadata: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Every entry of a layer's `state`, those in `axes` cut along that axis; extra state as an object."""
    shards = {}
    for name, value in state.items():
        key = f"{prefix}{name}"
        if name.endswith("_extra_state"):
            shards[key] = sharded_object(value, key, sharded_offsets, tp_group, metadata)
        else:
            shards[key] = sharded_tensor(value, key, axes.get(name), sharded_offsets, tp_group, metadata)
    return shards

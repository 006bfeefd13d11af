"""The sharded state dict of the layers, for Megatron's dist_checkpointing.

Its `ShardedTensor` says where in the whole tensor a rank's piece lies, and `replica_id` which of several equal pieces
is written: the one that is all zeros. The classes are Megatron's own. A program that saves a sharded checkpoint has
imported them; they are looked up in `sys.modules`, and nothing is imported here.
"""

import sys
from collections.abc import Iterable, Mapping
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor

from megatron_ext.distributed.groups import Group, data_parallel_group, group_rank, group_size
from megatron_ext.tensor_parallel._layers.distributed_weights import copies_of_piece, is_distributed, piece_of


def _mapping() -> ModuleType:
    module = sys.modules.get("megatron.core.dist_checkpointing.mapping")
    if module is None:
        raise ValueError(
            "sharded_state_dict makes Megatron-Core's ShardedTensor, and megatron.core.dist_checkpointing is not "
            "imported: import it first, or use state_dict() for only this rank's tensors"
        )
    return module


class LayerPlacement(NamedTuple):
    """A layer's place in the model, and its ranks.

    Attributes:
        offsets: (axis, this piece, number of pieces), for axes that precede the tensors' own.
        metadata: its `dp_cp_group` is the group that holds copies of this rank's parameters; by default Megatron's.
        tp_group: the layer's tensor-parallel ranks.
        copy: this rank's number among the copies of a tensor that generalized tensor parallelism does not cut, and the
            number of copies.
    """

    offsets: Iterable[tuple[int, int, int]]
    metadata: Mapping[str, Any] | None
    tp_group: Group = None
    copy: tuple[int, int] = (0, 1)

    @property
    def copies(self) -> Group:
        given = (self.metadata or {}).get("dp_cp_group")
        return data_parallel_group() if given is None else given

    def layer(self, state: Mapping[str, Any], axes: Mapping[str, int], prefix: str) -> dict[str, Any]:
        """Convert a layer's `state`: entries in `axes` are cut along that axis; extra state becomes an object."""
        place = self._replace(copy=piece_of(state.get("weight")))
        shards = {}
        for name, value in state.items():
            key = f"{prefix}{name}"
            extra = name.endswith("_extra_state")
            shards[key] = place.object(value, key) if extra else place.tensor(value, key, axes.get(name))
        return shards

    def tensor(self, tensor: Tensor, key: str, axis: int | None, **options: Any) -> Any:
        """Make Megatron's ShardedTensor of `tensor`, cut along `axis` over `tp_group`; None: the ranks hold copies."""
        rank, ranks = group_rank(self.tp_group), group_size(self.tp_group)
        number, copies = (0, 1) if is_distributed(tensor) else self.copy
        pieces = {} if axis is None else {axis: (rank, ranks)}
        return self.pieces(tensor, key, pieces, number + (rank * copies if axis is None else 0), **options)

    def pieces(
        self, tensor: Tensor, key: str, pieces: Mapping[int, tuple[int, int]], copy: int = 0, **options: Any
    ) -> Any:
        """Make Megatron's ShardedTensor of a tensor cut along axes: `{axis: (this piece, number of pieces)}`.

        A DTensor was cut before, along dimension 0 over the data-parallel ranks (PyTorch's FSDP2); so was a weight
        under generalized tensor parallelism. `copy` numbers equal pieces, besides those of the data-parallel ranks.
        """
        offsets, copies, pieces = list(self.offsets), self.copies, dict(pieces)
        replica_id = (0, copy, group_rank(copies))
        if hasattr(tensor, "to_local"):
            tensor = tensor.to_local()
            pieces[0] = _cut_once_more(pieces, group_rank(copies), group_size(copies))
            replica_id = (0, copy, 0)
        elif is_distributed(tensor):
            pieces[0] = _cut_once_more(pieces, *piece_of(tensor))
            replica_id = (0, copy, group_rank(copies_of_piece(tensor)))
            if getattr(tensor, "pad_length", 0):
                options["allow_shape_mismatch"] = True
        own = [(dim + len(offsets), *piece) for dim, piece in pieces.items()]
        return _mapping().ShardedTensor.from_rank_offsets(
            key, tensor, *offsets, *own, replica_id=replica_id, prepend_axis_num=len(offsets), **options
        )

    def object(self, value: Any, key: str) -> Any:
        """Make Megatron's ShardedObject of `value`, of which every rank of `tp_group` holds a copy."""
        offsets = sorted(self.offsets)
        shape = tuple(pieces for _, _, pieces in offsets) or (1,)
        position = tuple(piece for _, piece, _ in offsets) or (0,)
        number, copies = self.copy
        replica_id = (0, group_rank(self.tp_group) * copies + number, group_rank(self.copies))
        return _mapping().ShardedObject(key, value, shape, position, replica_id)


def _cut_once_more(pieces: Mapping[int, tuple[int, int]], rank: int, ranks: int) -> tuple[int, int]:
    """Return the piece along dimension 0, and the number of pieces, if each of `pieces` is cut over `ranks` ranks."""
    position, number = pieces.get(0, (0, 1))
    return position * ranks + rank, number * ranks

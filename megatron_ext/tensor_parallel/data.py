"""One rank reads the batch, its tensor-parallel peers receive it. Drop-in for Megatron's module.

Two broadcasts, whatever the number of tensors: a header with each tensor's dtype and shape, of a length that all ranks
know, then all the tensors in one buffer of bytes. Only the first rank can see faults of the data, so these travel in
the header: every rank raises the same error, and no rank waits for a buffer that never comes.
"""

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed import byte_buffer, collectives
from megatron_ext.distributed.groups import Group, group_rank, require_tensor_parallel_group

_MAX_DATA_DIM = 64  # as many as torch's own operators take

# The numbers of the dtypes in the header: every rank lists them alike.
_DTYPES = sorted({dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}, key=str)

_MISSING, _NO_DENSE_TENSOR, _WRONG_DTYPE, _TOO_MANY_DIMS = 1, 2, 3, 4


class _Description(NamedTuple):
    """A row of the header: the fault of a tensor (0: none), its dtype and its shape."""

    fault: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def to_row(self) -> list[int]:
        dims = self.shape[:_MAX_DATA_DIM]
        return [self.fault, _DTYPES.index(self.dtype), len(self.shape), *dims, *[0] * (_MAX_DATA_DIM - len(dims))]

    @classmethod
    def from_row(cls, row: Sequence[int]) -> "_Description":
        fault, dtype, dims, *shape = row
        return cls(fault, _DTYPES[dtype], tuple(shape[:dims]))


def _describe(data: Any, key: str, datatype: torch.dtype | None) -> _Description:
    try:
        value = data[key]
    except (KeyError, IndexError, TypeError):
        return _Description(_MISSING, torch.uint8, ())
    if not isinstance(value, Tensor) or value.layout is not torch.strided or value.is_meta:
        return _Description(_NO_DENSE_TENSOR, torch.uint8, ())
    fault = 0
    if datatype is not None and value.dtype != datatype:
        fault = _WRONG_DTYPE
    elif value.dim() > _MAX_DATA_DIM:
        fault = _TOO_MANY_DIMS
    return _Description(fault, value.dtype, tuple(value.shape))


def _raise_faults(described: Mapping[str, _Description], datatype: torch.dtype | None) -> None:
    for key, found in described.items():
        if found.fault:
            raise ValueError(
                {
                    _MISSING: f"data lacks {key!r}, which keys asks for: the first rank of tp_group must have it; "
                    f"add it to data there, or leave it out of keys on every rank",
                    _NO_DENSE_TENSOR: f"data[{key!r}] is no dense tensor with values: only those can be broadcast; "
                    f"convert it on the first rank of tp_group",
                    _WRONG_DTYPE: f"data[{key!r}] is {found.dtype}: it must be {datatype}, the datatype given; cast it "
                    f"on the first rank of tp_group, or pass datatype=None to keep every tensor's own",
                    _TOO_MANY_DIMS: f"data[{key!r}] has more than {_MAX_DATA_DIM} dims; reshape it before and after",
                }[found.fault]
            )


def _check_data_types(keys: Iterable[str], data: Any, target_dtype: torch.dtype) -> None:
    """Raise ValueError if a tensor of this rank's `data` is missing or not of `target_dtype`."""
    _raise_faults({key: _describe(data, key, target_dtype) for key in keys}, target_dtype)


def _device_of(group: Group) -> torch.device | None:
    """Return the device of the group's messages, where the batch is put too: NCCL's are on the GPU."""
    if group is None:
        return None
    on_gpu = "cuda:nccl" in str(dist.get_backend_config(group))
    return torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")


def _exchange_descriptions(
    keys: Sequence[str], data: Any, datatype: torch.dtype | None, group: Group
) -> dict[str, _Description]:
    """Send every rank the descriptions of the first rank's tensors, and raise their faults. One broadcast."""
    header = torch.zeros(len(keys), 3 + _MAX_DATA_DIM, dtype=torch.int64)
    if group_rank(group) == 0:
        header = torch.tensor([_describe(data, key, datatype).to_row() for key in keys])
    rows = collectives.broadcast(header.to(_device_of(group)), group).tolist()
    described = {key: _Description.from_row(row) for key, row in zip(keys, rows, strict=True)}
    _raise_faults(described, datatype)
    return described


def _build_key_size_numel_dictionaries(
    keys: Iterable[str], data: Any, tp_group: Group = None
) -> tuple[dict[str, tuple[int, ...]], dict[str, int], int]:
    """Return the first rank's shapes, numbers of elements, and their sum. One broadcast."""
    described = _exchange_descriptions(list(keys), data, None, require_tensor_parallel_group(tp_group))
    numel = {key: prod(found.shape) for key, found in described.items()}
    return {key: found.shape for key, found in described.items()}, numel, sum(numel.values())


def broadcast_data(
    keys: Iterable[str], data: Any, datatype: torch.dtype | None, tp_group: Group = None
) -> dict[str, Tensor]:
    """Broadcast the tensors `data[key]` of the group's first rank to all its ranks.

    Args:
        keys: names of the tensors to send, the same on every rank.
        data: on the first rank a dict of tensors of any shapes, on any device; on the others it is not read.
        datatype: the dtype that every tensor must have; None: each keeps its own, and they may differ.
        tp_group: None for Megatron's tensor-parallel group.

    Returns:
        New tensors, views of one buffer, detached: on the GPU if the group communicates there (NCCL), else on the CPU
        (without a group: where the first of them lies).

    Communicates: 2 broadcasts, 1 if all tensors are empty, none in a group of one rank. The host waits for the header.

    Raises:
        ValueError: on every rank, if a key is missing or is no dense tensor, or a dtype is not `datatype`.
    """
    group, keys = require_tensor_parallel_group(tp_group), list(keys)
    if not keys:
        return {}
    described = _exchange_descriptions(keys, data, datatype, group)
    device = data[keys[0]].device if group is None else _device_of(group)
    forms = [(found.shape, found.dtype) for found in described.values()]
    buffer = torch.empty(byte_buffer.room(forms), dtype=torch.uint8, device=device)
    views = dict(zip(described, byte_buffer.views(buffer, forms), strict=True))
    if group_rank(group) == 0:
        for key, view in views.items():
            view.copy_(data[key].detach())
    if buffer.numel():
        collectives.broadcast(buffer, group)
    return views

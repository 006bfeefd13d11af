"""The index of a checkpoint's tensors as JSON, and the writer and reader of torch.distributed.checkpoint with it.

    {"tensors": {name: {"dtype", "size", "chunks": [[offsets, sizes], ...]}},
     "places": [[name, offsets, number, file, start, length], ...]}

Only a whole index is accepted: chunks cover each tensor exactly once, and each chunk lies within a file of the
checkpoint's own folder.
"""

import itertools
import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

INDEX = "index.json"


class Writer(dcp.FileSystemWriter):
    """DCP's writer, with the index in JSON beside it. `written` are the files that this rank has written."""

    def __init__(self, path: Path):
        super().__init__(path)
        self.written: set[str] = set()

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = super().write_data(plan, planner)
        self.written = {result.storage_data.relative_path for result in results.wait()}
        return results

    def finish(self, metadata: Metadata, results: Any) -> None:
        super().finish(metadata, results)
        tensors = {
            name: {
                "dtype": str(entry.properties.dtype).removeprefix("torch."),
                "size": list(entry.size),
                "chunks": [[list(chunk.offsets), list(chunk.sizes)] for chunk in entry.chunks],
            }
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        places = []  # not from `metadata`: torch before 2.11 sets the places in a copy of it
        for written in (one for of_a_rank in results for one in of_a_rank):
            index, info = written.index, written.storage_data
            places.append([index.fqn, list(index.offset), index.index, info.relative_path, info.offset, info.length])
        (Path(self.path) / INDEX).write_text(json.dumps({"tensors": tensors, "places": places}))
        self.written |= {INDEX, ".metadata"}


class Reader(dcp.FileSystemReader):
    """DCP's reader, with the index from JSON."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_index(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def read_index(folder: Path) -> Metadata:
    """Read a folder's index as DCP's metadata."""
    index = json.loads((folder / INDEX).read_text())
    tensors = {
        name: TensorStorageMetadata(
            TensorProperties(dtype=_dtype(entry["dtype"])),
            torch.Size(entry["size"]),
            [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in entry["chunks"]],
        )
        for name, entry in index["tensors"].items()
    }
    places = {
        MetadataIndex(name, offset, number): _StorageInfo(file, start, length)
        for name, offset, number, file, start, length in index["places"]
    }
    return Metadata(state_dict_metadata=dict(tensors), storage_data=places)


def check_whole(metadata: Metadata, sizes: Mapping[str, int]) -> None:
    """Raise ValueError unless chunks cover every tensor exactly once, within files of these sizes in bytes."""
    for index, info in metadata.storage_data.items():
        if info.relative_path not in sizes:
            raise ValueError(f"the index has {index.fqn} in {info.relative_path}, which is no file of the checkpoint")
        if min(info.offset, info.length) < 0 or info.offset + info.length > sizes[info.relative_path]:
            raise ValueError(f"the index has {index.fqn} beyond the end of {info.relative_path}")
    places = {(index.fqn, index.offset) for index in metadata.storage_data}
    for name, entry in metadata.state_dict_metadata.items():
        assert isinstance(entry, TensorStorageMetadata)
        if not _covers(entry.size, entry.chunks):
            raise ValueError(f"the index has pieces of {name} that do not make a whole of {list(entry.size)}")
        if any((name, chunk.offsets) not in places for chunk in entry.chunks):
            raise ValueError(f"the index has a piece of {name} without its place in a file")


def _covers(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether each element of a tensor is in exactly one chunk, by the grid of all chunks' beginnings."""
    if any(len(chunk.offsets) != len(size) or len(chunk.sizes) != len(size) for chunk in chunks):
        return False
    beginnings = [sorted({chunk.offsets[dim] for chunk in chunks}) for dim in range(len(size))]
    cells: set[tuple[int, ...]] = set()
    for chunk in chunks:
        ranges = list(zip(chunk.offsets, chunk.sizes, size, strict=True))
        if any(begin < 0 or length < 0 or begin + length > whole for begin, length, whole in ranges):
            return False
        inside = [
            found[bisect_left(found, begin) : bisect_left(found, begin + length)]
            for found, (begin, length, _) in zip(beginnings, ranges, strict=True)
        ]
        for cell in itertools.product(*inside):
            if cell in cells:
                return False
            cells.add(cell)
    return sum(math.prod(chunk.sizes) for chunk in chunks) == math.prod(size)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found

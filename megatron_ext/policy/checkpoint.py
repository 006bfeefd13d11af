"""Checkpoints that can be loaded in another layout, are whole or refused, and execute nothing.

    PATH/__0_0.distcp ...   tensors, by torch.distributed.checkpoint (DCP): each rank writes its own, cut as they are
    PATH/.metadata          DCP's own index, a pickle, for other tools; never read here
    PATH/index.json         the same index as JSON
    PATH/facts.json         everything that is no tensor, and the size and CRC-32 of each file: written last

A pickle executes what its writer wants, and DCP unpickles its index and whatever the index calls no tensor. Here the
index is JSON that can name tensors only, and those go through `torch.load(weights_only=True)`.

A checkpoint is written beside `PATH` and takes its name once it is complete; what was there before is removed then.
Every function is called by all ranks, which share the file system, and raises on all of them if it does on one.
"""

import json
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megatron_ext.policy.agreement import agree

INDEX, FACTS = "index.json", "facts.json"


def save(path: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """Writes `tensors` (DTensors or replicated ones) and `facts` (JSON, the same on every rank) under `path`.

    Raises:
        ValueError: `facts` is no JSON.
        OSError: the files cannot be written; what `path` held before is still there.
    """
    path = Path(path)
    new, old = path.with_name(path.name + ".new"), path.with_name(path.name + ".old")
    lead = _rank() == 0

    def begin() -> None:
        json.dumps(facts)
        if lead:
            shutil.rmtree(new, ignore_errors=True)
            new.mkdir(parents=True)

    agree(begin)
    try:
        dcp.save(dict(tensors), storage_writer=_Writer(new), no_dist=_alone())
    except CheckpointException as error:
        raise OSError(f"the checkpoint {path} was not written: {error}") from None
    files = sorted(file.name for file in new.iterdir())
    sums = agree(lambda: _checksums(new, files[_rank() :: _ranks()]))

    def finish() -> None:
        if lead:
            listed = {name: entry for part in sums for name, entry in part.items()}
            (new / FACTS).write_text(json.dumps({"files": listed, "facts": facts}))
            shutil.rmtree(old, ignore_errors=True)
            if path.exists():
                path.rename(old)
            new.rename(path)
            shutil.rmtree(old, ignore_errors=True)

    agree(finish)


def load(path: str | Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Reads into `tensors`, in place, once all files were found whole and to hold them. Returns the facts.

    Raises:
        ValueError: there is no checkpoint, it is incomplete or damaged, or holds other tensors. Nothing has changed.
    """
    facts = check(path)
    must_hold(path, tensors)
    read(path, tensors)
    return facts


def check(path: str | Path) -> dict[str, Any]:
    """The facts of a checkpoint, once all of its files were found whole.

    Raises:
        ValueError: there is no checkpoint, or it is incomplete or damaged.
    """
    path = Path(path)

    def verify() -> dict[str, Any]:
        complete = _complete(path)
        try:
            found = json.loads((complete / FACTS).read_text())
            listed = found["files"]
            own = sorted(listed)[_rank() :: _ranks()]
            sums = _checksums(complete, own)
            metadata = _read_index(complete)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"the checkpoint {path} is incomplete or damaged ({error}); load another one") from None
        wrong = [name for name in own if sums[name] != listed[name]]
        strange = {info.relative_path for info in metadata.storage_data.values()} - set(listed)
        if wrong or strange:
            raise ValueError(
                f"the checkpoint {path} is damaged: {', '.join(wrong or sorted(strange))} is not what was written; "
                f"load another one"
            )
        return found["facts"]

    return agree(verify)[_rank()]


def must_hold(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless the checkpoint, which `check` found whole, has these tensors in their shapes."""
    path = Path(path)
    agree(lambda: _check_tensors(path, _read_index(_complete(path)), tensors))


def read(path: str | Path, tensors: Mapping[str, Tensor]) -> None:
    """Reads into `tensors`, in place, what `must_hold` found there."""
    path = Path(path)
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(_complete(path)), no_dist=_alone())
    except CheckpointException as error:
        raise ValueError(f"the checkpoint {path} cannot be read: {error}") from None


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, with the index in JSON beside it."""

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
        places = [
            [index.fqn, list(index.offset), index.index, info.relative_path, info.offset, info.length]
            for index, info in metadata.storage_data.items()
        ]
        (Path(self.path) / INDEX).write_text(json.dumps({"tensors": tensors, "places": places}))


class _Reader(dcp.FileSystemReader):
    """DCP's reader, with the index from JSON."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = _read_index(Path(self.path))
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


def _read_index(path: Path) -> Metadata:
    index = json.loads((path / INDEX).read_text())
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


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name} is no dtype")
    return found


def _complete(path: Path) -> Path:
    """`path`, or what it held before where its successor never took its name."""
    old = path.with_name(path.name + ".old")
    return old if not path.exists() and old.exists() else path


def _check_tensors(path: Path, metadata: Metadata, tensors: Mapping[str, Tensor]) -> None:
    for name, tensor in tensors.items():
        entry = metadata.state_dict_metadata.get(name)
        size = entry.size if isinstance(entry, TensorStorageMetadata) else None
        if size != tensor.shape:
            found = "lacks it" if size is None else f"has it as {list(size)}"
            raise ValueError(
                f"{name} is {list(tensor.shape)} here and the checkpoint {path} {found}: they must hold the same model "
                f"and optimizer; load one of this model"
            )


def _checksums(path: Path, files: list[str]) -> dict[str, list[int]]:
    """Size and CRC-32 of each file."""
    found = {}
    for name in files:
        checksum, size = 0, 0
        with (path / name).open("rb") as file:
            while block := file.read(1 << 24):
                checksum, size = zlib.crc32(block, checksum), size + len(block)
        found[name] = [size, checksum]
    return found


def _alone() -> bool:
    return not dist.is_initialized()


def _rank() -> int:
    return 0 if _alone() else dist.get_rank()


def _ranks() -> int:
    return 1 if _alone() else dist.get_world_size()

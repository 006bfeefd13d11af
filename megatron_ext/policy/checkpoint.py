"""Checkpoints that can be loaded in another layout, are whole or refused, and execute nothing.

    PATH/__0_0.distcp ...   tensors, by torch.distributed.checkpoint (DCP): each rank writes its own, cut as they are
    PATH/.metadata          DCP's own index, a pickle, for other tools; never read here
    PATH/index.json         the same index as JSON
    PATH/facts.json         everything that is no tensor, the size and CRC-32 of each file, and which save wrote it

A pickle executes what its writer wants, and DCP unpickles its index and whatever the index calls no tensor. Here the
index is JSON that can name tensors only, and those go through `torch.load(weights_only=True)`.

What is saved together is loaded together; see `megatron_ext.policy.folders`.
Every function is called by all ranks, which share the file system, and raises on all of them if it does on one.
"""

import json
import uuid
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

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

from megatron_ext.policy import folders
from megatron_ext.policy.agreement import agree
from megatron_ext.policy.folders import FACTS

INDEX = "index.json"


class Part(NamedTuple):
    """A folder to write: `tensors` are DTensors or replicated ones, `facts` JSON, the same on every rank."""

    path: Path
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


class Found(NamedTuple):
    """A complete folder: the path that was asked for, where it lies, and its facts."""

    path: Path
    folder: Path
    facts: dict[str, Any]


def save(path: str | Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    """`save_together` of one folder."""
    save_together(Part(Path(path), tensors, facts))


def save_together(*parts: Part) -> None:
    """Writes folders that `find` gives together only.

    Raises:
        ValueError: facts are no JSON, or a path lies in another one or holds something else.
        OSError: the files cannot be written. What the paths held before is still there.
    """
    paths = [part.path for part in parts]
    lead = _rank() == 0

    def begin() -> str:
        json.dumps([part.facts for part in parts])
        folders.check_free(paths)
        for path in paths if lead else ():
            folders.begin(path)
        return uuid.uuid4().hex

    which = agree(begin)[0]
    for path, tensors, _ in parts:
        try:
            dcp.save(dict(tensors), storage_writer=_Writer(folders.new(path)), no_dist=_alone())
        except CheckpointException as error:
            raise OSError(f"the checkpoint {path} was not written: {error}") from None
    new = [folders.new(path) for path in paths]
    sums = agree(lambda: [_checksums(folder, _own_share(file.name for file in folder.iterdir())) for folder in new])

    def finish() -> None:
        for i, part in enumerate(parts) if lead else ():
            listed = {name: entry for found in sums for name, entry in found[i].items()}
            (new[i] / FACTS).write_text(json.dumps({"save": which, "files": listed, "facts": part.facts}))
        if lead:
            folders.publish(paths)

    agree(finish)


def load(path: str | Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Reads into `tensors`, in place, once all files were found whole and to hold them. Returns the facts.

    Raises:
        ValueError: there is no checkpoint, it is incomplete or damaged, or holds other tensors. Nothing has changed.
    """
    [found] = find(path)
    must_hold(found, tensors)
    read(found, tensors)
    return found.facts


def find(*paths: str | Path) -> list[Found]:
    """The folders of one save, all files of which were found whole.

    Raises:
        ValueError: one is not there, incomplete or damaged, or they are of different saves.
    """
    places = [Path(path) for path in paths]

    def verify() -> list[Found]:
        return [_verified(path, folder) for path, folder in zip(places, folders.of_one_save(places), strict=True)]

    return agree(verify)[_rank()]


def must_hold(found: Found, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless the checkpoint has these tensors in their shapes."""
    agree(lambda: _check_tensors(found.path, _read_index(found.folder), tensors))


def read(found: Found, tensors: Mapping[str, Tensor]) -> None:
    """Reads into `tensors`, in place, what `must_hold` found there."""
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(found.folder), no_dist=_alone())
    except CheckpointException as error:
        raise ValueError(f"the checkpoint {found.path} cannot be read: {error}") from None


def _verified(path: Path, folder: Path) -> Found:
    """Each rank looks at its share of the files."""
    try:
        said = json.loads((folder / FACTS).read_text())
        listed, facts = said["files"], said["facts"]
        own = _own_share(listed)
        sums = _checksums(folder, own)
        metadata = _read_index(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the checkpoint {path} is incomplete or damaged ({error}); load another one") from None
    wrong = [name for name in own if sums[name] != listed[name]]
    strange = {info.relative_path for info in metadata.storage_data.values()} - set(listed)
    if wrong or strange:
        raise ValueError(
            f"the checkpoint {path} is damaged: {', '.join(wrong or sorted(strange))} is not what was written; "
            f"load another one"
        )
    return Found(path, folder, facts)


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


def _own_share(names: Iterable[str]) -> list[str]:
    return sorted(names)[_rank() :: _ranks()]


def _alone() -> bool:
    return not dist.is_initialized()


def _rank() -> int:
    return 0 if _alone() else dist.get_rank()


def _ranks() -> int:
    return 1 if _alone() else dist.get_world_size()

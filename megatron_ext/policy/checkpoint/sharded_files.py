"""Sharded checkpoints with checksums that load in any layout, and are either whole or refused; no pickle is executed.

    PATH/__0_0.distcp ...   tensors, by torch.distributed.checkpoint (DCP): each rank writes its own, cut as they are
    PATH/.metadata          DCP's own index, a pickle, for other tools; never read here
    PATH/index.json         the same index as JSON
    PATH/facts.json         everything that is no tensor, what kind of part this is, the size and CRC-32 of each file,
                            which save wrote it, and the CRC-32 of all that

A pickle executes what its writer wants, and DCP unpickles its index and whatever the index calls no tensor. Here the
index is JSON that can name tensors only, and those go through `torch.load(weights_only=True)`.

What is saved together is loaded together; see `megatron_ext.policy.checkpoint.atomic_folders`.
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

from megatron_ext.policy.checkpoint import atomic_folders
from megatron_ext.policy.checkpoint.atomic_folders import FACTS
from megatron_ext.policy.checkpoint.json_values import from_json, to_json
from megatron_ext.policy.data.agreement_of_ranks import agree

INDEX = "index.json"
_SAME_MODEL = "they must hold the same model and optimizer; load one of this model"


class Part(NamedTuple):
    """A folder to write: `tensors` are DTensors or replicated ones, `facts` what `to_json` takes, alike on every rank.

    `kind` is what `find` is asked for, as "weights" or "optimizer".
    """

    kind: str
    path: Path
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


class Found(NamedTuple):
    """A complete folder: the path that was asked for, where it lies, and its facts."""

    path: Path
    folder: Path
    facts: dict[str, Any]


def save_together(*parts: Part) -> None:
    """Writes folders that `find` gives together only.

    Raises:
        ValueError: facts cannot be JSON, or a path lies in another one or holds something else.
        OSError: the files cannot be written. What the paths held before is still there.
    """
    paths = [part.path for part in parts]
    lead = _rank() == 0
    facts: list[Any] = []

    def begin() -> str:
        facts.extend(to_json(part.facts, part.kind) for part in parts)
        atomic_folders.check_free(paths)
        for path in paths if lead else ():
            atomic_folders.begin(path)
        return uuid.uuid4().hex

    which = agree(begin)[0]
    for _, path, tensors, _ in parts:
        try:
            dcp.save(dict(tensors), storage_writer=_Writer(atomic_folders.new(path)), no_dist=_alone())
        except CheckpointException as error:
            raise OSError(f"the checkpoint {path} was not written: {error}") from None
    new = [atomic_folders.new(path) for path in paths]
    sums = agree(lambda: [_checksums(folder, _own_share(file.name for file in folder.iterdir())) for folder in new])

    def finish() -> None:
        for i, part in enumerate(parts) if lead else ():
            listed = {name: entry for found in sums for name, entry in found[i].items()}
            content = {"save": which, "kind": part.kind, "files": listed, "facts": facts[i]}
            (new[i] / FACTS).write_text(json.dumps({**content, "checksum": _checksum(content)}))
        if lead:
            atomic_folders.publish(paths)

    agree(finish)


def find(**paths: str | Path) -> list[Found]:
    """The folders of one save, `kind=path`, all files of which were found whole.

    Raises:
        ValueError: one is not there, incomplete or damaged, of another kind, or they are of different saves.
    """
    places = [Path(path) for path in paths.values()]

    def verify() -> list[Found]:
        folder_of = zip(paths, places, atomic_folders.of_one_save(places), strict=True)
        return [_verified(kind, path, folder) for kind, path, folder in folder_of]

    return agree(verify)[_rank()]


def must_hold(found: Found, tensors: Mapping[str, Tensor]) -> None:
    """Raises ValueError unless the checkpoint has these tensors in their shapes, and no others than those of all ranks
    (the stages of a pipeline have different ones)."""

    def check() -> tuple[list[str], list[str]]:
        index = _read_index(found.folder)
        _check_tensors(found.path, index, tensors)
        return sorted(index.state_dict_metadata), list(tensors)

    ranks = agree(check)
    if more := sorted(set(ranks[0][0]).difference(*(own for _, own in ranks))):
        raise ValueError(
            f"the checkpoint {found.path} has {', '.join(more[:3])} and there is no such thing here: {_SAME_MODEL}"
        )


def read(found: Found, tensors: Mapping[str, Tensor]) -> None:
    """Reads into `tensors`, in place, what `must_hold` found there."""
    try:
        dcp.load(dict(tensors), storage_reader=_Reader(found.folder), no_dist=_alone())
    except CheckpointException as error:
        raise ValueError(f"the checkpoint {found.path} cannot be read: {error}") from None


def _verified(kind: str, path: Path, folder: Path) -> Found:
    """Each rank looks at its share of the files."""
    try:
        said = json.loads((folder / FACTS).read_text())
        checksum, listed = said.pop("checksum"), said["files"]
        own = _own_share(listed)
        sums = _checksums(folder, own)
        metadata = _read_index(folder)
        facts = from_json(said["facts"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"the checkpoint {path} is incomplete or damaged ({error}); load another one") from None
    wrong = [name for name in own if sums[name] != listed[name]]
    wrong += sorted({info.relative_path for info in metadata.storage_data.values()} - set(listed))
    if checksum != _checksum(said):
        wrong.append(FACTS)
    if wrong:
        raise ValueError(
            f"the checkpoint {path} is damaged: {', '.join(wrong)} is not what was written; load another one"
        )
    if said["kind"] != kind:
        raise ValueError(
            f"the checkpoint {path} holds {said['kind']}, and {kind} is to be read there: pass the path that it was "
            f"saved to"
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
        places = []  # not from `metadata`: before torch 2.11 they are set in a copy of it
        for written in (one for of_a_rank in results for one in of_a_rank):
            index, info = written.index, written.storage_data
            places.append([index.fqn, list(index.offset), index.index, info.relative_path, info.offset, info.length])
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
    there = metadata.state_dict_metadata
    for name, tensor in tensors.items():
        entry = there.get(name)
        size = entry.size if isinstance(entry, TensorStorageMetadata) else None
        if size != tensor.shape:
            found = "lacks it" if size is None else f"has it as {list(size)}"
            raise ValueError(f"{name} is {list(tensor.shape)} here and the checkpoint {path} {found}: {_SAME_MODEL}")


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


def _checksum(content: Mapping[str, Any]) -> int:
    """The same before `content` is written and after it is read: JSON keeps order and numbers."""
    return zlib.crc32(json.dumps(content).encode())


def _own_share(names: Iterable[str]) -> list[str]:
    return sorted(names)[_rank() :: _ranks()]


def _alone() -> bool:
    return not dist.is_initialized()


def _rank() -> int:
    return 0 if _alone() else dist.get_rank()


def _ranks() -> int:
    return 1 if _alone() else dist.get_world_size()

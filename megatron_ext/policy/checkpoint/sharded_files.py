"""Sharded checkpoints with checksums that load in any layout, and are either whole or refused; no pickle is executed.

    PATH/__0_0.distcp ...   tensors, by torch.distributed.checkpoint (DCP): each rank writes its own shards
    PATH/.metadata          DCP's own index, a pickle, for other tools; never read here
    PATH/index.json         the same index as JSON
    PATH/facts.json         everything that is no tensor, the kind of this part, the size and CRC-32 of each file, the
                            ID of the save, and the CRC-32 of all these

A pickle can execute any code, and DCP unpickles its index and every entry that the index does not call a tensor. Here
the index is JSON that can name tensors only, and tensors are read by `torch.load(weights_only=True)`.

Folders found by one call must be of one save; see `megatron_ext.policy.checkpoint.atomic_folders`.
All ranks call every function; a function that raises on one rank raises on all. The ranks must share the file system,
which is checked before anything is written, replaced or read.
"""

import json
import os
import platform
import time
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from megatron_ext.distributed.groups import group_rank, group_size
from megatron_ext.policy.checkpoint import atomic_folders
from megatron_ext.policy.checkpoint.atomic_folders import FACTS
from megatron_ext.policy.checkpoint.json_values import from_json, to_json
from megatron_ext.policy.checkpoint.tensor_index import Reader, Writer, check_whole, read_index
from megatron_ext.policy.data.agreement_of_ranks import agree, world
from megatron_ext.policy.outside_waits import outside_wait

T = TypeVar("T")

# Seconds for which a network file system may not show a new file: NFS caches the entries of a folder.
PATIENCE_S = 60.0
_SAME_MODEL = "they must hold the same model and optimizer; load one of this model"


class Part(NamedTuple):
    """A folder to write: `tensors` are DTensors or alike on all ranks; `facts`, alike too, are what `to_json` takes.

    `kind`, such as "weights" or "optimizer", is the keyword of `find`. A `path` that is a link is followed.
    """

    kind: str
    path: str | Path
    tensors: Mapping[str, Tensor]
    facts: Mapping[str, Any]


class Found(NamedTuple):
    """A complete folder: the `path` that was given, the `folder` that holds its files, and its facts."""

    path: Path
    folder: Path
    facts: dict[str, Any]


def save_together(*parts: Part) -> None:
    """Write folders that `find` finds only together; they replace older ones after every rank has seen them whole.

    Raises:
        ValueError: facts cannot be written as JSON, a path lies in another one or holds something that is no
            checkpoint, or the ranks do not share the file system. The message names the path.
        OSError: the files cannot be written, or read back as they were written.
            The paths still hold what they held before.
    """
    paths = [_followed(part.path) for part in parts]
    lead = group_rank(world()) == 0
    facts: list[Any] = []

    def begin() -> str:
        facts.extend(to_json(part.facts, part.kind) for part in parts)
        which = uuid4().hex
        if lead:
            atomic_folders.check_free(paths)
            for path in paths:
                atomic_folders.begin(path, which)
        return which

    which = agree(begin)[0]
    folders = [atomic_folders.new(path, which) for path in paths]
    try:
        _seen_alike(paths, lambda: [folder.exists() for folder in folders])
        files = _write(parts, folders, which, facts)
        _check_written(paths, folders, which, files)
    except Exception:
        for folder in folders if lead else ():
            atomic_folders.discard(folder)
        raise

    agree(lambda: atomic_folders.publish(paths, which) if lead else None)


def find(**paths: str | Path) -> list[Found]:
    """Find the folders of one save, given as `kind=path`, and check that their files are whole. Links are followed.

    Raises:
        ValueError: a folder is missing, incomplete, damaged or of another kind, the folders are of different saves, or
            the ranks do not share them.
    """
    given = [Path(path) for path in paths.values()]
    places = [_followed(path) for path in given]
    _seen_alike(places, lambda: [atomic_folders.saves(place) for place in places])

    def verify() -> list[Found]:
        folder_of = zip(paths, given, atomic_folders.of_one_save(places), strict=True)
        return [_verified(kind, path, folder) for kind, path, folder in folder_of]

    return agree(verify)[group_rank(world())]


def must_hold(found: Found, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the checkpoint has these tensors in their shapes and dtypes, and none that no rank has
    (the stages of a pipeline have different tensors)."""

    def check() -> tuple[list[str], list[str]]:
        there = read_index(found.folder).state_dict_metadata
        for name, tensor in tensors.items():
            entry = there.get(name)
            if not isinstance(entry, TensorStorageMetadata) or entry.size != tensor.shape:
                other = "lacks it" if entry is None else f"has it as {list(getattr(entry, 'size', ()))}"
                raise ValueError(
                    f"{name} is {list(tensor.shape)} here and the checkpoint {found.path} {other}: {_SAME_MODEL}"
                )
            if (dtype := entry.properties.dtype) != tensor.dtype:
                raise ValueError(
                    f"{name} is {tensor.dtype} here and {dtype} in the checkpoint {found.path}: {_SAME_MODEL}"
                )
        return sorted(there), list(tensors)

    ranks = agree(check)
    if more := sorted(set(ranks[0][0]).difference(*(own for _, own in ranks))):
        raise ValueError(
            f"the checkpoint {found.path} has {', '.join(more[:3])}, which this policy does not have: {_SAME_MODEL}"
        )


def read(found: Found, tensors: Mapping[str, Tensor]) -> None:
    """Read the checkpoint's tensors into `tensors`, in place, after `must_hold` has checked them."""
    try:
        dcp.load(dict(tensors), storage_reader=Reader(found.folder))
    except CheckpointException as error:
        raise ValueError(f"the checkpoint {found.path} cannot be read: {error}") from None


def _write(
    parts: tuple[Part, ...], folders: list[Path], which: str, facts: list[Any]
) -> list[list[dict[str, list[int]]]]:
    """Write all files; return those of each folder and rank, `[folder][rank]`, with their sizes and checksums."""
    writers = [Writer(folder) for folder in folders]
    for part, writer in zip(parts, writers, strict=True):
        try:
            dcp.save(dict(part.tensors), storage_writer=writer)
        except CheckpointException as error:
            raise OSError(f"the checkpoint {part.path} was not written: {error}") from None
    own = [(folder, sorted(writer.written)) for folder, writer in zip(folders, writers, strict=True)]
    sums = agree(lambda: [checksums(folder, names) for folder, names in own])
    files = [[of_rank[i] for of_rank in sums] for i in range(len(parts))]

    def finish() -> None:
        for part, folder, of_ranks, own_facts in zip(parts, folders, files, facts, strict=True):
            listed = {name: entry for of_rank in of_ranks for name, entry in of_rank.items()}
            content = {"save": which, "kind": part.kind, "files": listed, "facts": own_facts}
            with (folder / FACTS).open("w") as file:
                file.write(json.dumps({**content, "checksum": _checksum(content)}))
                file.flush()
                os.fsync(file.fileno())

    agree(lambda: finish() if group_rank(world()) == 0 else None)
    return files


def _check_written(paths: list[Path], folders: list[Path], which: str, files: list[list[dict[str, list[int]]]]) -> None:
    """Raise OSError or ValueError on every rank unless each sees all files in their sizes, and reads the files of the
    rank half the world away (on another host, if there are several) with the right checksums."""

    def missing() -> list[list[str]]:
        return [
            [name for of_rank in of_ranks for name, (size, _) in of_rank.items() if _size(folder / name) != size]
            + [FACTS] * (atomic_folders.save_of(folder) != which)
            for folder, of_ranks in zip(folders, files, strict=True)
        ]

    def read_back() -> None:
        ranks = group_size(world())
        other = (group_rank(world()) + (ranks + 1) // 2) % ranks
        for path, folder, of_ranks in zip(paths, folders, files, strict=True):
            found = checksums(folder, list(of_ranks[other]))
            if wrong := [name for name, entry in of_ranks[other].items() if found[name] != entry]:
                raise OSError(f"the checkpoint {path} was not written: {', '.join(wrong)} reads back as something else")

    for path, names in zip(paths, _seen_alike(paths, missing), strict=True):
        if names:
            raise OSError(f"the checkpoint {path} was not written: {', '.join(names)} is missing, or was changed")
    agree(read_back)


def _seen_alike(paths: list[Path], look: Callable[[], list[T]]) -> list[T]:
    """Return what `look` sees of each path, once all ranks see the same there.

    Raises:
        ValueError: on every rank, if they still see different things after `PATIENCE_S`.
    """
    began = time.monotonic()
    while True:
        found = agree(lambda: (look(), time.monotonic() - began > PATIENCE_S, platform.node(), paths))
        others = [rank for rank, (seen, *_) in enumerate(found) if seen != found[0][0]]
        if not others:
            return found[0][0]
        if any(late for _, late, *_ in found):
            i = next(i for i, seen in enumerate(found[others[0]][0]) if seen != found[0][0][i])
            looked = [f"rank {rank} on {found[rank][2]} looks at {found[rank][3][i]}" for rank in (0, others[0])]
            raise ValueError(
                f"the checkpoint {paths[i]} is not shared: ranks {others} of {len(found)} do not see the files that "
                f"rank 0 sees ({', '.join(looked)}); give an absolute path on a file system that all ranks share"
            )
        with outside_wait("the file system to show all ranks the same checkpoint"):
            time.sleep(0.2)


def _verified(kind: str, path: Path, folder: Path) -> Found:
    """Check the sizes of all files of a folder, and the checksums of this rank's share of them."""
    try:
        said = json.loads((folder / FACTS).read_text())
        checksum, listed = said.pop("checksum"), said["files"]
        if outside := [name for name in listed if name in ("", ".", "..") or name != os.path.basename(name)]:
            raise ValueError(f"{', '.join(outside)} is no name of a file in its folder")
        check_whole(read_index(folder), {name: size for name, (size, _) in listed.items()})
        facts = from_json(said["facts"])
        wrong = [name for name, (size, _) in listed.items() if _size(folder / name) != size]
        own = [] if wrong else sorted(listed)[group_rank(world()) :: group_size(world())]
        sums = checksums(folder, own)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the checkpoint {path} is incomplete or damaged ({error}); load another one") from None
    wrong += [name for name in own if sums[name] != listed[name]]
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


def checksums(path: Path, files: list[str]) -> dict[str, list[int]]:
    """Size in bytes and CRC-32 of each file."""
    found = {}
    for name in files:
        checksum, size = 0, 0
        with (path / name).open("rb") as file:
            while block := file.read(1 << 24):
                checksum, size = zlib.crc32(block, checksum), size + len(block)
        found[name] = [size, checksum]
    return found


def _checksum(content: Mapping[str, Any]) -> int:
    """Checksum of `content`, equal before writing and after reading: JSON keeps order and numbers."""
    return zlib.crc32(json.dumps(content).encode())


def _size(file: Path) -> int | None:
    with suppress(OSError):
        return file.stat().st_size
    return None


def _followed(path: str | Path) -> Path:
    """Return the absolute path without links: the folder is replaced, and not a link to it."""
    return Path(os.path.realpath(path))

"""Replaces several folders atomically: a reader finds all old ones or all new ones.

A save writes `PATH.new-ID` for each of its paths. When all are complete, the folders at the paths are renamed to
`PATH.old-ID`, the new folders to the paths, and the old ones are removed. Each folder names its save: wherever a save
is cut short, `of_one_save` finds all folders of the old save, or all of the new one.

Each ID is random: a folder that an earlier save could not remove is never in the way.
"""

import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from uuid import uuid4

FACTS = "facts.json"  # written last; its entry "save" tells the saves apart


def new(path: Path, save: str) -> Path:
    """Return the folder to which `save` (an ID of 32 hexadecimal digits) writes the next content of `path`."""
    return path.with_name(f"{path.name}.new-{save}")


def check_free(paths: Sequence[Path]) -> None:
    """Raise ValueError if a path lies in another one, or holds something that is no checkpoint."""
    for one, other in combinations(paths, 2):
        if one == other or one in other.parents or other in one.parents:
            raise ValueError(f"{one} and {other}: each part of a checkpoint needs a folder of its own; change one")
    for path in paths:
        if path.exists() and not (path / FACTS).exists() and (path.is_file() or any(path.iterdir())):
            raise ValueError(f"{path} holds something that is no checkpoint and would be lost: take another name")


def begin(path: Path, save: str) -> None:
    """Make an empty folder `new(path, save)`; remove those that earlier saves left behind."""
    for left_behind in _beside(path, "new|gone"):
        shutil.rmtree(left_behind, ignore_errors=True)
    new(path, save).mkdir(parents=True)


def publish(paths: Sequence[Path], save: str) -> None:
    """Rename the folders that `save` wrote to their paths. A reader finds one whole save after every step."""
    for path, folder in zip(paths, _held(paths), strict=True):
        for old in _beside(path, "old"):
            if old != folder:
                discard(old)
        if folder == path:
            path.rename(_name(path, "old"))
        elif path.exists():  # an earlier save was cut short in this function: `path` is of that save
            discard(path)
    for path in paths:
        new(path, save).rename(path)
    for path in paths:
        for old in _beside(path, "old"):
            discard(old)


def discard(folder: Path) -> None:
    """Remove a folder as far as the file system allows; it is renamed first, so that readers lose it at once."""
    path = folder.with_name(re.sub(r"\.(new|old)-[0-9a-f]{32}$", "", folder.name))
    with suppress(OSError):
        shutil.rmtree(folder.rename(_name(path, "gone")), ignore_errors=True)


def saves(path: Path) -> list[str]:
    """List the IDs of the complete saves at a path: the current one first, then earlier ones, the newest first."""
    return list(_by_save(path))


def of_one_save(paths: Sequence[Path]) -> list[Path]:
    """Find for each path the folder to read: the path itself or, where a save was cut short, the one it held before."""
    choices = [_by_save(path) for path in paths]
    for path, found in zip(paths, choices, strict=True):
        if not found:
            raise ValueError(f"the checkpoint {path} does not exist, or is incomplete or damaged; load another one")
    for save in choices[0]:
        if all(save in found for found in choices):
            return [found[save] for found in choices]
    raise ValueError(
        f"the checkpoints {' and '.join(map(str, paths))} are of different saves, and do not belong together: load "
        "two that one call wrote, or only the weights"
    )


def save_of(folder: Path) -> str | None:
    """Return the ID of the save that wrote a folder; None: the folder is missing or incomplete."""
    try:
        return str(json.loads((folder / FACTS).read_text())["save"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _name(path: Path, kind: str) -> Path:
    return path.with_name(f"{path.name}.{kind}-{uuid4().hex}")


def _beside(path: Path, kinds: str) -> list[Path]:
    """List the folders that saves to `path` have made beside it; `kinds` is a pattern such as "new|gone"."""
    name = re.compile(rf"{re.escape(path.name)}\.({kinds})-[0-9a-f]{{32}}")
    with suppress(OSError):  # the parent is missing, or this user may not list it
        return [sibling for sibling in path.parent.iterdir() if name.fullmatch(sibling.name)]
    return []


def _by_save(path: Path) -> dict[str, Path]:
    """Map each complete save's ID to its folder, in the order of `saves`."""
    before = {folder: save for folder in _beside(path, "old") if (save := save_of(folder)) is not None}
    newest_first = sorted(before, key=lambda folder: (folder / FACTS).stat().st_mtime_ns, reverse=True)
    own = save_of(path)
    return ({} if own is None else {own: path}) | {before[folder]: folder for folder in newest_first}


def _held(paths: Sequence[Path]) -> list[Path | None]:
    """Choose for each path the folder to keep until the new one is complete; None: there is nothing to keep."""
    try:
        return list(of_one_save(paths))
    except ValueError:  # there are no folders, or of different saves: choose for each path alone
        return [path if path.exists() else next(iter(_by_save(path).values()), None) for path in paths]

"""Replaces several folders atomically: a reader finds all old ones or all new ones.

A save writes `PATH.new` for each of its paths. When all are complete, what the paths hold becomes `PATH.old`, the new
ones take their names, and the old ones go. Each folder names its save, so that whenever this is cut short,
`of_one_save` finds all of the old save, or all of the new one.
"""

import json
import shutil
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

FACTS = "facts.json"  # written last; its entry "save" tells the saves apart


def new(path: Path) -> Path:
    """Where the next content of `path` is written."""
    return path.with_name(path.name + ".new")


def check_free(paths: Sequence[Path]) -> None:
    """Raises ValueError if a path lies in another one, or holds something that is no checkpoint."""
    for one, other in combinations([path.resolve() for path in paths], 2):
        if one == other or one in other.parents or other in one.parents:
            raise ValueError(f"{one} and {other}: each part of a checkpoint needs a folder of its own; change one")
    for path in paths:
        if path.exists() and not (path / FACTS).exists() and (path.is_file() or any(path.iterdir())):
            raise ValueError(f"{path} holds something that is no checkpoint and would be lost: take another name")


def begin(path: Path) -> None:
    """An empty `new(path)`."""
    for left_behind in (new(path), _gone(path)):
        shutil.rmtree(left_behind, ignore_errors=True)
    new(path).mkdir(parents=True)


def publish(paths: Sequence[Path]) -> None:
    """Has each path hold what was written for it. Between any two steps one whole save is found."""
    for path, folder in zip(paths, _held(paths), strict=True):
        if folder == path:
            _remove(_old(path))
            if path.exists():
                path.rename(_old(path))
        else:  # a save was cut short here: the path has a part of it
            _remove(path)
    for path in paths:
        new(path).rename(path)
    for path in paths:
        _remove(_old(path))


def of_one_save(paths: Sequence[Path]) -> list[Path]:
    """For each path the folder to read: itself or, where a save was cut short, what it held before.

    Raises:
        ValueError: one holds nothing complete, or they are of different saves.
    """
    choices = [{_save_of(folder): folder for folder in (_old(path), path)} for path in paths]
    for path, found in zip(paths, choices, strict=True):
        if not set(found) - {None}:
            raise ValueError(f"the checkpoint {path} is not there, or incomplete or damaged; load another one")
    for save in reversed(choices[0]):  # the newest first
        if save is not None and all(save in found for found in choices):
            return [found[save] for found in choices]
    raise ValueError(
        f"the checkpoints {' and '.join(map(str, paths))} are of different saves, and do not belong together: load two "
        f"that one call wrote, or the weights alone"
    )


def _old(path: Path) -> Path:
    return path.with_name(path.name + ".old")


def _gone(path: Path) -> Path:
    return path.with_name(path.name + ".gone")


def _held(paths: Sequence[Path]) -> list[Path]:
    """The folders to keep until there are others."""
    try:
        return of_one_save(paths)
    except ValueError:  # nothing is there, or not of one save: each for itself
        return [path if path.exists() else _old(path) for path in paths]


def _remove(path: Path) -> None:
    """At once, for who looks for it."""
    if path.exists():
        shutil.rmtree(_gone(path), ignore_errors=True)
        path.rename(_gone(path))
        shutil.rmtree(_gone(path), ignore_errors=True)


def _save_of(folder: Path) -> str | None:
    """None: there is no complete folder."""
    try:
        return str(json.loads((folder / FACTS).read_text())["save"])
    except (OSError, ValueError, KeyError, TypeError):
        return None

"""Weights and optimizer change together: a save that dies at any step leaves one whole save, the old or the new one."""

import shutil
from itertools import count
from pathlib import Path

import pytest
import torch

from megatron_ext.policy import checkpoint
from megatron_ext.policy.checkpoint.sharded_files import Part


class Death(BaseException):
    """Nothing is cleaned up after it."""


@pytest.fixture
def die_at(monkeypatch):
    """`die_at(k)`: dies before the k-th rename or removal of a folder from now on, a removal half done."""
    steps, left = {"rename": Path.rename, "rmtree": shutil.rmtree}, [0]

    def dies():
        left[0] -= 1
        return left[0] == -1

    def rename(self, target):
        if self.is_dir() and dies():  # DCP renames files, too
            raise Death
        return steps["rename"](self, target)

    def rmtree(folder, *args, **kwargs):
        if Path(folder).exists() and dies():
            for file in [file for file in Path(folder).iterdir() if file.is_file()][:1]:
                file.unlink()
            raise Death
        steps["rmtree"](folder, *args, **kwargs)

    def die_at(k):
        left[0] = k

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    return die_at


NEVER = 10**6
NAMES = "weights", "optimizer"


def save(folder, value):
    parts = [Part(name, folder / name, {"x": torch.full((3,), value)}, {"value": value}) for name in NAMES]
    checkpoint.save_together(*parts)


def load(folder):
    """The value that both folders hold."""
    found = checkpoint.find(**{name: folder / name for name in NAMES})
    values = set()
    for part in found:
        x = torch.zeros(3)
        checkpoint.must_hold(part, {"x": x})
        checkpoint.read(part, {"x": x})
        values |= {part.facts["value"], *x.tolist()}
    [value] = values
    return value


def test_a_save_that_dies_at_any_step_leaves_one_whole_save(tmp_path, die_at):
    die_at(NEVER)
    save(tmp_path / "begun", 1.0)
    found = []
    for step in count():
        folder = tmp_path / str(step)
        shutil.copytree(tmp_path / "begun", folder)
        die_at(step)
        try:
            save(folder, 2.0)
        except Death:
            die_at(NEVER)
            found.append(load(folder))
            save(folder, 3.0)
            assert load(folder) == 3.0
            assert {entry.name for entry in folder.iterdir()} == set(NAMES)
        else:
            break
    assert found == sorted(found)
    assert set(found) == {1.0, 2.0}


@pytest.mark.slow
def test_saves_that_die_one_after_the_other(tmp_path, die_at):
    die_at(NEVER)
    save(tmp_path / "begun", 1.0)
    for first in range(9):
        for second in range(first % 2, 12, 2):
            folder = tmp_path / f"{first}-{second}"
            shutil.copytree(tmp_path / "begun", folder)
            held = 1.0
            for step, value in [(first, 2.0), (second, 3.0), (second, 4.0)]:
                die_at(step)
                try:
                    save(folder, value)
                except Death:
                    die_at(NEVER)
                    assert load(folder) in (held, value)
                    held = load(folder)
                else:
                    held = value
            die_at(NEVER)
            assert load(folder) == held


def test_folders_of_different_saves_are_refused(tmp_path):
    save(tmp_path, 1.0)
    checkpoint.save_together(Part("weights", tmp_path / "weights", {"x": torch.ones(3)}, {}))
    with pytest.raises(ValueError, match=r"weights and .*optimizer are of different saves.* only the weights"):
        load(tmp_path)
    checkpoint.find(weights=tmp_path / "weights")
    save(tmp_path, 2.0)
    assert load(tmp_path) == 2.0


def test_nothing_else_is_overwritten(tmp_path):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "thesis.tex").touch()
    with pytest.raises(ValueError, match="holds something that is no checkpoint"):
        save(tmp_path, 1.0)
    with pytest.raises(ValueError, match="a folder of its own"):
        checkpoint.save_together(*(Part("weights", tmp_path / path, {}, {}) for path in ("one", "one/two")))
    assert [entry.name for entry in tmp_path.rglob("*")] == ["weights", "thesis.tex"]

"""A small sharded checkpoint: what was saved is read, and what was damaged, or is of something else, is refused."""

import os
import re
import shutil

import pytest
import torch
import torch.distributed as dist

from megatron_ext.policy.checkpoint.atomic_folders import FACTS
from megatron_ext.policy.checkpoint.sharded_files import Part, find, must_hold, read, save_together
from tests.ranks import ranks, shared_folder


def saved(folder):
    """Two parts, and the paths of both."""
    parts = [
        Part("weights", folder / "weights", {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2)}, {"step": 7}),
        Part("optimizer", folder / "optimizer", {"moment": torch.full((4,), 2.0)}, {"lr": 0.01}),
    ]
    save_together(*parts)
    return {part.kind: part.path for part in parts}


def damage_file(file, how):
    if how == "truncated":
        os.truncate(file, file.stat().st_size - 7)
    elif how == "one bit":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    else:
        assert how == "file gone"
        file.unlink()


def one_digit(folder):
    facts = (folder / FACTS).read_text()
    (folder / FACTS).write_text(facts.replace("0.01", "9.01"))


OTHER_DAMAGES = {
    "one digit": one_digit,
    "index cut": lambda folder: os.truncate(folder / "index.json", 60),
    "facts gone": lambda folder: (folder / FACTS).unlink(),
    "no folder": shutil.rmtree,
}


@ranks(1)
def test_a_small_checkpoint_is_read_as_it_was_saved(tmp_path):
    found = find(**saved(tmp_path))
    assert [one.facts for one in found] == [{"step": 7}, {"lr": 0.01}]
    own = {"w": torch.zeros(2, 3), "b": torch.zeros(2)}
    must_hold(found[0], own)
    read(found[0], own)
    assert own["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert own["b"].tolist() == [1, 1]


@pytest.mark.parametrize(
    "how, words",
    [
        ("one bit", r"is damaged: __0_0\.distcp is not what was written"),
        ("truncated", r"is damaged: __0_0\.distcp is not what was written"),
        ("file gone", r"is damaged: __0_0\.distcp is not what was written"),
        ("one digit", r"is damaged: facts\.json is not what was written"),
        ("index cut", "is incomplete or damaged"),
        ("facts gone", "does not exist, or is incomplete or damaged"),
        ("no folder", "does not exist, or is incomplete or damaged"),
    ],
)
@ranks(1)
def test_a_damaged_file_of_a_checkpoint_is_named(how, words, tmp_path):
    paths = saved(tmp_path)
    if how in OTHER_DAMAGES:
        OTHER_DAMAGES[how](paths["optimizer"])
    else:
        damage_file(next(paths["optimizer"].glob("*.distcp")), how)
    with pytest.raises(ValueError, match=f"optimizer {words}"):
        find(**paths)


@ranks(2)
def test_a_file_that_one_rank_sums_is_refused_on_both():
    paths = saved(shared_folder())
    for name in ("__0_0.distcp", "__1_0.distcp"):
        file = paths["weights"] / name
        before = file.read_bytes()
        dist.barrier()
        if dist.get_rank() == 0:
            damage_file(file, "one bit")
        dist.barrier()
        with pytest.raises(ValueError, match=f"weights is damaged: {name} is not what was written"):
            find(**paths)
        dist.barrier()
        if dist.get_rank() == 0:
            file.write_bytes(before)
    dist.barrier()
    assert find(**paths)[0].facts == {"step": 7}


@pytest.mark.parametrize(
    "own, words",
    [
        ({"w": torch.zeros(3, 2), "b": torch.zeros(2)}, r"w is \[3, 2\] here .* has it as \[2, 3\]"),
        ({"w": torch.zeros(2, 3, dtype=torch.float64)}, "w is torch.float64 here and torch.float32 in the checkpoint"),
        ({"w": torch.zeros(2, 3), "c": torch.zeros(2)}, r"c is \[2\] here .* lacks it"),
        ({"w": torch.zeros(2, 3)}, "has b, which this policy does not have"),
    ],
)
@ranks(1)
def test_tensors_that_a_checkpoint_does_not_hold_are_named(own, words, tmp_path):
    found = find(**saved(tmp_path))
    with pytest.raises(ValueError, match=re.compile(words)):
        must_hold(found[0], own)


@ranks(1)
def test_a_part_of_another_kind_is_refused(tmp_path):
    paths = saved(tmp_path)
    with pytest.raises(ValueError, match="weights holds weights, and optimizer is to be read there"):
        find(optimizer=paths["weights"])

"""Checks of the index of tensors: no name leads out of the folder, and no piece is left out."""

import json

import pytest
import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from megatron_ext.policy import checkpoint
from megatron_ext.policy.checkpoint import sharded_files
from megatron_ext.policy.checkpoint.sharded_files import Part
from megatron_ext.policy.checkpoint.tensor_index import _covers

X = torch.arange(12.0).view(4, 3)


@pytest.fixture
def folder(tmp_path):
    checkpoint.save_together(Part("weights", tmp_path / "weights", {"x": X, "y": torch.ones(())}, {}))
    return tmp_path / "weights"


def sign(folder, change=lambda facts: None):
    """Has the list of files, its sizes and sums agree with what is there, as who plants a file would, and then changes
    it."""
    facts = json.loads((folder / "facts.json").read_text())
    del facts["checksum"]
    facts["files"] = sharded_files.checksums(folder, sorted(facts["files"]))
    change(facts)
    (folder / "facts.json").write_text(json.dumps({**facts, "checksum": sharded_files._checksum(facts)}))


def change_index(folder, change):
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))
    sign(folder)


def load(folder):
    [found] = checkpoint.find(weights=folder)
    tensors = {"x": torch.full((4, 3), -1.0), "y": torch.zeros(())}
    checkpoint.must_hold(found, tensors)
    checkpoint.read(found, tensors)
    return tensors


def move(index, name, **to):
    for place in index["places"]:
        if place[0] == name:
            for at, value in to.items():
                place[["name", "offsets", "number", "file", "start", "length"].index(at)] = value


CHANGES = {
    "pieces of x that do not make a whole": [
        lambda index: index["tensors"]["x"].update(chunks=[[[0, 0], [3, 3]]]),
        lambda index: index["tensors"]["x"].update(chunks=[]),
        lambda index: index["tensors"]["x"].update(chunks=[[[0, 0], [5, 3]]]),
        lambda index: index["tensors"]["x"].update(chunks=[[[-1, 0], [4, 3]]]),
        lambda index: index["tensors"]["x"].update(chunks=[[[0, 0], [2, 3]], [[1, 0], [2, 3]]]),
        lambda index: index["tensors"]["x"].update(chunks=[[[0, 0], [4, 3]], [[0, 0], [4, 3]]]),
        lambda index: index["tensors"]["y"].update(chunks=[]) or index["tensors"]["x"].update(chunks=[]),
    ],
    "a piece of x without its place": [
        lambda index: index.update(places=[place for place in index["places"] if place[0] != "x"]),
        lambda index: move(index, "x", offsets=[1, 0]),
    ],
    "x beyond the end of": [
        lambda index: move(index, "x", length=10**9),
        lambda index: move(index, "x", start=-1),
    ],
    "which is no file of the checkpoint": [lambda index: move(index, "x", file="../secret")],
    "": [
        lambda index: index["tensors"]["x"].update(chunks=[[[0], [4]]]),
        lambda index: index["tensors"]["x"].update(size="4"),
        lambda index: index["tensors"]["x"].update(dtype="nn"),
        lambda index: index.pop("tensors"),
    ],
}


@pytest.mark.parametrize("message, change", [(message, change) for message in CHANGES for change in CHANGES[message]])
def test_an_index_that_is_not_whole_is_refused(folder, message, change):
    torch.testing.assert_close(load(folder)["x"], X)
    change_index(folder, change)
    with pytest.raises(
        ValueError, match=rf"weights is incomplete or damaged \(.*{message}|weights is damaged.*{message}"
    ):
        load(folder)


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "inner/secret", "..", ""])
def test_no_name_leads_out_of_the_folder(folder, name):
    def change(facts):
        facts["files"][name] = [1, 1]

    (folder.parent / "secret").write_text("x")
    sign(folder, change)
    with pytest.raises(ValueError, match="is no name of a file in its folder"):
        load(folder)


@pytest.mark.parametrize("file", ["facts.json", "index.json"])
def test_json_that_is_nested_too_deeply_is_damaged(folder, file):
    (folder / file).write_text("[" * 100_000 + "]" * 100_000)
    if file == "index.json":
        sign(folder)
    with pytest.raises(ValueError, match="incomplete or damaged"):
        load(folder)
    checkpoint.save_together(Part("weights", folder.parent / "another", {"x": X}, {}))


@pytest.mark.parametrize(
    "size, boxes, whole",
    [
        ([], [([], [])], True),
        ([], [], False),
        ([0], [([0], [0])], True),
        ([0], [], True),
        ([5], [([0], [2]), ([2], [3]), ([5], [0])], True),  # a rank that has nothing of it
        ([5], [([0], [2]), ([3], [2])], False),
        ([4, 4], [([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 4])], True),
        ([4, 4], [([0, 0], [2, 2]), ([0, 2], [2, 2]), ([2, 0], [2, 3])], False),
        ([4, 4], [([0, 0], [4, 3]), ([0, 1], [1, 4])], False),
        ([4, 4], [([0, 0], [2, 4]), ([1, 0], [2, 4])], False),  # the volume is right
    ],
)
def test_whether_chunks_cover_a_tensor_once(size, boxes, whole):
    chunks = [ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes]
    assert _covers(size, chunks) is whole

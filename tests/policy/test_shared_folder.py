"""A checkpoint is published only when every rank sees all of it; links are followed, and what is left behind is no
obstacle."""

import os
import re
import shutil
import zlib
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_ext.policy import checkpoint
from megatron_ext.policy.checkpoint import sharded_files
from megatron_ext.policy.checkpoint.sharded_files import Part
from tests.policy.test_sharded_files import damage_file
from tests.ranks import ranks, shared_folder


def save(path, value):
    checkpoint.save_together(Part("weights", path, {"x": torch.full((3,), value)}, {}))


def load(path):
    [found] = checkpoint.find(weights=path)
    x = torch.zeros(3)
    checkpoint.must_hold(found, {"x": x})
    checkpoint.read(found, {"x": x})
    return x[0].item()


@contextmanager
def in_a_hurry():
    """An empty folder, which all ranks share, and little patience with the file system; what is patched is undone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharded_files, "PATIENCE_S", 0.2)
        yield shared_folder(), patch
        dist.barrier()


@ranks(2, 4)
def test_unshared_path_is_refused_and_the_last_checkpoint_kept():
    with in_a_hurry() as (folder, _):
        save(folder / "weights", 1.0)
        own = folder / f"host{dist.get_rank() % 2}"
        own.mkdir(exist_ok=True)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.copytree(folder / "weights", own / "weights")
        dist.barrier()
        others = re.escape(str(list(range(1, dist.get_world_size(), 2))))
        message = rf"is not shared: ranks {others} .*rank 1 on .* at {folder}/host1/weights.*all ranks share"
        with pytest.raises(ValueError, match=message):
            save(own / "weights", 2.0)
        with pytest.raises(ValueError, match=message):
            load(own / "weights")
        assert load(folder / "host0" / "weights") == 1.0
        assert sorted(os.listdir(folder / "host0")) == ["weights"]
        assert os.listdir(folder / "host1") == []


@ranks(2)
def test_relative_path_of_differing_folders_is_refused():
    with in_a_hurry() as (folder, patch):
        own = folder / str(dist.get_rank())
        own.mkdir()
        patch.chdir(own)
        with pytest.raises(ValueError, match=r"is not shared: ranks \[1\] .* an absolute path"):
            save("weights", 1.0)
        assert os.listdir(own) == []
        patch.chdir(folder)
        save("weights", 2.0)
        assert load("weights") == load(folder / "weights") == 2.0


@pytest.mark.parametrize("how", ["file gone", "truncated", "one bit"])
@ranks(2)
def test_files_that_one_rank_does_not_see_are_not_published(how):
    """Rank 1's files are damaged after they are written, as if the writes had not arrived."""
    with in_a_hurry() as (folder, patch):
        path = folder / "weights"
        save(path, 1.0)
        own = sharded_files.checksums

        def spoils(where, names):
            sharded_files.checksums = own  # once: what is read back later must not flip the bit again
            found = own(where, names)
            for file in where.glob("__1_*"):
                damage_file(file, how)
            return found

        if dist.get_rank() == 1:
            patch.setattr(sharded_files, "checksums", spoils)
        x = torch.distributed.tensor.distribute_tensor(
            torch.arange(6.0), dist.device_mesh.init_device_mesh("cpu", (2,)), [torch.distributed.tensor.Shard(0)]
        )
        with pytest.raises(OSError, match=r"was not written: .*__1_0.distcp"):
            checkpoint.save_together(Part("weights", path, {"x": x}, {}))
        assert load(path) == 1.0
        dist.barrier()
        assert not list(folder.glob("weights?*"))


@ranks(2)
def test_file_system_that_shows_new_files_late_to_one_rank():
    with in_a_hurry() as (folder, patch):
        patch.setattr(sharded_files, "PATIENCE_S", 60)
        exists, asked = Path.exists, []

        def late(self):
            asked.append(self)
            return exists(self) and len(asked) > 3

        if dist.get_rank() == 1:
            patch.setattr(Path, "exists", late)
        save(folder / "weights", 1.0)
        assert dist.get_rank() == 0 or len(asked) > 3
        assert load(folder / "weights") == 1.0


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed(tmp_path, there):
    link, target = tmp_path / "latest", tmp_path / "step_100"
    if there:
        save(target, 0.0)
    link.symlink_to("step_100")
    for value in (1.0, 2.0, 3.0):
        save(link, value)
        assert load(link) == load(target) == value
    assert sorted(os.listdir(tmp_path)) == ["latest", "step_100"]
    assert os.readlink(link) == "step_100"


def test_a_link_to_itself_is_an_error_of_the_file_system(tmp_path):
    (tmp_path / "latest").symlink_to("latest")
    with pytest.raises((OSError, ValueError), match="latest"):
        save(tmp_path / "latest", 1.0)
    with pytest.raises(ValueError, match="latest does not exist"):
        load(tmp_path / "latest")


def test_two_names_of_one_folder_are_refused(tmp_path):
    (tmp_path / "one").mkdir()
    (tmp_path / "two").symlink_to("one")
    with pytest.raises(ValueError, match="a folder of its own"):
        checkpoint.save_together(*(Part(name, tmp_path / name, {}, {}) for name in ("one", "two")))


def test_what_cannot_be_removed_is_no_obstacle(tmp_path, monkeypatch):
    """NFS keeps a file that somebody reads, and its folder with it."""
    remove = shutil.rmtree

    def keeps_one(folder, *args, **kwargs):
        for file in sorted(Path(folder).glob("*"))[1:]:
            file.unlink()

    monkeypatch.setattr(shutil, "rmtree", keeps_one)
    for value in (1.0, 2.0, 3.0, 4.0):
        save(tmp_path / "weights", value)
        assert load(tmp_path / "weights") == value
    monkeypatch.setattr(shutil, "rmtree", remove)
    save(tmp_path / "weights", 5.0)
    assert load(tmp_path / "weights") == 5.0
    assert os.listdir(tmp_path) == ["weights"]


@pytest.mark.parametrize("name", ["weights.new", "weights.old", "weights.gone"])
@pytest.mark.parametrize("kind", ["file", "folder", "link"])
def test_whatever_has_a_name_like_ours_is_no_obstacle(tmp_path, name, kind):
    there = tmp_path / name
    if kind == "file":
        there.touch()
    elif kind == "folder":
        there.mkdir()
        (there / "thesis.tex").touch()
    else:
        there.symlink_to("nowhere")
    for value in (1.0, 2.0):
        save(tmp_path / "weights", value)
        assert load(tmp_path / "weights") == value


def test_the_sum_of_a_file_is_its_crc32(tmp_path):
    (tmp_path / "file").write_bytes(b"abc" * 1000)
    assert sharded_files.checksums(tmp_path, ["file"]) == {"file": [3000, zlib.crc32(b"abc" * 1000)]}

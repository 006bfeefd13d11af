"""Sharded models to folders and back: transformers reads what was written, to the bit."""

import json
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from megatron_ext.dtensor import causal_lm_loss, from_pretrained, parallelize, save_pretrained
from tests.dtensor.models import FAMILIES, MIXTURES, STACKED, VOCAB, error, make
from tests.marks import slow
from tests.ranks import ranks, shared_folder

# The name of the argument up to transformers 4.55, and since.
DTYPE = "torch_dtype" if transformers.__version__.startswith("4.") else "dtype"


def mesh_of(**sizes):
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def same_weights(folder, kind, tied):
    again, model = AutoModelForCausalLM.from_pretrained(folder, **{DTYPE: torch.float32}), make(kind, tied)
    expected, found = model.state_dict(), again.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    tokens = torch.arange(12).view(2, 6) % VOCAB
    assert error(again(input_ids=tokens, use_cache=False).logits, model.eval()(input_ids=tokens).logits) < 3e-6
    return again


CASES = [("llama", True, {"tp": 2}), ("qwen3", False, {"dp": 2}), *slow(("phi3", False, {"tp": 2}))]
CASES += slow(("qwen3_moe", False, {"tp": 2})) if STACKED else []
LARGE = [
    ("gemma3", True, {"dp": 2, "tp": 2}),
    ("mixtral", False, {"dp": 2, "tp": 2}),
    ("llama", False, {"cp": 2, "tp": 2}),
]


def save_and_load(kind, tied, sizes):
    folder, mesh = shared_folder(), mesh_of(**sizes)
    model = parallelize(make(kind, tied), mesh, torch.float32, expert_parallel=kind in MIXTURES and STACKED)
    save_pretrained(model, folder, max_shard_size=20_000)
    files = sorted(path.name for path in folder.iterdir())
    assert "model.safetensors.index.json" in files
    assert sum(name.endswith(".safetensors") for name in files) > 2
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # whoever can read the config can read weights
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [type(make(kind, tied)).__name__]
    assert "megatron_ext" not in (folder / "config.json").read_text()
    same_weights(folder, kind, tied)
    dist.barrier()
    model.save_pretrained(folder)  # transformers' name, one file, over the others
    assert sorted(path.name for path in folder.iterdir() if "model" in path.name) == ["model.safetensors"]
    again = same_weights(folder, kind, tied)
    tokens = torch.arange(12).view(2, 6) % VOCAB
    if kind == "phi3":
        return
    loaded = from_pretrained(folder, mesh, torch.float32)
    assert not loaded.training
    assert any(isinstance(p, DTensor) for p in loaded.parameters())
    assert error(causal_lm_loss(loaded, tokens), causal_lm_loss(again, tokens)) < 3e-6


@pytest.mark.parametrize("kind,tied,sizes", CASES)
@ranks(2)
def test_two_ranks(kind, tied, sizes):
    save_and_load(kind, tied, sizes)


@pytest.mark.parametrize("kind,tied,sizes", [case for case in LARGE if case[0] in (*FAMILIES, "llama", "gemma3")])
@ranks(4)
def test_four_ranks(kind, tied, sizes):
    save_and_load(kind, tied, sizes)


@ranks(2)
def test_the_config_that_is_saved_has_the_dtype_of_the_weights():
    folder = shared_folder()
    save_pretrained(parallelize(make("llama").bfloat16(), mesh_of(tp=2), torch.float32), folder)
    config = json.loads((folder / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == "bfloat16"


@ranks(2)
def test_a_folder_that_cannot_be_written():
    """The rank that writes says why, the other that it did; nobody waits."""
    folder, mesh = shared_folder(), mesh_of(tp=2)
    model = parallelize(make("llama"), mesh, torch.float32)
    (folder / "taken").write_text("a file")
    expected = (OSError, "taken") if dist.get_rank() == 0 else (ValueError, "save_pretrained: another rank refused")
    with pytest.raises(expected[0], match=expected[1]):
        save_pretrained(model, folder / "taken" / "model")
    save_pretrained(model, folder / "model")
    same_weights(folder / "model", "llama", False)


@ranks(2)
def test_files_of_another_kind_are_refused_on_all_ranks():
    folder, model = shared_folder(), parallelize(make("llama"), mesh_of(tp=2), torch.float32)
    for name, value in (("push_to_hub", True), ("variant", "fp16"), ("safe_serialization", False)):
        first = dist.get_rank() == 0
        said = f"save_pretrained was given {name}={value!r}: " if first else "save_pretrained: another rank refused"
        with pytest.raises(ValueError, match=said):
            model.save_pretrained(folder, **{name: value} if first else {})
    model.save_pretrained(folder, dist.get_rank() == 0, None, max_shard_size=20_000, safe_serialization=True)
    assert len([*folder.glob("*.safetensors")]) > 2
    same_weights(folder, "llama", False)


@ranks(2)
def test_a_folder_without_a_model():
    with pytest.raises((OSError, ValueError)):
        from_pretrained(shared_folder(), mesh_of(tp=2))
    with pytest.raises(OSError, match=r"name_or_path is '.*gone': there is no such folder on this host"):
        from_pretrained(shared_folder() / "gone", mesh_of(tp=2))
    with pytest.raises(TypeError, match="unexpected keyword argument .secuence_parallel"):
        from_pretrained(shared_folder() / "gone", mesh_of(tp=2), secuence_parallel=True)


@ranks(2)
def test_code_of_a_model_folder_is_never_run():
    """Transformers would ask on the terminal of each rank, where somebody may say yes."""
    folder = shared_folder() / f"rank{dist.get_rank()}"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "mine", "auto_map": {"AutoConfig": "mine.Mine"}}')
    (folder / "mine.py").write_text("raise SystemError('run')")
    refusal = "custom code|requires you to execute the configuration file"  # of transformers 5, and of 4.51
    with mock.patch("builtins.input", return_value="y"), pytest.raises(ValueError, match=refusal):
        from_pretrained(folder, mesh_of(tp=2))


def test_a_model_that_is_not_sharded_is_saved_by_transformers(tmp_path):
    save_pretrained(make("llama"), tmp_path)
    same_weights(tmp_path, "llama", False)
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(FileExistsError):
        save_pretrained(make("llama"), tmp_path / "taken")


@ranks(2)
def test_whole_weights_are_saved_as_given():
    """A trainer gathers them itself, and lets one rank write."""
    folder = shared_folder()
    model = parallelize(make("llama"), mesh_of(dp=2), torch.float32)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=make("llama").state_dict())
        same_weights(folder, "llama", False)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2}, {"tp": 1, "dp": 2}, {"cp": 2}, {"tp": 2, "cp": 1, "dp": 1}])
@ranks(2)
def test_meshes_with_some_of_the_dims_in_any_order(sizes):
    model = parallelize(make("llama"), mesh_of(**sizes), torch.float32)
    tokens = torch.arange(16).view(2, 8) % VOCAB
    assert error(causal_lm_loss(model, tokens), causal_lm_loss(make("llama"), tokens)) < 3e-6


@ranks(2)
def test_other_meshes_are_refused():
    for mesh in (init_device_mesh("cpu", (2,)), mesh_of(ep=2), DeviceMesh("cpu", [0, 1])):
        with pytest.raises(ValueError, match=r"mesh has dims .*: they must be named, of \['dp', 'cp', 'tp'\]"):
            parallelize(make("llama"), mesh)


@pytest.mark.parametrize("mesh", [None, 2])
def test_no_mesh_is_refused(mesh):
    for call in (lambda: parallelize(make("llama"), mesh), lambda: from_pretrained("gpt2", mesh)):
        with pytest.raises(ValueError, match=f"mesh is {mesh}: it must be a DeviceMesh of all ranks"):
            call()

"""The doctor: what it finds, what it says of what is missing, and that a broken head does not pass."""

import importlib.metadata
import importlib.util
import json
import sys
import types
from pathlib import Path
from unittest import mock

import megatron.core
import pytest
import torch

from megatron_ext import doctor, run
from megatron_ext.integrations import trl
from megatron_ext.numerics import cpu_products
from tests.programs import alone, python


def test_nccl_has_a_version_where_torch_is_made_for_cuda(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 30, 1))
    for cuda, nccl in ((None, None), ("13.0", "2.30.1")):
        monkeypatch.setattr(torch.version, "cuda", cuda)
        found = doctor.versions()
        assert (found["CUDA"], found["NCCL"]) == (cuda, nccl)


@pytest.mark.slow
def test_the_program_prints_json():
    found = json.loads(alone("-m", "megatron_ext.doctor", "--json").stdout)
    assert found.keys() == {"versions", "megatron", "frameworks", "kernels", "engines", "self_test"}
    assert set(found["versions"]) == {"megatron_ext", "Python", "torch", "CUDA", "NCCL", "device", *doctor.PACKAGES}
    assert found["versions"]["torch"] == torch.__version__
    imported = found["megatron"]
    assert found["versions"]["Megatron-Core"] == imported["version"] == megatron.core.__version__
    assert Path(imported["path"]) == Path(megatron.core.__file__).parent
    assert "tested range, 0.14.0 to 0.20.0" in imported["note"]
    ways = imported["ways"]
    works = {way for way, reason in ways.items() if reason is None}
    assert works >= {"patch", "gpt_layer_spec", "substitution", "launcher --pipeline-vocab"}
    if imported["version"] < "0.18":
        assert "HybridModel (0.18 and newer)" in ways["hybrid_stack_spec"]
    assert [result["dtype"] for result in found["self_test"]["results"]] == ["float32", "bfloat16"]
    assert all(kernel["name"] and kernel["active"] in (True, False) and kernel["why"] for kernel in found["kernels"])
    # The screen says all of it but the digits of the self-test.
    screen = doctor.screen(found)
    said = [*found["versions"], *filter(None, found["versions"].values())]
    said += [imported["path"], imported["note"], *ways, *filter(None, ways.values())]
    frameworks = found["frameworks"]
    said += [*frameworks, *filter(None, frameworks.values())]
    said += [kernel[key] for kernel in found["kernels"] for key in ("name", "why")]
    assert [text for text in said if str(text) not in screen and text is not True] == []


def test_each_framework_is_listed_with_what_its_way_in_would_do(monkeypatch):
    listed = {"transformers", "accelerate", "PEFT", "TRL", "verl", "NeMo-RL", "Ray", "greenlet"}
    assert listed <= doctor.PACKAGES.keys()
    before = trl.report()
    ways = doctor.ways()
    for package, way in (("trl", "integrations.trl.apply()"), ("verl", "integrations.verl.apply()"),
                         ("nemo_rl", "integrations.nemo_rl.apply()"), ("ray", "policy.RayPolicy"),
                         ("transformers", "dtensor (use_fused_loss, parallelize)"),
                         ("accelerate", "policy.DTensorPolicyWorker"),
                         ):  # fmt: skip
        there = importlib.util.find_spec(package) is not None
        assert (ways[way] is None) is there, ways[way]
        assert there or f"{package} is not installed" in ways[way]
    assert trl.report() is before, "it only looked"


def test_framework_that_does_not_fit_or_import_says_why(monkeypatch, tmp_path):
    (tmp_path / "verl.py").write_text("raise RuntimeError('no flash')")
    utils = tmp_path / "trl" / "trainer" / "utils.py"
    utils.parent.mkdir(parents=True)
    for folder in (utils.parent, utils.parent.parent):
        (folder / "__init__.py").touch()
    utils.write_text("def selective_log_softmax(logits, weights, index):\n    pass")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("trl", "verl")]:
        monkeypatch.delitem(sys.modules, name)
    for package in ("ray", "accelerate"):
        monkeypatch.setitem(sys.modules, package, None)
    ways = doctor.ways()
    assert (
        "whose functions are known here: trl.trainer.utils.selective_log_softmax takes"
        in ways["integrations.trl.apply()"]
    )
    assert "no flash" in ways["integrations.verl.apply()"] or "verl" in ways["integrations.verl.apply()"]
    assert "ray is not installed" in ways["policy.RayPolicy"]
    assert "accelerate is not installed" in ways["policy.DTensorPolicyWorker"]
    assert ways["dtensor (use_fused_loss, parallelize)"] is None
    for name in [name for name in sys.modules if name.partition(".")[0] in ("trl", "verl")]:
        del sys.modules[name]


def test_what_is_off_says_why(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    off = {kernel["name"]: kernel["why"] for kernel in doctor.kernels() if not kernel["active"]}
    assert all("this torch is built without CUDA" in why for name, why in off.items() if ":" in name)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "no CUDA device" in doctor.kernels()[0]["why"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "triton" else found(name))
    triton, matmul, *_ = doctor.kernels()
    assert (triton["active"], matmul["active"]) == (False, True)
    assert "Triton is not installed" in triton["why"]


def tell_version(monkeypatch, package, told):
    """Have pip's metadata say another version of one package: others may be imported meanwhile, and keep theirs."""
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: told if name == package else version(name))


def test_another_megatron_than_pips(monkeypatch):
    from megatron_ext.megatron import versions

    monkeypatch.setattr(versions, "megatron_version", lambda: "0.21.0+abc")
    tell_version(monkeypatch, "megatron-core", "0.16.1")
    found = doctor.megatron()
    assert found["version"] == "0.21.0+abc"
    assert found["tested"] is False
    assert found["note"].startswith(
        "0.21.0+abc is outside the tested range, 0.14.0 to 0.20.0; pip's metadata says 0.16"
    )
    assert doctor.report()["versions"]["Megatron-Core"] == "0.21.0+abc"


NO_MEGATRON = {"version": None, "path": None, "tested": None, "ways": None, "note": "Megatron-Core is not installed"}


@pytest.mark.parametrize("sixteen_bit_products", [True, False])
def test_one_screen(capsys, monkeypatch, sixteen_bit_products):
    monkeypatch.setattr(doctor, "megatron", lambda: NO_MEGATRON)
    with cpu_products.sixteen_bit_products(sixteen_bit_products):
        assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith("  ok  ") for line in lines) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda loss, w: 1.01 * loss, marks=pytest.mark.slow),
        lambda loss, w: loss + 0 * (0 * w).sqrt().sum(),  # dW alone is NaN
    ],
)
def test_a_wrong_head_fails(wrong, capsys, monkeypatch):
    right = doctor.linear_cross_entropy
    monkeypatch.setattr(doctor, "linear_cross_entropy", lambda x, w, labels: wrong(right(x, w, labels), w))
    monkeypatch.setattr(doctor, "megatron", lambda: NO_MEGATRON)
    assert doctor.main([]) == 1
    assert "FAIL float32" in capsys.readouterr().out


def test_without_optional_packages(monkeypatch):
    found = importlib.util.find_spec
    absent = ("megatron", "triton", "transformer_engine")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else found(name))
    assert doctor.megatron() == NO_MEGATRON
    active = {kernel["name"]: kernel["active"] for kernel in doctor.kernels()}
    assert not active["head: Triton row passes"]
    assert active["weight gradients into main_grad"]


def test_a_megatron_that_cannot_be_imported_is_a_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron_ext.megatron.versions", None)
    monkeypatch.delattr("megatron_ext.megatron.versions", raising=False)
    found = doctor.megatron()
    assert found["version"] is None
    assert found["note"].startswith(("ModuleNotFoundError: ", "ImportError: "))


def engine(monkeypatch, te, version="2.20.2"):
    """Return what the doctor says of Transformer Engine where importing its module is `te()`."""
    real = importlib.import_module

    def import_module(name, *args):
        return te() if name.startswith("transformer_engine") else real(name, *args)

    monkeypatch.setattr(importlib, "import_module", import_module)
    return doctor.engines({"Transformer Engine": version, "Apex": None})[0]


def raising(error):
    raise error


def test_engines_that_are_missing_or_broken_are_told_apart(monkeypatch):
    missing = engine(monkeypatch, lambda: raising(ModuleNotFoundError("No module named 'transformer_engine'")), None)
    assert missing["why_not"] == "transformer_engine is not installed (No module named 'transformer_engine')"
    broken = engine(monkeypatch, lambda: raising(FileNotFoundError("Could not find: x.so\nmore")))
    assert broken["why_not"] == (
        "transformer_engine is installed and cannot be loaded (FileNotFoundError: Could not find: x.so)"
    )
    assert "  no Transformer Engine 2.20.2: transformer_engine is installed and cannot" in doctor.screen(
        {"versions": {}, "megatron": NO_MEGATRON, "frameworks": {}, "kernels": [], "engines": [broken]}
        | {"self_test": {"device": "cpu", "results": []}}
    )


def test_undeclared_transformer_engine_is_told(monkeypatch):
    from megatron_ext.megatron import versions

    there = importlib.import_module("megatron.core.extensions.transformer_engine")
    monkeypatch.setattr(there, "HAVE_TE", True)
    tell_version(monkeypatch, "megatron-core", versions.megatron_version())
    wants = ["torch", 'transformer-engine[pytorch]>=2.9.0a0,<2.12.0; extra == "dev"']
    monkeypatch.setattr(versions.importlib.metadata, "requires", lambda name: wants)
    refused = engine(monkeypatch, types.SimpleNamespace)["why_not"]
    assert refused.endswith("declares transformer-engine<2.12.0,>=2.9.0a0, and 2.20.2 is installed")
    assert engine(monkeypatch, types.SimpleNamespace, "2.11.0")["why_not"] is None
    monkeypatch.setattr(there, "HAVE_TE", False)
    assert "could not import it and goes without" in engine(monkeypatch, types.SimpleNamespace)["why_not"]


def test_the_other_apex(monkeypatch):
    tell_version(monkeypatch, "apex", "0.9.10")
    assert doctor._installed("apex") == "0.9.10 (without NVIDIA's kernels: PyPI's apex is another project)"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace() if name == "amp_C" else None)
    assert doctor._installed("apex") == "0.9.10"


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("--fast", "unrecognized arguments: --fast"),
        ("--model", "--model needs a script"),
        ("--cpu", "--cpu is of use with --model alone"),
    ],
)
def test_options_that_are_refused(wrong, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        doctor.main([wrong])
    assert said in capsys.readouterr().err


def test_a_script_that_wants_torchrun_is_told_of_it(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    failing = mock.Mock(side_effect=ValueError("environment variable RANK expected, but not set"))
    monkeypatch.setattr(run, "main", failing)
    with pytest.raises(ValueError, match="RANK expected") as raised:
        doctor.check_script(["script.py"])
    failing.assert_called_once()
    assert "torchrun --nproc-per-node N -m megatron_ext.doctor [--cpu] --model SCRIPT ARGS" in raised.value.__notes__[0]


SCRIPT = """
import os, sys, torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
model_parallel_cuda_manual_seed(1)
if "no model" not in sys.argv:
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True)
    model = GPTModel(config, get_gpt_layer_local_spec(), 32, 8, post_process="no head" not in sys.argv)
    if "own forward" in sys.argv:
        model.output_layer.forward = model.output_layer.forward
    torch.optim.SGD(model.parameters())
print("trained")
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, said, status",
    [
        ([], "GPTModel: fused, 1 loss of each micro-batch without logits; tensor-parallel layers: 6 of megatron", 0),
        (["no head"], "GPTModel: no output layer on this pipeline stage", 0),
        (["own forward"], "GPTModel: the first batch decides: its output layer has a forward of its own", 1),
        (["no model"], "ended without building a language model", 1),
    ],
)
def test_a_users_model_is_built_and_not_trained(tmp_path, arguments, said, status):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = ("-m", "megatron_ext.doctor", "--cpu", "--model", str(tmp_path / "script.py"))
    done = python(*command, *arguments, ignore_warnings=True)
    assert done.returncode == status, done.stderr[-3000:]
    assert said in done.stdout + done.stderr
    assert ("trained" in done.stdout) == (arguments == ["no model"])

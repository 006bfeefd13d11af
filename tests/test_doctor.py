"""The doctor: what it finds, what it says of what is missing, and that a broken head does not pass."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from megatron_ext import doctor

ROOT = Path(__file__).parents[1]


def test_the_program_prints_json():
    done = subprocess.run(
        [sys.executable, "-m", "megatron_ext.doctor", "--json"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.keys() == {"versions", "hook", "kernels", "self_test"}
    assert set(found["versions"]) == {"Python", "torch", "CUDA", "NCCL", "device", *doctor.PACKAGES}
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["Megatron-Core"] == importlib.metadata.version("megatron-core")
    assert found["hook"]["found"]
    assert "GPTModel._postprocess" in found["hook"]["where"]
    assert "tested range, 0.14.0 to 0.16.1" in found["hook"]["note"]
    assert [result["dtype"] for result in found["self_test"]["results"]] == ["float32", "bfloat16"]
    assert all(kernel["name"] and kernel["active"] in (True, False) and kernel["why"] for kernel in found["kernels"])
    # The screen says all of it but the digits of the self-test.
    screen = doctor.screen(found)
    said = [*found["versions"], *filter(None, found["versions"].values()), *found["hook"].values()]
    said += [kernel[key] for kernel in found["kernels"] for key in ("name", "why")]
    assert [text for text in said if str(text) not in screen and text is not True] == []


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


def test_a_newer_megatron_with_an_output_processor(monkeypatch):
    from megatron_ext.megatron import versions

    monkeypatch.setattr(versions, "has_output_processor", lambda model_class: True)
    monkeypatch.setattr(versions, "megatron_version", lambda: "0.18.0")
    assert doctor.hook()["note"].startswith("0.18.0 is outside the tested range, 0.14.0 to 0.16.1; a caller's output_p")


def test_one_screen(capsys, monkeypatch):
    monkeypatch.setattr(
        doctor, "hook", lambda: {"found": False, "where": None, "note": "Megatron-Core is not installed"}
    )
    assert doctor.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 120
    assert sum(line.startswith("  ok ") for line in lines) == 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda loss, w: 1.01 * loss,
        lambda loss, w: loss + 0 * (0 * w).sqrt().sum(),  # dW alone is NaN
    ],
)
def test_a_wrong_head_fails(wrong, capsys, monkeypatch):
    right = doctor.linear_cross_entropy
    monkeypatch.setattr(doctor, "linear_cross_entropy", lambda x, w, labels: wrong(right(x, w, labels), w))
    monkeypatch.setattr(doctor, "hook", lambda: {"found": False, "where": None, "note": ""})
    assert doctor.main([]) == 1
    assert "FAIL float32" in capsys.readouterr().out


def test_without_optional_packages(monkeypatch):
    found = importlib.util.find_spec
    absent = ("megatron", "triton", "transformer_engine")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in absent else found(name))
    assert doctor.hook() == {"found": False, "where": None, "note": "Megatron-Core is not installed"}
    active = {kernel["name"]: kernel["active"] for kernel in doctor.kernels()}
    assert not active["head: Triton row passes"]
    assert not active["Transformer Engine"]
    assert active["weight gradients into main_grad"]


def test_a_megatron_that_cannot_be_imported_is_a_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core.models.gpt", None)
    found = doctor.hook()
    assert not found["found"]
    assert found["note"].startswith("ModuleNotFoundError: ")


def test_the_other_apex(monkeypatch):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.9.10")
    assert doctor._installed("apex") == "0.9.10 (without NVIDIA's kernels: PyPI's apex is another project)"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: types.SimpleNamespace() if name == "amp_C" else None)
    assert doctor._installed("apex") == "0.9.10"


def test_unknown_options_are_refused(capsys):
    with pytest.raises(SystemExit, match="2"):
        doctor.main(["--fast"])
    assert "unrecognized arguments: --fast" in capsys.readouterr().err

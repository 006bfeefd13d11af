"""Messages of the Makefile's targets where they cannot do what they are for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available() or shutil.which("make") is None, reason="there is a GPU, or no make")
def test_the_gpu_tests_without_a_gpu(tmp_path):
    """One sentence, and no test is run."""
    (tmp_path / ".ready").touch()  # the environment is there: this one
    command = ["make", "--no-print-directory", "test-gpu", f"VENV={tmp_path}", f"PY={sys.executable}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    rehearse = f"'{sys.executable} -m pytest -m gpu --rehearse'"
    said = f"torch sees no CUDA device, and these tests need one; {rehearse} runs most of them on the CPU at toy sizes"
    assert done.stdout == f"{said}\n"
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(
    "target,asked",
    [
        ("test-torch", "which torch: TORCH=2.15.0, or another version"),
        ("test-source", "which sources: MEGATRON=TREE, or CLONE@REF"),
        ("test-te-source", "which sources: MEGATRON=TREE, or CLONE@REF"),
        ("test-frameworks", "which sources: NEMO_RL_SRC=TREE, VERL_SRC=TREE, or both"),
        ("test-engines", "where vLLM's source is: VLLM=TREE"),
    ],
)
def test_missing_arguments_are_asked_for_before_anything_is_made(target, asked, tmp_path):
    nothing = ["TORCH=", "MEGATRON=", "NEMO_RL_SRC=", "VERL_SRC=", "VLLM="]  # whatever the outer make was told
    folders = [f"VENV={tmp_path / 'venv'}", f"SOURCE={tmp_path / 'source'}"]
    command = ["make", "--no-print-directory", target, *nothing, *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == f"make {target}: say {asked}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize("given,name", [("MEGATRON=a/tree/", "tree"), ("MEGATRON=a/tree/ COMMIT=v1", "v1")])
def test_a_column_of_the_matrix_has_a_name(given, name):
    """The matrix comes after all tests: a name that is missing there costs them."""
    command = ["make", "--no-print-directory", "-n", "test-te-source", *given.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].split() == ["--commit", name]


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
def test_an_environment_of_the_users_is_not_emptied(tmp_path):
    mine = tmp_path / "venv" / "mine"
    mine.parent.mkdir()
    mine.touch()
    command = ["make", "--no-print-directory", "demo", f"VENV={mine.parent}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "was not made by make" in done.stdout
    assert mine.exists()

"""The program that runs Megatron's unit tests both ways, on a few tests of which each is one case."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.megatron import unit_suite
from tests.ranks import TIMEOUT_S

PROGRAM = Path(__file__).with_name("unit_suite.py")
TESTS = """
import os
import pytest
import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import ColumnParallelLinear

RANKS, RANK = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
TRIES = []

def test_either_way():
    assert torch.cuda.is_available() and ColumnParallelLinear

def test_stock_alone():
    assert ColumnParallelLinear.__module__.startswith("megatron.core")

@pytest.mark.flaky(reruns=1)
def test_flaky():
    TRIES.append(RANK)
    assert len(TRIES) == 2

def test_neither_way():
    raise ValueError("no kernel")

def test_on_two():
    assert RANKS == 2, f"world_size ({RANKS}) is not divisible by 2"
    address = f"tcp://{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    dist.init_process_group("nccl", init_method=address, rank=RANK, world_size=RANKS)
    x = torch.ones(1, device="cuda")
    dist.all_reduce(x)
    dist.destroy_process_group()
    assert x == 2

def test_that_ends_the_process():
    os._exit(1)

def test_after_it():
    pass

def test_on_which_ranks_disagree():
    assert RANKS > 1, "more ranks"
    assert RANK == 0, "no kernel"

def test_that_fails_and_leaves_something():
    globals()["LEFT"] = True
    raise ValueError("no kernel")

def test_that_passes_by_what_others_left():
    assert "LEFT" in globals()
"""


def run_program(folder, tests, *options):
    """Run the program on these tests; return its results by name of test, and its process."""
    toys = folder / "tests" / "unit_tests" / "toys"
    toys.mkdir(parents=True)
    for package in (folder / "tests", toys.parent, toys):
        (package / "__init__.py").touch()
    (folder / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    (toys / "test_toys.py").write_text(tests)
    results = folder / "results.json"
    command = [sys.executable, "-P", str(PROGRAM), str(folder), "--results", str(results), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    (known,) = json.loads(results.read_text()).values()
    return {
        name.rpartition("::")[2].removeprefix("test_"): (test["ranks"], test["stock"], test.get("ours"))
        for name, test in known["tests"].items()
    }, done


@pytest.mark.slow
def test_each_test_runs_on_the_ranks_it_asks_for_and_both_ways(tmp_path):
    found, done = run_program(tmp_path, TESTS, "--ranks", "1", "2")
    assert found == {
        "either_way": (1, "passed", "passed"),
        "stock_alone": (1, "passed", "failed"),
        "flaky": (1, "passed", "passed"),
        "neither_way": (1, "failed", None),
        "on_two": (2, "passed", "passed"),
        "that_ends_the_process": (1, "died", None),
        "after_it": (1, "passed", "passed"),
        "on_which_ranks_disagree": (2, "failed", None),
        "that_passes_by_what_others_left": (1, "passed", "passed"),
        "that_fails_and_leaves_something": (1, "failed", None),
    }, done.stderr
    assert "| these sources | toys | 1 of 1 | 1 2 | 10 | 6 | 5 |" in done.stdout
    assert "1 tests pass with Megatron's own modules and not with ours" in done.stdout
    assert "test_stock_alone on 1: failed" in done.stdout
    assert done.returncode == 1


@pytest.mark.slow
def test_on_a_gpu_nothing_is_emulated(tmp_path):
    lines = ["import torch", "def test_torch_is_its_own():"]
    lines += ["    assert 'megatron_ext' not in torch.cuda.is_available.__code__.co_filename"]
    lines += ["from megatron.core.tensor_parallel import ColumnParallelLinear", "def test_stock_alone():"]
    lines += ["    assert ColumnParallelLinear.__module__.startswith('megatron.core')"]
    found, _ = run_program(tmp_path, "\n".join(lines), "--on-gpu", "--ranks", "1")
    assert found == {"torch_is_its_own": (1, "passed", "passed"), "stock_alone": (1, "passed", "failed")}


@pytest.mark.slow
def test_a_file_is_ended_at_its_limit_and_keeps_what_it_has_told(tmp_path):
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    lines = ["import time", "def test_quick(): pass", "def test_long(): time.sleep(600)", "def test_after(): pass"]
    (tmp_path / "test_toys.py").write_text("\n".join(lines))
    program = (
        "import json, os\nfrom tests.megatron import unit_suite\n"
        f"os.chdir({str(tmp_path)!r})\n"
        "log = os.open('log', os.O_WRONLY | os.O_CREAT)\n"
        "print(json.dumps(unit_suite.outcomes('test_toys.py', 1, ours=False, log=log, patience_s=600, limit_s=20)))"
    )
    command = [sys.executable, "-c", program]
    repository = {**os.environ, "PYTHONPATH": str(PROGRAM.parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=repository)
    assert done.returncode == 0, done.stderr
    found, broken = json.loads(done.stdout)
    over = "over the file's limit of 20 s"
    assert {name.rpartition("::")[2]: tuple(told) for name, told in found.items()} == {
        "test_quick": ("passed", ""),
        "test_long": ("not run", over),
        "test_after": ("not run", over),
    }
    assert not broken


def test_what_was_run_takes_the_place_of_its_own_rows_in_a_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{unit_suite.BEGIN}\n{unit_suite.END}\nafter\n")
    old = {("main", "models"): ["1 of 2", "1", 3, 2, 1], ("main", "ssm"): ["1 of 1", "1 2", 5, 4, 4]}
    unit_suite.put_into_page(page, old | {("0.19", "ssm"): ["1 of 1", "1", 7, 7, 7]})
    unit_suite.put_into_page(page, {("main", "models"): ["2 of 2", "1 2", 30, 20, 10]})
    assert page.read_text().splitlines() == [
        "before",
        unit_suite.BEGIN,
        "| source | folder | files | ranks | tests | pass stock | pass with ours |",
        "|---|---|---|---|---|---|---|",
        "| 0.19 | ssm | 1 of 1 | 1 | 7 | 7 | 7 |",
        "| 0.19 | all |  |  | 7 | 7 | 7 |",
        "| main | models | 2 of 2 | 1 2 | 30 | 20 | 10 |",
        "| main | ssm | 1 of 1 | 1 2 | 5 | 4 | 4 |",
        "| main | all |  |  | 35 | 24 | 14 |",
        unit_suite.END,
        "after",
    ]

"""Rehearsal on the CPU of all that runs on a GPU: every line, failing heads, short time, and going on after an end."""

import os
import re
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks import gpu, gpu_in_a_row, gpu_probes, gpu_run, gpu_steps, nvml, record, wheels
from benchmarks.cases import GPU_CASES
from benchmarks.gpu_run import NOT_MEASURED
from benchmarks.gpu_steps import Step
from megatron_on_cpu import megatron_on_cpu
from tests.pages import ROOT
from tests.passed import Passed

ORIGIN = record.Origin("a", "b", "c", "d")
FAILING = """
import sys
from functools import partial
from pathlib import Path
from benchmarks import gpu
from benchmarks.implementations import Implementation, ours
def fails(case, group):
    raise ImportError("no such package")
wrong = lambda case, group: lambda x, w, y: 2 * ours(1).build(case, group)(x, w, y)
more = [Implementation("fails", fails), Implementation("wrong", wrong)]
gpu.main(Path(sys.argv[1]), 0.0, True, [partial(gpu.heads, more=more)])
"""


@pytest.mark.slow
def test_tests_and_measurements_rehearsed(tmp_path):
    """All that the page about GPUs has to run on one, line by line: nothing runs there for the first time but the tests
    that need a GPU's generators, processes or links between GPUs. All heads are timed by turns with ours; what fails or
    is wrong leaves a row; a second run measures nothing again."""
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.gpu_steps", "--rehearse", "--minutes", "60"]
    done = subprocess.run([*command, "--folder", tmp_path], cwd=ROOT, capture_output=True, text=True)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[-3000:]
    assert "tests: done" in said
    assert "measurements: done" in said
    assert re.search(r"^\d+ passed", said, re.MULTILINE), said
    assert "skipped" not in said, said
    passed = (tmp_path / "passed.txt").read_text()
    for file in (
        "head/test_gpu",
        "dtensor/test_attention",
        "model_utils/test_packed",
        "test_main_grad",
        "distributed/test_symmetric_matmul",
    ):
        assert f"tests/{file}.py::" in passed

    command = [sys.executable, "-W", "ignore", "-m", "tests.compiled_launches", tmp_path / gpu_steps.LAUNCHES]
    compiled = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert compiled.returncode == 0, compiled.stderr[-3000:]
    assert int(compiled.stdout.split()[0]) > 100, compiled.stdout

    out = tmp_path / "rows.csv"
    measured = rows(out)
    for name in (
        *("three products", "ours, cache 1", "ours, cache 0", "ours, fused epilogue, cache 1"),
        *("ours, default", "ours, a mean", "ours, cache 1, logits of 8"),
    ):
        assert measured[f"in a row: {name}", "energy of a step"].p50 > 0, name
        assert measured[f"in a row: {name}", "held by the power limit"].p50 == 1
    assert measured["dx: halves of K", "time"].p50 > 0
    assert measured["log-probabilities: chunks of 1024", "time"].p50 > 0
    assert "cache 0" in (tmp_path / gpu_probes.PROFILE).read_text()
    fused = [f"ours, fused epilogue, cache {cache}" for cache in (1, 0)]
    for name in ("ours, cache 1", "ours, cache 0.5", "ours, cache 0", *fused, "megatron unfused", "megatron fused"):
        assert measured[name, "time"].p50 > 0, name
        assert measured[name, "error / plain"].p50 <= 2.5  # the interpreter cuts 16-bit results off
        assert (name, NOT_MEASURED) not in measured
    assert {row.case.split()[0].strip(",") for row in record.read(out)} == {"rehearsal", "numerics"}
    for name in ("ours, cache 1", "ours, cache 0"):
        assert measured[name, "dx, error / plain"].p50 <= 2.5
        assert measured[name, "dW, error / plain"].p50 <= 2.5
    order = list(dict.fromkeys(row.impl for row in record.read(out)))
    assert order[0] == "in a row: three products"
    assert order.index("ours, cache 1") < order.index("pytorch chunked") < order.index("ours, cache 0.5")
    assert measured["ours, cache 1", "FLOPs / NVH"].p50 == 6
    assert measured["ours, cache 0", "FLOPs / NVH"].p50 == 8
    for name in ("logits of a chunk", "logits of a block", "dx", "dx of a block", "dW"):
        assert measured[f"product: {name}", "rate"].p50 > 0

    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-W", "ignore", "-c", FAILING, out], cwd=ROOT, env=env, check=True)
    found = rows(out)
    assert "no such package" in found["fails", NOT_MEASURED].unit
    assert "its time does not count" in found["wrong", NOT_MEASURED].unit
    assert ("wrong", "time") not in found
    assert {key: row for key, row in found.items() if key[0] not in ("fails", "wrong")} == measured


@pytest.fixture
def run(tmp_path):
    with megatron_on_cpu():
        yield gpu_run.Run(ORIGIN, tmp_path / "rows.csv", 0.0)


def rows(file: Path) -> dict:
    return {(row.impl, row.metric): row for row in record.read(file)}


def test_a_lost_device_ends_the_run(run, monkeypatch):
    """The measurement under way gets a row with the reason; the rest is left to the next run."""
    monkeypatch.setattr(torch.cuda, "synchronize", failing("illegal memory access"))
    with pytest.raises(SystemExit, match="illegal memory access"):
        run.attempt(gpu.REHEARSAL[0], "a head", failing("launch failed"))
    (row,) = record.read(run.out)
    assert (row.impl, row.metric, row.unit) == ("a head", NOT_MEASURED, "RuntimeError: launch failed")
    assert run.measured(gpu.REHEARSAL[0], "a head")


def failing(message):
    def fails():
        raise RuntimeError(message)

    return fails


@pytest.mark.slow
def test_the_next_call_measures_what_the_deadline_killed(run, tmp_path):
    run.write(gpu.REHEARSAL[0], "quick", [("time", "ms", [1.0])])
    for said in (gpu_run.ENDED, gpu_run.ENDED_TWICE):
        run.write(gpu.REHEARSAL[0], "slow", [(NOT_MEASURED, said, [1.0])])
        sleeping = Step("measurements", 0.5, [sys.executable, "-S", "-c", "import time; time.sleep(60)"])
        assert gpu_steps.run([sleeping], tmp_path, 60) == gpu_steps.SHORT_OF_TIME
        assert set(rows(run.out)) == {("quick", "time")}


def test_what_ends_the_program_twice_is_left_out(run):
    """A case that a crash or a kill of the program has ended is measured once more; the second time a row says so."""
    case = gpu.REHEARSAL[0]
    for measured, said in ((False, gpu_run.ENDED), (True, gpu_run.ENDED_TWICE)):
        with pytest.raises(KeyboardInterrupt):
            run.attempt(case, "a head", interrupted)
        assert run.measured(case, "a head") == measured
        assert [row.unit for row in record.read(run.out)] == [said]


def interrupted():
    raise KeyboardInterrupt


def test_results_survive_the_machine(tmp_path):
    """Results lie where git sees them, belong to the code that was measured and not to the commit that adds them, and a
    call may go on with another folder's."""
    ignored = subprocess.run(["git", "check-ignore", "benchmarks/results/gpu/rows.csv"], cwd=ROOT)
    assert ignored.returncode != 0
    command = ["git", "log", "-1", "--format=%h", "--", *record.MEASURED]
    last = subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.strip()
    assert record.code(*record.MEASURED).removesuffix("+") == last
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / gpu_steps.ROWS).write_text("rows")
    gpu_steps.resume(tmp_path / "now", tmp_path / "before")
    assert (tmp_path / "now" / gpu_steps.ROWS).read_text() == "rows"
    (tmp_path / "now" / gpu_steps.ROWS).write_text("more rows")
    gpu_steps.resume(tmp_path / "now", tmp_path / "before")
    assert (tmp_path / "now" / gpu_steps.ROWS).read_text() == "more rows"


def test_without_git_the_code_is_told_by_its_files(monkeypatch):
    monkeypatch.setattr(record.shutil, "which", lambda name: None)
    found = record.code("benchmarks/*.py")
    assert re.fullmatch("files [0-9a-f]{8}", found)
    assert record.code("benchmarks/*.py") == found != record.code("benchmarks/r*.py")


def test_what_matters_most_is_measured_first():
    from benchmarks.implementations import FUSED, MODELS, OURS, PYTORCH_CHUNKED, UNFUSED

    assert [gpu.stage_of(impl) for impl in OURS] == [0, 2, 2, 2]
    assert gpu.stage_of(PYTORCH_CHUNKED) == 1
    assert {gpu.stage_of(impl) for impl in (FUSED, UNFUSED, *MODELS)} == {2}


def test_the_steps_fit_into_one_call(tmp_path):
    """Eight minutes, the wheels' too; joules come first, and what is measured before what is tested."""
    found = gpu_steps.steps(tmp_path, False, tmp_path)
    names = [step.name for step in found]
    assert sum(step.seconds for step in found) <= 480
    assert names.index("in a row") == 0
    assert names.index("measurements") < names.index("tests") < names.index("peers from wheels")
    assert {step.name for step in gpu_steps.steps(tmp_path, True)} < {*names}
    commands = {step.name: step.command for step in found}
    assert commands["tests"][-2:] == ["-n", "12"]
    assert "--seconds 2 " in " ".join(commands["measurements"])


def test_steps_in_a_row_fit_into_their_seconds(tmp_path):
    """Two seconds each, and twenty to import torch and to compile kernels."""
    cases = [
        (replace(case, tokens=case.tokens // 64, width=case.width // 64, vocab=256, device="cpu"), size)
        for case, size in gpu_in_a_row.measured_of(GPU_CASES)
    ]
    names = [[*gpu_in_a_row.steps_of(case, size)] for case, size in cases]
    assert names[2] == ["ours, default", "ours, a mean"]
    of_caches = [f"ours, {kind}cache {cache}" for kind in ("", "fused epilogue, ") for cache in (1, 0)]
    assert names[0] == names[1] == ["three products", *of_caches]
    assert names[3] == names[4] == ["ours, cache 1, logits of 8"]
    step = next(step for step in gpu_steps.steps(tmp_path, False) if step.name == "in a row")
    assert 2 * sum(map(len, names)) + 20 <= step.seconds


def test_a_row_tells_what_holds_the_clock(monkeypatch):
    """Each reason with the share of the readings that it was in; the power limit even if it never was."""
    reasons = iter([["heat, by software"], [], ["heat, by software", "power limit"], ["heat, by software"]])
    card = nvml.STAND_IN
    monkeypatch.setattr(card, "held_by", lambda: next(reasons))
    ticks = iter(range(100))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(gpu_in_a_row.time, "perf_counter", lambda: next(ticks))
    found = {metric: values for metric, _, values in gpu_in_a_row.in_a_row(card, lambda: None, 4.0)}
    assert found["held by the heat, by software"] == [0.75]
    assert found["held by the power limit"] == [0.25]
    assert len(found["clock"]) == 4


def test_wheels_travel_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(wheels, "PART_BYTES", 3000)
    for name in ("one", "two"):
        with zipfile.ZipFile(tmp_path / f"{name}.whl", "w") as file:
            file.writestr(f"{name}.py", f"name = {name!r}")
    parts = wheels.pack(sorted(tmp_path.glob("*.whl")), tmp_path)
    assert len(parts) > 2
    assert all(part.stat().st_size <= 3000 for part in parts)
    assert wheels.unpack(tmp_path, tmp_path / "site") == ["one.whl", "two.whl"]
    command = gpu_steps.steps(tmp_path, False, tmp_path)[-2].command[:5]
    ran = subprocess.run([*command[:4], str(tmp_path / "site"), "two"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    with pytest.raises(FileNotFoundError, match=r"benchmarks\.wheels"):
        wheels.unpack(tmp_path / "site", tmp_path)


def test_what_was_not_installed_is_measured_later(run):
    case = gpu.REHEARSAL[0]
    run.write(case, "quack", [(NOT_MEASURED, "not installed: quack", [1.0])])
    assert not run.measured(case, "quack")
    run.write(case, "quack", [("time", "ms", [1.0])])
    assert run.measured(case, "quack")


def test_devices_stand_side_by_side():
    """A head that one of them has not measured leaves a gap there."""
    rows = [
        record.Origin(device, "", "", "").row("A", impl, "time", "ms", [ms])
        for device, impl, ms in (("H100", "ours", 41.0), ("H200", "ours", 39.25), ("H200", "quack", 35.0))
    ]
    found = record.by_device([*rows, replace(rows[0], metric="peak")], "time").splitlines()
    assert found[2] == "| head | H100 | H200 |"
    assert found[4:6] == ["| ours | 41 | 39.25 |", "| quack |  | 35 |"]


def test_the_drivers_library_is_asked_for_joules_and_clocks(monkeypatch):
    """Each value comes back through the last argument, in the unit of its name; what fails raises."""
    told = {"Energy": 2500, "ClockInfo": 1410, "Throttle": 0x44}

    def library(name):
        def function(*arguments):
            key = next((key for key in told if key in name), None)
            if key is not None:
                arguments[-1]._obj.value = told[key]
            return 3 if key is not None and not told[key] else 0

        return function

    asked = type("Library", (), {"__getattr__": lambda self, name: library(name)})
    monkeypatch.setattr(nvml.ctypes, "CDLL", lambda file: asked())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="1-2"))
    card = nvml.Nvml()
    assert (card.joules(), card.megahertz()) == (2.5, 1410.0)
    assert card.held_by() == ["power limit", "heat, by hardware"]
    told["ClockInfo"] = 0
    with pytest.raises(RuntimeError, match="nvmlDeviceGetClockInfo returned 3"):
        card.megahertz()


@pytest.mark.slow
def test_steps_run_in_the_time_there_is(tmp_path, capfd):
    """A step that fails or takes longer than its seconds does not stop the next; what is not done in time ends with its
    children; what the machine lacks is said."""
    child = tmp_path / "child"
    sleeping = f"import subprocess; subprocess.run(['sh', '-c', 'sleep 2; touch {child}'])"
    code = {"says": "print('this')", "fails": "raise SystemExit(3)", "sleeps": sleeping, "ends": "print('that')"}
    says, fails, sleeps, ends = (Step(name, 20.0, [sys.executable, "-S", "-c", line]) for name, line in code.items())
    absent = Step("absent", 20.0, ["no-such-program"])
    assert gpu_steps.run([says, fails, absent, ends], tmp_path, 60) == gpu_steps.FAILED
    log = tmp_path / gpu_steps.LOG
    assert log.read_text() == "this\nthat\n"
    assert "absent: no-such-program is not installed" in capfd.readouterr().out
    assert gpu_steps.run([replace(sleeps, seconds=0.5), ends], tmp_path, 60) == gpu_steps.SHORT_OF_TIME
    assert log.read_text() == "this\nthat\nthat\n"
    assert gpu_steps.run([sleeps, ends], tmp_path, 0.5) == gpu_steps.SHORT_OF_TIME
    assert log.read_text() == "this\nthat\nthat\n", "not begun"
    time.sleep(2)
    assert not child.exists()


def test_what_has_passed_is_left_out(tmp_path):
    """Passed tests are left out at the same commit; failed and skipped tests are run again."""
    file, session = tmp_path / "new" / "passed.txt", SimpleNamespace(exitstatus=5)
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    reports = [("a", "call", True), ("b", "call", False), ("c", "setup", True), ("d[1]", "call", True)]
    for commit, left in (("1", "abcd"), ("1", "bc"), ("2", "abcd")):
        plugin = Passed(str(file))
        plugin.commit = commit
        items = [SimpleNamespace(nodeid=name) for name in ("a", "b", "c", "d[1]")]
        plugin.pytest_collection_modifyitems(config, items)
        assert "".join(item.nodeid[0] for item in items) == left
        for name, when, passed in reports:
            plugin.pytest_runtest_logreport(SimpleNamespace(nodeid=name, when=when, passed=passed))
    Passed(str(file)).pytest_sessionfinish(session, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert session.exitstatus == 0, "all have passed"

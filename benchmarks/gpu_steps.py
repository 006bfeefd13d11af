"""`python -m benchmarks.gpu_steps`: all that docs/gpu.md has to run on a GPU, the measurements and the tests.

The program ends within `--minutes`. The most important steps come first, and each has its own time: a step that fails
or takes longer does not stop the next. Rows and the names of passed tests are kept in files of `--folder`, which git
does not ignore; another call goes on from them, or from those of the folder `--resume-from`. The exit status is 0 if
all is done and right, 1 if something failed, 2 if time was short. No network is needed: torch, Triton and pytest must
be installed; other packages that are missing leave a row or a line that says so.
"""

import argparse
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

FAILED, SHORT_OF_TIME = 1, 2
ROWS, PASSED, LAUNCHES, LOG = "rows.csv", "passed.txt", "launches.txt", "log.txt"
WORKERS = 12  # processes of pytest

# The program that adds a folder of unpacked wheels and runs a module.
_WITH_WHEELS = """
import runpy, site, sys
site.addsitedir(sys.argv.pop(1))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_UNPACKED = """
import sys
from pathlib import Path
from benchmarks import wheels
print(*wheels.unpack(Path(sys.argv[1]), Path(sys.argv[2])), sep="\\n")
"""
# The program that compares small cases of each kernel with the PyTorch passes, run under compute-sanitizer.
_CHECKED = "from tests.head import twins; twins.main('{device}', every={every})"


@dataclass(frozen=True)
class Step:
    """A command with its name, and the seconds that it may take on a GPU."""

    name: str
    seconds: float
    command: list[str]


def steps(folder: Path, rehearse: bool, wheels: Path | None = None) -> list[Step]:
    """Return the steps in order; tests may come late, since heads are compared with fp64 before they are measured."""
    own = ["--rehearse"] if rehearse else []
    measured = ["-m", "benchmarks.run", "gpu", "--seconds", "2", "--out", str(folder / ROWS), *own]
    tests = ["-m", "pytest", "-m", "gpu", "-ra", f"--resume={folder / PASSED}", *own]
    if rehearse:
        tests.append(f"--launches={folder / LAUNCHES}")
    elif importlib.util.find_spec("xdist") is not None:
        tests += ["-n", str(WORKERS)]
    found = [
        Step("in a row", 48, _python(*measured, "--only", "in-a-row")),
        Step("probes", 28, _python(*measured, "--seconds", "1", "--only", "probes")),
        Step("measurements", 130, _python(*measured)),
        Step("tests", 95, _python(*tests)),
        Step("memcheck", 30, _sanitized("memcheck", rehearse)),
        Step("racecheck", 30, _sanitized("racecheck", rehearse)),
    ]
    if wheels is not None:
        site = str(wheels / "site")
        found += [
            Step("wheels", 10, _python("-c", _UNPACKED, str(wheels), site)),
            Step("peers from wheels", 90, _python("-c", _WITH_WHEELS, site, *measured[1:])),
        ]
    return [*found, Step("profile", 15, _python(*measured, "--only", "profile"))]


def _python(*arguments: str) -> list[str]:
    return [sys.executable, "-u", *arguments]


def _sanitized(tool: str, rehearse: bool) -> list[str]:
    if rehearse:
        return _python("-c", _CHECKED.format(device="cpu", every=60))
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "1"]
    return [*command, *_python("-c", _CHECKED.format(device="cuda", every=20))]


def run(todo: list[Step], folder: Path, seconds: float, at_any_pace: bool = False) -> int:
    """Run the steps one after the other, each within its own seconds and the total `seconds`, with their output also in
    a file; return the exit status. `at_any_pace`: only the total counts."""
    folder.mkdir(parents=True, exist_ok=True)
    budget = sum(step.seconds for step in todo)
    print("\n".join(f"{step.seconds:5.0f} s  {step.name}" for step in todo))
    print(f"{budget:5.0f} s  all, of {seconds:.0f}", flush=True)
    deadline, status = time.monotonic() + seconds, 0
    for step in todo:
        began = time.monotonic()
        until = deadline if at_any_pace else min(deadline, began + step.seconds)
        found = _run(step.command, folder / LOG, until)
        said = "done" if found == 0 else "out of time, call this again" if found is None else f"{found}"
        print(f"{step.name}: {said}, {time.monotonic() - began:.0f} s", flush=True)
        if found is None:
            forget_ended(folder / ROWS)
        status = status if found == 0 else FAILED if found or status == FAILED else SHORT_OF_TIME
    return status


def _run(command: list[str], log: Path, deadline: float) -> int | str | None:
    """Run a command; return 0, its failure in words, or None if it was killed with its children at the deadline."""
    if time.monotonic() >= deadline:
        return None
    if shutil.which(command[0]) is None:
        return f"{command[0]} is not installed"
    env = {**os.environ, "TRITON_INTERPRET": "1"} if "--rehearse" in command or "'cpu'" in command[-1] else None
    with subprocess.Popen(["tee", "-a", log], stdin=subprocess.PIPE) as tee:
        with subprocess.Popen(
            command, stdout=tee.stdin, stderr=subprocess.STDOUT, start_new_session=True, env=env
        ) as process:
            try:
                status = process.wait(deadline - time.monotonic())
                return status and f"exit status {status}"
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # children that it has left running too
                assert tee.stdin is not None
                tee.stdin.close()


def forget_ended(rows: Path) -> None:
    """Drop the rows of heads whose measurement the deadline interrupted."""
    from benchmarks import gpu_run, record

    if rows.exists():
        record.drop(rows, lambda row: row.unit in (gpu_run.ENDED, gpu_run.ENDED_TWICE))


def resume(folder: Path, before: Path) -> None:
    """Copy the rows and the names of passed tests of folder `before` to `folder`, unless it has its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (ROWS, PASSED):
        if (before / name).exists() and not (folder / name).exists():
            shutil.copy(before / name, folder / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=Path("benchmarks/results/gpu"), help="for rows and logs (default: %(default)s)"
    )
    parser.add_argument("--resume-from", type=Path, metavar="FOLDER", help="of an earlier call")
    parser.add_argument("--minutes", type=float, default=8, help="end within these (default: %(default)s)")
    parser.add_argument("--wheels", type=Path, metavar="FOLDER", help="of peers, as benchmarks.wheels packed them")
    parser.add_argument("--only", nargs="+", metavar="STEP", help="these steps (default: all)")
    parser.add_argument("--rehearse", action="store_true", help="the same on a CPU, at toy sizes")
    options = parser.parse_args()
    if options.resume_from is not None:
        resume(options.folder, options.resume_from)
    todo = steps(options.folder, options.rehearse, options.wheels)
    unknown = {*(options.only or ())} - {step.name for step in todo}
    if unknown:
        parser.error(f"--only {sorted(unknown)}: steps are {[step.name for step in todo]}")
    todo = [step for step in todo if options.only is None or step.name in options.only]
    return run(todo, options.folder, 60 * options.minutes, at_any_pace=options.rehearse)


if __name__ == "__main__":
    sys.exit(main())

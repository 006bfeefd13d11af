"""`python -m benchmarks.gpu_steps`: all that docs/gpu.md has to run on a GPU, the measurements and then the tests.

It ends within `--minutes`, and what matters most comes first. What is measured and what has passed is kept in
`--folder`, which git does not ignore: called again, it goes on there, or where the folder `--resume-from` ended.
The exit status is 0 when all is done and right, 1 where something failed, 2 where time was short. It installs nothing:
torch, Triton and pytest have to be there; what else is missing leaves a row or a line that says so.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

FAILED, SHORT_OF_TIME = 1, 2
ROWS, PASSED, LAUNCHES = "rows.csv", "passed.txt", "launches.txt"


def commands(folder: Path, rehearse: bool) -> dict[str, list[str]]:
    """The steps, in order: what is measured is compared with fp64 first, so it is right without the tests."""
    tests = [sys.executable, "-u", "-m", "pytest", "-m", "gpu", "-ra", f"--resume={folder / PASSED}"]
    if rehearse:
        tests.append(f"--launches={folder / LAUNCHES}")
    measurements = [sys.executable, "-u", "-m", "benchmarks.run", "gpu", "--out", str(folder / ROWS)]
    return {
        name: command + (["--rehearse"] if rehearse else [])
        for name, command in (("measurements", measurements), ("tests", tests))
    }


def run(steps: dict[str, list[str]], folder: Path, seconds: float) -> int:
    """Runs the steps one after the other, each with what is left of `seconds`; what it prints goes to a file, too."""
    folder.mkdir(parents=True, exist_ok=True)
    deadline, status = time.monotonic() + seconds, 0
    for name, command in steps.items():
        found = _step(command, folder / f"{name}.log", deadline)
        said = "done" if found == 0 else "no time left, call this again" if found is None else f"exit status {found}"
        print(f"{name}: {said}", flush=True)
        if found is None:
            forget_ended(folder / ROWS)
            return status or SHORT_OF_TIME
        status = status or (FAILED if found else 0)
    return status


def _step(command: list[str], log: Path, deadline: float) -> int | None:
    """The exit status of a command; None where it was not done by the deadline, and was ended with its children."""
    if time.monotonic() >= deadline:
        return None
    with subprocess.Popen(["tee", "-a", log], stdin=subprocess.PIPE) as tee:
        with subprocess.Popen(command, stdout=tee.stdin, stderr=subprocess.STDOUT, start_new_session=True) as process:
            try:
                return process.wait(deadline - time.monotonic())
            except subprocess.TimeoutExpired:
                return None
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also what it has left running
                assert tee.stdin is not None
                tee.stdin.close()


def forget_ended(rows: Path) -> None:
    """What was being measured when the deadline came has no finding yet."""
    from benchmarks import gpu, record

    if rows.exists():
        record.drop(rows, lambda row: row.unit in (gpu.ENDED, gpu.ENDED_TWICE))


def resume(folder: Path, before: Path) -> None:
    """Goes on with the rows and the names of passed tests of another folder, where this one has none."""
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
    parser.add_argument("--minutes", type=float, default=9, help="end within these (default: %(default)s)")
    parser.add_argument("--rehearse", action="store_true", help="the same on a CPU, at toy sizes")
    options = parser.parse_args()
    if options.resume_from is not None:
        resume(options.folder, options.resume_from)
    return run(commands(options.folder, options.rehearse), options.folder, 60 * options.minutes)


if __name__ == "__main__":
    sys.exit(main())

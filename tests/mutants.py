"""Changes of one line at a time, at random, and whether the quick tests notice: `make mutants SEED=1 COUNT=200`.

A copy of the tree is changed, never the tree. First all quick tests run once there, which says which of them call which
function; of those that call the changed one the folder's own come first, as many as take `SECONDS`, and the first that
fails ends the run. What survives is shown with its line, before and after.
"""

import argparse
import contextlib
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections import defaultdict
from pathlib import Path

from tests.calls import RECORD
from tests.mutations import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "mutants"
TREE, CALLS = FOLDER / "tree", FOLDER / "calls"
SECONDS = 25  # of tests for each change, as they were when they were recorded
LIMIT_S = 240  # a change after which tests take longer is noticed: they hang
_clock = [time.time()]
QUICK = "not slow and not gpu"


def drawn(seed: int, count: int, only: list[str]) -> list[Mutant]:
    """`count` lines at random, and of each one change; `only`: of these folders, files and lines (FILE:LINE)."""
    package, lines = ROOT / "megatron_ext", defaultdict(list)
    for path in sorted(package.rglob("*.py")):
        for mutant in mutants_of(path, package):
            place = f"{mutant.path}:{mutant.start[0]}"
            if not only or any(place == o or mutant.path == o or mutant.path.startswith(f"{o}/") for o in only):
                lines[place].append(mutant)
    if only and all(":" in o for o in only):
        return [mutant for mutants in lines.values() for mutant in mutants]
    generator = random.Random(seed)
    return [generator.choice(lines[place]) for place in generator.sample(sorted(lines), min(count, len(lines)))]


def copy_tree() -> None:
    shutil.rmtree(TREE, ignore_errors=True)
    unwanted = shutil.ignore_patterns(".git", ".venv*", "runs", "site", "build", "dist", "__pycache__", ".*_cache")
    shutil.copytree(ROOT, TREE, ignore=unwanted)


def record(arguments: list[str]) -> None:
    """Which tests call what, and how long they take: a run of all quick tests."""
    shutil.rmtree(CALLS, ignore_errors=True)
    CALLS.mkdir(parents=True)
    environment = os.environ | {RECORD: str(CALLS), "PYTHONPATH": str(TREE)}
    command = [sys.executable, "-m", "pytest", "-m", QUICK, "-p", "no:randomly", "--tb=no", *arguments]
    subprocess.run(command, cwd=TREE, env=environment)


def read_record() -> tuple[dict[str, set[str]], dict[str, list[tuple[float, str]]]]:
    """Of each function the tests' functions that call it; of those the tests, with their seconds."""
    callers, tests = defaultdict(set), defaultdict(list)
    for path in CALLS.glob("[0-9]*.jsonl"):
        for line in map(json.loads, path.read_text().splitlines()):
            for function in line["functions"]:
                callers[function].add(line["test"])
    for line in map(json.loads, (CALLS / "durations.jsonl").read_text().splitlines()):
        tests[line["id"].split("[")[0]].append((line["seconds"], line["id"]))
    return callers, tests


def tests_for(mutant: Mutant, callers, tests) -> list[str]:
    """The quickest tests that call the changed function, those of its folder first, as many as the time allows."""
    folder = f"tests/{mutant.path.split('/')[0].removesuffix('.py')}"
    asked = callers.get(f"{mutant.path}:{mutant.function}", set())
    if not mutant.function:  # a module's own lines: whoever calls one of its functions
        asked = {test for place, of in callers.items() if place.startswith(f"{mutant.path}:") for test in of}
    if not asked:  # of what another process or Triton's interpreter runs nothing is recorded
        stem = Path(mutant.path).stem
        near = sorted((stem not in id, id) for id in tests if id.startswith(folder))
        asked = {id for _, id in near[:60]}
    rounds = [(number, not id.startswith(folder), seconds, id)
              for test in asked for number, (seconds, id) in enumerate(sorted(tests.get(test, [])))]  # fmt: skip
    chosen, left = [], SECONDS
    for _, _, seconds, id in sorted(rounds, key=lambda one: (one[1], one[0] // 3, one[2])):
        if seconds <= left:
            chosen.append(id)
            left -= seconds
    return chosen


def notices(mutant: Mutant, ids: list[str]) -> str:
    """Which test fails in the changed copy; empty: none."""
    path = TREE / "megatron_ext" / mutant.path
    source, log = path.read_text(), FOLDER / "log"
    write(path, mutant.apply(source))
    pid = os.fork()
    if pid == 0:
        os.setpgid(0, 0)
        with log.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        import pytest

        os._exit(pytest.main(["-x", "-m", QUICK, "--tb=line", "-p", "no:randomly", "-W", "ignore", *ids]))
    until = time.monotonic() + LIMIT_S
    while (ended := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < until:
        time.sleep(0.05)
    if ended[0] == 0:
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    write(path, source)
    if ended[0] == 0:
        return "no end"
    failed = [line for line in log.read_text(errors="replace").splitlines() if line.startswith(("FAILED", "ERROR"))]
    return "" if os.waitstatus_to_exitcode(ended[1]) == 0 else failed[0] if failed else "the run ended"


def write(path: Path, text: str) -> None:
    """A file with a time of its own: Python's caches of compiled files compare seconds and sizes alone."""
    path.write_text(text)
    _clock[0] += 2
    os.utime(path, (_clock[0], _clock[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--recorded", action="store_true", help="which tests call what is as in the last run")
    parser.add_argument("--workers", default="2", help="processes of the first run of all tests")
    parser.add_argument("only", nargs="*", help="folders, files or lines (FILE:LINE, all changes) below megatron_ext")
    chosen = parser.parse_args()
    mutants = drawn(chosen.seed, chosen.count, chosen.only)
    copy_tree()
    if not chosen.recorded:
        record(["-n", chosen.workers])
    callers, tests = read_record()
    os.chdir(TREE)
    sys.path[:] = [str(TREE), *(path for path in sys.path if path and Path(path) != ROOT)]
    os.environ["PYTHONPATH"] = str(TREE)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # from here on the copy's
    from tests.rank_servers import PRELOAD, begin_run, end_run

    for name in [*PRELOAD, "hypothesis", "triton"]:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    begin_run()
    noticed = 0
    for number, mutant in enumerate(mutants, 1):
        ids = tests_for(mutant, callers, tests)
        by = notices(mutant, ids) if ids else ""
        noticed += bool(by)
        diff = mutant.diff((ROOT / "megatron_ext" / mutant.path).read_text())
        print(f"{number}: {f'noticed ({by[:100]})' if by else f'SURVIVED {len(ids)} tests'}: {diff}", flush=True)
    end_run()
    print(f"seed {chosen.seed}: {noticed} of {len(mutants)} noticed")


if __name__ == "__main__":
    main()

"""Changes of one line at a time, at random, and whether the quick tests notice: `make mutants SEED=1 COUNT=200`.

A copy of the tree is changed, never the tree. First all quick tests run once there, which says which of them run which
line; of those that run the changed one the folder's own come first, then those that call its function, as many as take
`SECONDS`, and the first that fails ends the run. What survives is shown with its line, before and after.
"""

import argparse
import ast
import contextlib
import difflib
import functools
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
from collections import Counter, defaultdict
from pathlib import Path

from tests.calls import RECORD
from tests.mutations import Mutant, mutants_of

ROOT = Path(__file__).parents[1]
LEFT = Path(__file__).parent / "mutants_left.txt"  # lines whose changes no test has to notice: FILE | LINE | REASON
FOLDER = ROOT / "runs" / "mutants"
TREE, CALLS = FOLDER / "tree", FOLDER / "calls"
SECONDS = 25  # seconds of tests for each change, by the recorded times
EACH = 0.05  # seconds that are added for each test
LIMIT_S = 240  # a change after which tests take longer counts as noticed: they hang
_clock = [time.time()]
OF_DEFAULTS = "tests/test_public_defaults.py::test_defaults_of_public_arguments_stay"  # defaults are made at import
QUICK = "not slow and not gpu"
BESIDE = [  # options that leave out quick tests which run nothing of the package
    *("--ignore=tests/megatron_on_cpu", "--ignore=tests/test_layout.py"),
    *("--ignore=tests/test_iteration_order.py", "--ignore=tests/test_ratchets.py"),
]


def drawn(seed: int, count: int, only: list[str]) -> list[Mutant]:
    """Draw `count` lines, and a change of each; `only`: from these folders, files and lines (FILE:LINE)."""
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


def record(arguments: list[str], files: list[str]) -> None:
    """Run all quick tests, or `files`; record the lines and the seconds of each, beside a copy of the sources."""
    folder = CALLS / str(len(list(CALLS.glob("*")))) if files else CALLS / "0"
    if not files:
        shutil.rmtree(CALLS, ignore_errors=True)
    shutil.copytree(TREE / "megatron_ext", folder / "sources")
    (folder / "began").touch()
    environment = os.environ | {RECORD: str(folder), "PYTHONPATH": str(TREE)}
    command = [sys.executable, "-m", "pytest", "-m", QUICK, "-p", "no:randomly", "--tb=no", *BESIDE, *arguments, *files]
    subprocess.run(command, cwd=TREE, env=environment)


def changed_tests() -> list[str]:
    """Return the test files that have changed since the last record."""
    last = max(path.stat().st_mtime for path in CALLS.glob("*/began"))
    found = [path for path in sorted(TREE.glob("tests/**/test_*.py")) if path.stat().st_mtime > last]
    return [str(path.relative_to(TREE)) for path in found]


def _moved(before: Path, after: Path) -> dict[int, int]:
    """Map the number of each line of `before` that is also in `after` to its number there."""
    old, new = (path.read_text().splitlines() if path.exists() else [] for path in (before, after))
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    return {a + n + 1: b + n + 1 for a, b, length in blocks for n in range(length)}


def read_record() -> tuple[dict[str, dict[int, set[str]]], dict[str, float]]:
    """Return the tests that run each line of a file, and the seconds of each test, by the last record of its file."""
    callers, seconds = defaultdict(lambda: defaultdict(set)), {}
    for folder in sorted(CALLS.glob("*"), key=lambda folder: int(folder.name), reverse=True):
        known, moved = {id.split("::")[0] for id in seconds}, {}
        lines = map(json.loads, (folder / "durations.jsonl").read_text().splitlines())
        found = {line["id"]: line["seconds"] for line in lines if line["id"].split("::")[0] not in known}
        for path in folder.glob("[0-9]*.jsonl"):
            for line in map(json.loads, path.read_text().splitlines()):
                for file, numbers in line["lines"].items() if line["test"] in found else ():
                    if file not in moved:
                        moved[file] = _moved(folder / "sources" / file, ROOT / "megatron_ext" / file)
                    for number in moved[file].keys() & numbers:
                        callers[file][moved[file][number]].add(line["test"])
        seconds |= found
    return callers, seconds


@functools.cache
def _lines_of_functions(path: str) -> set[int]:
    nodes = ast.walk(ast.parse((ROOT / "megatron_ext" / path).read_text()))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    return {line for node in functions for line in range(node.body[0].lineno, node.end_lineno + 1)}


def tests_for(mutant: Mutant, callers, seconds) -> list[str]:
    """Return the quickest tests that run the changed line, or call its function, as many as `SECONDS` allow.

    A line outside of functions runs at import, in any test, so tests of the file's functions are taken.
    """
    folder = f"tests/{mutant.path.split('/')[0].removesuffix('.py')}"
    (first, last), inside = mutant.function, _lines_of_functions(mutant.path)
    of_file = {line: of for line, of in callers.get(mutant.path, {}).items() if line in inside}
    run = {test for line in range(mutant.start[0], mutant.end[0] + 1) for test in of_file.get(line, ())}
    asked = run | {test for line, of in of_file.items() if first < line <= last for test in of}
    if not asked:  # only a program runs the line, or nothing
        near = sorted((Path(mutant.path).stem not in id, id) for id in seconds if id.startswith(folder))
        asked = {id for _, id in near[:60]}
    rounds, chosen, left = Counter(), [] if run else [OF_DEFAULTS], SECONDS
    order = []
    for id in sorted(asked, key=lambda id: (id not in run, seconds[id])):
        order.append(((id not in run, not id.startswith(folder)), rounds[id.split("[")[0]] // 3, seconds[id], id))
        rounds[id.split("[")[0]] += 1
    for *_, id in sorted(order):
        if seconds[id] <= left and id not in chosen:
            chosen.append(id)
            left -= seconds[id] + EACH
    return chosen


def notices(mutant: Mutant, ids: list[str]) -> str:
    """Return what notices the changed copy, a failing test or a run without end; "" if nothing does."""
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
    """Write a file with a new time, since Python's caches of compiled files compare only seconds and sizes."""
    path.write_text(text)
    _clock[0] += 2
    os.utime(path, (_clock[0], _clock[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--recorded", action="store_true", help="take the last record, and add the tests written since")
    parser.add_argument("--workers", default="2", help="processes of the first run of all tests")
    parser.add_argument("only", nargs="*", help="folders, files or lines (FILE:LINE, all changes) below megatron_ext")
    chosen = parser.parse_args()
    mutants = drawn(chosen.seed, chosen.count, chosen.only)
    copy_tree()
    workers = ["-n", chosen.workers]
    if not chosen.recorded:
        record(workers, [])
    elif changed := changed_tests():
        record(workers, changed)
    callers, seconds = read_record()
    os.chdir(TREE)
    sys.path[:] = [str(TREE), *(path for path in sys.path if path and Path(path) != ROOT)]
    os.environ["PYTHONPATH"] = str(TREE)
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]  # imports from here on take the copy
    from tests.rank_servers import PRELOAD, begin_run, end_run

    for name in [*PRELOAD, "hypothesis", "triton"]:
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    begin_run()
    noticed, explained = 0, []
    left = {tuple(entry[:2]): entry[2] for entry in (line.split(" | ") for line in LEFT.read_text().splitlines())}
    for number, mutant in enumerate(mutants, 1):
        ids = tests_for(mutant, callers, seconds)
        by = notices(mutant, ids) if ids else ""
        noticed += bool(by)
        source = (ROOT / "megatron_ext" / mutant.path).read_text()
        diff, line = mutant.diff(source), source.splitlines()[mutant.start[0] - 1].strip()
        if not by and (mutant.path, line) in left:
            explained.append(f"{number}: {left[mutant.path, line]}")
        print(f"{number}: {f'noticed ({by[:100]})' if by else f'SURVIVED {len(ids)} tests'}: {diff}", flush=True)
    end_run()
    print("survivors that need no test:", *explained, sep="\n")
    print(f"seed {chosen.seed}: {noticed} of {len(mutants)} noticed")


if __name__ == "__main__":
    main()

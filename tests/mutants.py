"""Changes of one line at a time, at random, and whether the quick tests notice: `make mutants SEED=1 COUNT=200`.

A copy of the tree is changed, never the tree. First all quick tests run once there, which says which of them call which
function; of those that call the changed one the folder's own come first, as many as take `SECONDS`, and the first that
fails ends the run. What survives is shown with its line, before and after.
"""

import argparse
import ast
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
from dataclasses import dataclass
from pathlib import Path

from tests.calls import RECORD
from tests.rank_servers import _PRELOAD, begin_run, end_run

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "runs" / "mutants"
TREE, CALLS = FOLDER / "tree", FOLDER / "calls"
SECONDS = 25  # of tests for each change, as they were when they were recorded
LIMIT_S = 240  # a change after which tests take longer is noticed: they hang
_clock = [time.time()]
QUICK = "not slow and not gpu"
TO_REMOVE = {"detach", "clone", "contiguous", "float", "requires_grad_"}
OPERATORS = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
}
OPERATORS |= {
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
}
OPERATORS |= {ast.GtE: (">=", ">"), ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Is: ("is", "is not")}
OPERATORS |= {ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in")}


@dataclass(frozen=True)
class Mutant:
    path: str  # below megatron_ext
    function: int  # the first line of the function that holds the change, its decorators included; 0: none
    start: tuple[int, int]  # line from 1, byte
    end: tuple[int, int]
    text: str

    def apply(self, source: str) -> str:
        lines = [line.encode() for line in source.splitlines(keepends=True)]
        (first, a), (last, b) = self.start, self.end
        lines[first - 1 : last] = [lines[first - 1][:a] + self.text.encode() + lines[last - 1][b:]]
        return b"".join(lines).decode()

    def diff(self, source: str) -> str:
        before, after = source.splitlines(), self.apply(source).splitlines()
        old = " ".join(line.strip() for line in before[self.start[0] - 1 : self.end[0]])
        new = after[self.start[0] - 1].strip()
        return f"megatron_ext/{self.path}:{self.start[0]}\n    - {old}\n    + {new}"


def mutants_of(path: Path, package: Path) -> list[Mutant]:
    """Every change of one place of a file; none of messages, types, docstrings and imports."""
    source, found = path.read_text(), []
    lines = [line.encode() for line in source.splitlines()]

    def add(function, node, text, start=None, end=None):
        start = start or (node.lineno, node.col_offset)
        found.append(
            Mutant(str(path.relative_to(package)), function, start, end or (node.end_lineno, node.end_col_offset), text)
        )

    def between(function, left, right, old, new):
        """The operator between two nodes, where both stand on one line."""
        if left.end_lineno == right.lineno:
            at = lines[right.lineno - 1].find(old.encode(), left.end_col_offset, right.col_offset)
            if at >= 0:
                add(function, left, new, (right.lineno, at), (right.lineno, at + len(old)))

    def of_expression(node, function):
        segment = lambda part: ast.get_source_segment(source, part)  # noqa: E731
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            between(function, node.left, node.right, *OPERATORS[type(node.op)])
        elif isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in OPERATORS:
            between(function, node.left, node.comparators[0], *OPERATORS[type(node.ops[0])])
        elif isinstance(node, ast.BoolOp):
            old = "and" if isinstance(node.op, ast.And) else "or"
            between(function, node.values[0], node.values[1], old, {"and": "or", "or": "and"}[old])
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.Not)):
            add(function, node, f"({segment(node.operand)})")
        elif isinstance(node, ast.Constant) and type(node.value) in (bool, int, float):
            value = node.value
            add(function, node, str(not value if isinstance(value, bool) else value + 1))
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in TO_REMOVE
            and not node.args
        ):
            add(function, node, segment(node.func.value))

    def walk(node, function):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            function = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            children = [*node.args.defaults, *filter(None, node.args.kw_defaults), *node.body]
        elif isinstance(node, ast.Raise):
            add(function, node, "pass")
            return
        elif isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Assert)):
            return
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        else:
            children = list(ast.iter_child_nodes(node))
        called = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
        kept = isinstance(node, ast.Assign) and isinstance(node.targets[0], (ast.Attribute, ast.Subscript))
        if function and (called or kept or isinstance(node, ast.AugAssign)):
            add(function, node, "pass")
        if isinstance(node, ast.expr):
            of_expression(node, function)
        for child in children:
            walk(child, function)

    walk(ast.parse(source), 0)
    return found


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
    for name in [*_PRELOAD, "hypothesis", "triton"]:
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

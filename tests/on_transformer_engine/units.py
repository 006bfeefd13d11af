"""Transformer Engine's own unit tests on the stand-in: those of a list must pass.

    make test-te-units TE=TREE    # TREE has the sources of the version that is installed; the target calls this:
    python -m tests.on_transformer_engine.units TREE
    python -m tests.on_transformer_engine.units TREE --write    # makes the list anew from what passes of a sample

The sample takes the first, the middle and the last case of each test function of some files, and leaves out what takes
more than `LIMIT_S` seconds. The list holds names of tests alone, in `units_VERSION.txt` beside this file; the tests are
read where their sources lie.
"""

import argparse
import importlib
import importlib.metadata
import os
import signal
import sys
import unittest
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest

FILES = "multi_tensor fused_optimizer recipe float8tensor fused_router permutation"
LIMIT_S = 20  # of one test


def list_of(version: str) -> Path:
    return Path(__file__).with_name(f"units_{version}.txt")


class Sample:
    """A pytest plugin: leaves a sample of the tests, or those of a list, and keeps the names of those that pass."""

    def __init__(self, chosen=None):
        self.chosen, self.passed, self.failed = chosen, [], []

    def pytest_collection_modifyitems(self, items):
        if self.chosen is not None:
            items[:] = [item for item in items if name_of(item.nodeid) in self.chosen]
            return
        functions = [list(cases) for _, cases in groupby(items, lambda item: item.nodeid.partition("[")[0])]
        items[:] = [cases[at] for cases in functions for at in sorted({0, len(cases) // 2, len(cases) - 1})]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        def stop(*_):
            raise TimeoutError(f"more than {LIMIT_S} s")

        if self.chosen is None:
            signal.signal(signal.SIGALRM, stop)
            signal.alarm(LIMIT_S)
        try:
            return (yield)
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            self.passed.append(name_of(report.nodeid))
        elif report.failed:
            self.failed.append(name_of(report.nodeid))


def name_of(node: str) -> str:
    """`test_file.py::test[case]`, wherever the file lies."""
    path, colons, test = node.partition("::")
    return f"{Path(path).name}{colons}{test}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tree", type=Path, help="Transformer Engine's sources")
    parser.add_argument("--write", action="store_true", help="make the list anew")
    parser.add_argument("--files", nargs="*", default=FILES.split(), help="names without test_ and .py")
    given = parser.parse_args()
    importlib.import_module("tests.on_transformer_engine.preload")  # enters the emulation

    version = importlib.metadata.version("transformer_engine")
    listed = list_of(version)
    chosen = None if given.write else set(listed.read_text().split("\n")) - {""}
    folder = given.tree.resolve() / "tests" / "pytorch"
    files = [folder / f"test_{name}.py" for name in given.files]
    files = [str(file) for file in files if file.exists()]
    if not files:
        sys.exit(f"{folder} has none of the files: give the root of Transformer Engine's sources")
    os.chdir(folder)
    sample = Sample(chosen)
    options = ["-q", "--continue-on-collection-errors", "--tb=line", "-W", "ignore", "-p", "no:cacheprovider"]
    options += ["-c", os.devnull, "--rootdir", str(folder)]
    # What torch's own helpers for tests import, and these tests use nothing of.
    sys.modules.setdefault("expecttest", SimpleNamespace(TestCase=unittest.TestCase))
    pytest.main([*files, *options], plugins=[sample])
    if given.write:
        listed.write_text("".join(f"{name}\n" for name in sorted(sample.passed)))
        print(f"{len(sample.passed)} passed, {len(sample.failed)} failed: {listed}")
        return 0
    missing = sorted(chosen - set(sample.passed))
    print("\n".join(["", *(f"did not pass: {name}" for name in missing)]))
    print(f"{len(chosen) - len(missing)} passed, {len(missing)} failed")
    return bool(missing)


if __name__ == "__main__":
    sys.exit(main())

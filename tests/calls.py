"""The functions of the package that each test calls, written down by a run with `RECORD` in its environment."""

import contextlib
import json
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

RECORD = "MEGATRON_EXT_CALLS"  # the environment variable that names the folder to write to
PACKAGE = str(Path(__file__).parents[1] / "megatron_ext") + os.sep


@contextlib.contextmanager
def recorded(test: str) -> Iterator[None]:
    """Note what is called meanwhile, in this process, as called by `test`."""
    if RECORD not in os.environ:
        yield
        return
    seen = set()

    def enters(frame, event, argument):
        code = frame.f_code
        if code.co_filename.startswith(PACKAGE):
            seen.add((code.co_filename, code.co_firstlineno))

    threading.settrace(enters)
    sys.settrace(enters)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)
        functions = sorted(f"{file.removeprefix(PACKAGE)}:{line}" for file, line in seen)
        with (Path(os.environ[RECORD]) / f"{os.getpid()}.jsonl").open("a") as record:
            record.write(json.dumps({"test": test, "functions": functions}) + "\n")


class Durations:
    """A pytest plugin that notes how long each test that passed took."""

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            with (Path(os.environ[RECORD]) / "durations.jsonl").open("a") as record:
                record.write(json.dumps({"id": report.nodeid, "seconds": report.duration}) + "\n")

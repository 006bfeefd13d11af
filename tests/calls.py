"""A record of the lines of the package that each test runs, made by a run with `RECORD` in its environment."""

import contextlib
import json
import os
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

RECORD = "MEGATRON_EXT_CALLS"  # the environment variable that names the folder to write to
OF_TEST = "MEGATRON_EXT_CALLS_OF"  # the environment variable that names the test that started a process
PACKAGE = str(Path(__file__).parents[1] / "megatron_ext") + os.sep


@contextlib.contextmanager
def recorded(test: str = "") -> Iterator[None]:
    """Record the lines that this process runs inside the context, for `test` or the test that started the process."""
    test = test or os.environ.get(OF_TEST, "")
    if RECORD not in os.environ or not test:
        yield
        return
    seen = defaultdict(set)

    def enters(frame, event, argument):
        return runs if frame.f_code.co_filename.startswith(PACKAGE) else None

    def runs(frame, event, argument):
        seen[frame.f_code.co_filename].add(frame.f_lineno)
        return runs

    os.environ[OF_TEST] = test
    threading.settrace(enters)
    sys.settrace(enters)
    try:
        yield
    finally:
        sys.settrace(None)
        threading.settrace(None)
        os.environ.pop(OF_TEST, None)
        lines = {file.removeprefix(PACKAGE): sorted(numbers) for file, numbers in sorted(seen.items())}
        with (Path(os.environ[RECORD]) / f"{os.getpid()}.jsonl").open("a") as record:
            record.write(json.dumps({"test": test, "lines": lines}) + "\n")


class Durations:
    """A pytest plugin that records the seconds of each test that passes."""

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            with (Path(os.environ[RECORD]) / "durations.jsonl").open("a") as record:
                record.write(json.dumps({"id": report.nodeid, "seconds": report.duration}) + "\n")

"""Megatron-Core's own unit tests on a CPU or a GPU, with its own modules and with ours in their place.

    make test-source MEGATRON=CLONE@REF    # the copy of the sources, then, among others, this:
    python -P tests/megatron/unit_suite.py TREE [FILES OR FOLDERS ...] --results FILE.json
    ... --results FILE.json --source NAME --page docs/megatron.md    # puts what FILE.json holds into the page's table

A test runs on one rank first. One that fails or skips there and says that it wants more of them (`ASKS_FOR_RANKS`) runs
on 2, 4 and 8. What passes with Megatron's own modules runs again on as many ranks, with `substitute_tensor_parallel()`
and `patch_gpt_model_forward_for_linear_ce_fusion()` called before the first test module is imported. What passes the
first time and not the second is printed, and the exit status is 1.

Ranks are forked from a process that has imported Megatron already, under `megatron_on_cpu()`: of hundreds of test files
each takes a second to start. With `--on-gpu` nothing is emulated, and each file's ranks import Megatron themselves,
since CUDA does not outlive a fork; NCCL takes as many ranks as there are GPUs. When nothing happens for `--patience`
seconds, or ranks disagree about a test, all are ended, and the rest of the file goes on in new ones.

Megatron's tests live in a package `tests`, as ours do: this file is a program and imports nothing from ours.
"""

import argparse
import contextlib
import gc
import importlib
import json
import os
import random
import re
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
import types
from pathlib import Path

RANKS = (1, 2, 4, 8)
BEGIN, END = "<!-- unit suite -->", "<!-- end of unit suite -->"
COLUMNS = ("source", "folder", "files", "ranks", "tests", "pass stock", "pass with ours")
ASKS_FOR_RANKS = re.compile(r"world.?size|\branks?\b|\bgpus?\b|\bdevices\b|divisible|parallel.?size", re.IGNORECASE)
PRELOAD = (
    "_pytest.assertion.rewrite",
    "pytest_asyncio.plugin",
    "megatron.core.dist_checkpointing.strategies.fully_parallel",
    "megatron.core.extensions.transformer_engine",
    "megatron.core.inference.engines",
    "megatron.core.models.hybrid.hybrid_model",
    "megatron.core.models.mimo",
    "megatron.core.models.multimodal.llava_model",
    "megatron.core.optimizer",
    "megatron.training.argument_utils",
    "megatron.training.checkpointing",
    "megatron.training.training",
)


class Recorder:
    """A pytest plugin: tells the parent which tests there are, which one starts, and how it ended.

    Args:
        tell: takes one record, a dict.
        chosen: the tests to run, by id; None: all.
    """

    def __init__(self, tell, chosen=None):
        self.tell, self.chosen = tell, chosen

    def pytest_collection_modifyitems(self, items):
        if self.chosen is not None:
            items[:] = [item for item in items if item.nodeid in self.chosen]
        self.tell({"collected": [item.nodeid for item in items]})

    def pytest_collectreport(self, report):
        if report.failed:
            self.tell({"not collected": report.nodeid, "why": _last_line(report)})

    def pytest_runtest_logstart(self, nodeid):
        self.tell({"start": nodeid})
        self.outcome, self.why = "passed", ""

    def pytest_runtest_logreport(self, report):
        if report.outcome == "rerun":  # Megatron marks tests as flaky: the last attempt counts
            self.outcome, self.why = "passed", ""
        elif report.outcome != "passed" and self.outcome != "failed":
            self.outcome, self.why = report.outcome, _last_line(report)

    def pytest_runtest_logfinish(self, nodeid):
        self.tell({"test": nodeid, "outcome": self.outcome, "why": self.why})


def _last_line(report):
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else getattr(crash, "message", report.longreprtext)
    lines = [line.strip() for line in str(text).splitlines() if line.strip()]
    # An exception's message starts at the first line of a crash, and stands in the last one of a whole traceback.
    return (lines or [""])[0 if crash or isinstance(report.longrepr, tuple) else -1][:300]


def free_port():
    """A port that no connection takes by itself before rank 0 listens there: below those that Linux deals out."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as tried, contextlib.suppress(OSError):
            tried.bind(("127.0.0.1", port))
            return port


def put_ours_in_place():
    from megatron_ext import substitute_tensor_parallel
    from megatron_ext.model_utils import patch_gpt_model_forward_for_linear_ce_fusion

    substitute_tensor_parallel()
    patch_gpt_model_forward_for_linear_ce_fusion()


def run_rank(file, *, pipe, log, folder, environment, ours, chosen):
    """One rank of one file's tests, in a process of its own. Does not return."""
    status = 1
    try:
        os.setpgid(0, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(environment)
        if ours:
            put_ours_in_place()
        import pytest

        def tell(record):
            os.write(pipe, json.dumps(record).encode() + b"\n")

        options = [f"--rootdir={os.getcwd()}", "--config-file=pyproject.toml", "--override-ini=addopts=", "--quiet"]
        options += ["-pno:cacheprovider", "-pno:randomly", f"--basetemp={folder}/rank{environment['RANK']}"]
        status = pytest.main([*options, file], plugins=[Recorder(tell, chosen)])
        tell({"end": int(status)})
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(int(status))


class Run:
    """One start of the ranks of one file: what each of them told."""

    def __init__(self, file, ranks, *, ours, chosen, log, patience_s, until):
        self.ranks, self.patience_s, self.until = ranks, patience_s, until
        self.collected, self.broken = [], ""
        self.started = None
        self.outcomes = {}  # by test, of the ranks that have told
        self.results = {}
        self.ended = set()
        self.folder = tempfile.TemporaryDirectory(prefix="unit_suite_", ignore_cleanup_errors=True)
        port = free_port()
        selector, self.children = selectors.DefaultSelector(), []
        sys.stdout.flush()
        for rank in range(ranks):
            read, write = os.pipe()
            child = os.fork()
            if child == 0:
                environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
                environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                environment = {name: str(value) for name, value in environment.items()}
                options = {"pipe": write, "log": log, "folder": self.folder.name, "environment": environment}
                run_rank(file, **options, ours=ours, chosen=chosen)
            os.close(write)
            self.children.append(child)
            selector.register(read, selectors.EVENT_READ, [rank, b""])
        try:
            self._listen(selector)
        finally:
            self._end()
            for key in list(selector.get_map().values()):
                os.close(key.fd)
            selector.close()
            self.folder.cleanup()

    def _listen(self, selector):
        heard = time.monotonic()
        while selector.get_map():
            for key, _ in selector.select(timeout=1):
                data = os.read(key.fd, 1 << 20)
                if not data:
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    if key.data[0] not in self.ended:
                        self._stopped("died")
                        return
                    continue
                heard = time.monotonic()
                *lines, key.data[1] = (key.data[1] + data).split(b"\n")
                for line in lines:
                    if not self._hear(key.data[0], json.loads(line)):
                        return
            if time.monotonic() - heard > self.patience_s:
                self._stopped("hung")
                return
            if time.monotonic() > self.until:
                return

    def _hear(self, rank, record):
        """Take one record in; False where the ranks are out of step, and have to be started anew."""
        if "collected" in record and rank == 0:
            self.collected = record["collected"]
        elif "not collected" in record:
            self.broken = record["why"]
        elif "start" in record and rank == 0:
            self.started = record["start"]
        elif "end" in record:
            self.ended.add(rank)
        elif "test" in record:
            told = self.outcomes.setdefault(record["test"], [])
            told.append((record["outcome"], record["why"]))
            if len(told) == self.ranks:
                self.results[record["test"]] = max(told, key=lambda one: ("passed", "skipped", "failed").index(one[0]))
                return len({outcome for outcome, _ in told}) == 1
        return True

    def _stopped(self, how):
        unfinished = [test for test in self.outcomes if test not in self.results] or [self.started]
        for test in unfinished:
            if test is not None and test not in self.results:
                told = [why for outcome, why in self.outcomes.get(test, ()) if outcome == "failed"]
                self.results[test] = (how, (told or [""])[0])
        if not self.results:
            self.broken = self.broken or how

    def _end(self):
        for child in self.children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def outcomes(file, ranks, *, ours, chosen=None, log, patience_s, limit_s):
    """Return each test's outcome in a file, {id: (outcome, why)}, and why the file could not be collected, or "".

    Tests that `limit_s` seconds did not suffice for are "not run".
    """
    found, until = {}, time.monotonic() + limit_s
    while True:
        run = Run(file, ranks, ours=ours, chosen=chosen, log=log, patience_s=patience_s, until=until)
        found |= run.results
        rest = [test for test in run.collected if test not in found]
        if time.monotonic() > until:
            over = f"over the file's limit of {limit_s:.0f} s"
            return found | dict.fromkeys(rest, ("not run", over)), "" if run.collected else over
        if not rest or not run.results:
            return found, run.broken
        chosen = set(rest)


def both_ways(file, known, sizes, **options):
    """Run what is not known yet of a file's tests. Keeps in `known`:

    "tests": {id: {"ranks", "stock", "ours", "why"}}, "broken": why there are no tests,
    "ran": which tests ran on how many ranks. Ours run in the same company, since some pass by what others leave.
    """
    tests, ran = known["tests"], known["ran"]
    for ranks in map(str, sizes):
        if ranks not in ran:
            chosen = {name for name, test in tests.items() if asks_for_ranks(test)} if ran else None
            if chosen is None or chosen:
                stock, known["broken"] = outcomes(file, int(ranks), ours=False, chosen=chosen, **options)
                for name, (outcome, why) in stock.items():
                    tests[name] = {"ranks": int(ranks), "stock": outcome, "why": why}
            ran[ranks] = list(tests if chosen is None else chosen)
        wanted = {name for name in ran[ranks] if tests[name]["ranks"] == int(ranks) and wants_ours(tests[name])}
        if wanted:
            ours, broken = outcomes(file, int(ranks), ours=True, chosen=set(ran[ranks]), **options)
            for name in wanted:
                outcome, why = ours.get(name, ("not collected", broken))
                tests[name] |= {"ours": outcome, "why": why}


def asks_for_ranks(test):
    return test["stock"] in ("failed", "skipped") and ASKS_FOR_RANKS.search(test["why"])


def wants_ours(test):
    return test["stock"] == "passed" and "ours" not in test


def differs(test):
    return test["stock"] == "passed" and test.get("ours") not in (None, "not run", "passed")


def prepare(tree, emulation, transformer_engine, on_gpu):
    """Import what all ranks need, once; on the CPU until the stack `emulation` is closed, unless they are `on_gpu`."""
    os.chdir(tree)
    repository = str(Path(__file__).parents[2])
    sys.path[:] = [tree, *(entry for entry in sys.path if Path(entry or ".").resolve() != Path(repository))]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NVIDIA_PYTORCH_VERSION", "26.08")  # NVIDIA's container of main's date; old ones skip tests
    os.environ["PYTHONPATH"] = tree
    sys.path.insert(0, repository)
    import megatron_ext  # noqa: F401, while it is found: the tree has a folder `tests` too
    from megatron_on_cpu import megatron_on_cpu

    sys.path.remove(repository)
    import torch

    if not on_gpu:
        torch.set_num_threads(1)
        emulation.enter_context(megatron_on_cpu(transformer_engine=True) if transformer_engine else megatron_on_cpu())
        for module in PRELOAD:
            with contextlib.suppress(ImportError):  # of another version
                importlib.import_module(module)
        gc.collect()
        gc.freeze()  # the collector need not look at what was imported, in any rank
    # The tests' conftest would download data from the network.
    nothing = types.ModuleType("tests.test_utils.python_scripts.download_unit_tests_dataset")
    nothing.download_and_extract_asset = lambda **kwargs: None
    sys.modules[nothing.__name__] = nothing


def test_files(tree, chosen):
    """The files of tests below `tests/unit_tests`, or below those files and folders of it."""
    root = Path(tree, "tests", "unit_tests")
    places = [root / one for one in chosen] or [root]
    found = [path for one in places for path in ([one] if one.is_file() else sorted(one.rglob("test_*.py")))]
    return [str(path.relative_to(tree)) for path in found]


def folder_of(file):
    parts = Path(file).parts[2:]
    return parts[0] if len(parts) > 1 else "."


def rows(found, tree, source):
    """Return rows by (source, folder): files run of those there are, world sizes, tests, and tests passed each way."""
    by_folder = {}
    for file, result in found.items():
        by_folder.setdefault(folder_of(file), []).append(result)
    there = [folder_of(file) for file in test_files(tree, [])]
    made = {}
    for folder, results in by_folder.items():
        tests = [test for result in results for test in result["tests"].values()]
        ranks = sorted({int(ranks) for result in results for ranks in result["ran"]})
        passed = [sum(test.get(way) == "passed" for test in tests) for way in ("stock", "ours")]
        files = f"{len(results)} of {there.count(folder)}"
        made[source, folder] = [files, " ".join(map(str, ranks)), len(tests), *passed]
    return made


def table(rows):
    """Lines of a Markdown table, with the sums of each source."""
    lines = [f"| {' | '.join(COLUMNS)} |", "|---" * len(COLUMNS) + "|"]
    for source in sorted({source for source, _ in rows}):
        own = {folder: row for (one, folder), row in sorted(rows.items()) if one == source}
        sums = [sum(int(row[column]) for row in own.values()) for column in (2, 3, 4)]
        own["all"] = ["", "", *sums]
        lines += [f"| {' | '.join(map(str, [source, folder, *row]))} |" for folder, row in own.items()]
    return lines


def put_into_page(page, found):
    """The rows `found` into the table between the marks of a page, in the place of those of the same name."""
    before, _, rest = page.read_text().partition(BEGIN)
    inside, _, after = rest.partition(END)
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in inside.strip().splitlines()[2:]]
    there = {(source, folder): row for source, folder, *row in cells if folder != "all"}
    page.write_text("\n".join([f"{before}{BEGIN}", *table(there | found), f"{END}{after}"]))


def differences(found):
    return [
        f"{name} on {test['ranks']}: {test['ours']}: {test['why']}"
        for result in found.values()
        for name, test in result["tests"].items()
        if differs(test)
    ]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
    parser.add_argument("tree", help="Megatron-LM's sources, unpacked")
    parser.add_argument("files", nargs="*", help="below tests/unit_tests; all by default")
    parser.add_argument("--results", required=True, help="a JSON file; what stands there is not run again")
    parser.add_argument("--ranks", type=int, nargs="+", default=RANKS, help="world sizes to try, in this order")
    parser.add_argument("--transformer-engine", action="store_true", help="its Python code is emulated too")
    parser.add_argument("--on-gpu", action="store_true", help="nothing is emulated")
    parser.add_argument("--again", action="store_true", help="run what differed with ours once more")
    parser.add_argument("--patience", type=float, default=60, help="seconds without a sign of life that end a test")
    parser.add_argument("--limit", type=float, default=900, help="seconds that a file may take on so many ranks")
    parser.add_argument("--source", default="these sources", help="what the page calls them")
    parser.add_argument("--page", type=lambda path: Path(path).resolve(), help="a page with marks for the table")
    parser.add_argument("--log", default=os.devnull, help="what the tests print")
    options = parser.parse_intermixed_args(argv)
    tree, results = str(Path(options.tree).resolve()), Path(options.results).resolve()
    log = os.open(options.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    found = json.loads(results.read_text()) if results.exists() else {}
    with contextlib.ExitStack() as emulation:
        prepare(tree, emulation, options.transformer_engine, options.on_gpu)
        # After the imports, of which one takes the signal to print where the program stands, and goes on.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM, with all ranks"))
        for file in test_files(tree, options.files):
            known, started = found.setdefault(file, {"tests": {}, "ran": {}, "broken": ""}), time.monotonic()
            if options.again:
                for test in filter(differs, known["tests"].values()):
                    del test["ours"]
            both_ways(file, known, options.ranks, log=log, patience_s=options.patience, limit_s=options.limit)
            results.write_text(json.dumps(found, indent=1))
            passed = sum(test["stock"] == "passed" for test in known["tests"].values())
            left = sum("not run" in (test["stock"], test.get("ours")) for test in known["tests"].values())
            differ, seconds = differences({file: known}), time.monotonic() - started
            counts = f"{len(known['tests'])} tests, {passed} pass, {len(differ)} differ, {seconds:.0f} s"
            print(f"{file}: {counts}{f', {left} not run within the limit' if left else ''}", flush=True)
            for line in [known["broken"], *differ] if known["broken"] else differ:
                print(f"  {line}", flush=True)
    by_folder = rows(found, tree, options.source)
    print("\n".join(table(by_folder)))
    if options.page:
        put_into_page(options.page, by_folder)
    differ = differences(found)
    print(f"{len(differ)} tests pass with Megatron's own modules and not with ours", *differ, sep="\n  ")
    return 1 if differ else 0


if __name__ == "__main__":
    sys.exit(main())

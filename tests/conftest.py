import gc
import importlib.util
import os
import sys
from pathlib import Path

if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it at import
# cuBLAS needs this in torch's deterministic mode, which reads it once, at the first product of a process.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch

from tests import left_behind
from tests.calls import RECORD, Durations, recorded
from tests.passed import Passed
from tests.rank_servers import begin_run, end_run
from tests.ranks import TIMEOUT_S, choose_backend, close_pools, end_file_on_ranks, prepare_process

FOLDER = Path(__file__).parent
LONGEST = "test_tests_and_measurements_rehearsed"
ASIDE = {"experimental", "megatron_on_cpu", "on_transformer_engine"}


def pytest_addoption(parser):
    parser.addoption(
        "--rehearse",
        action="store_true",
        help="with -m gpu: most GPU tests on the CPU, line by line, with Triton's interpreter and toy sizes",
    )
    parser.addoption(
        "--resume", metavar="FILE", help="leave out the tests that FILE has as passed; add those that pass"
    )
    parser.addoption(
        "--launches", metavar="FILE", help="with --rehearse: add each kind of launch of Triton's kernels to FILE"
    )
    parser.addoption(
        "--nccl-rules",
        choices=["lazy", "eager"],
        help="ranks talk over the backend with NCCL's rules instead of gloo; eager: as with a device_id",
    )


def pytest_configure(config):
    prepare_process()
    choose_backend(config.getoption("nccl_rules"))
    if config.getoption("resume"):
        config.pluginmanager.register(Passed(config.getoption("resume")))
    if config.getoption("launches"):
        from tests import compiled_launches

        compiled_launches.write_to(Path(config.getoption("launches")))
    # Ray starts its actors with niceness 15, at which they would hardly run beside the other tests.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_worker_register_timeout_seconds", str(TIMEOUT_S))
    begin_run()
    if RECORD in os.environ and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations())


def pytest_ignore_collect(collection_path, config):
    """Leave out Transformer Engine's tests where it is not installed, and with `-m gpu` all files without such tests.

    A machine with a GPU may have nothing but torch and pytest, so other files may fail at import.
    """
    if collection_path.name == "on_transformer_engine" and importlib.util.find_spec("transformer_engine") is None:
        return True
    if config.getoption("markexpr") != "gpu" or collection_path.suffix != ".py":
        return None
    return True if "mark.gpu" not in collection_path.read_text() else None


@pytest.hookimpl(tryfirst=True)  # before marks are chosen
def pytest_collection_modifyitems(config, items):
    """Deselect tests marked `gpu` where there is no CUDA device, but keep those marked `rehearsed` with `--rehearse`.
    Mark tests in the folders `ASIDE` as aside, except essential ones."""
    items.sort(key=lambda item: item.name != LONGEST)  # the longest test would run alone for minutes if it came last
    for item in items:
        if item.path.relative_to(FOLDER).parts[0] in ASIDE and item.get_closest_marker("essential") is None:
            item.add_marker("aside")
    if torch.cuda.is_available():
        return

    def runs(item):
        gpu = item.get_closest_marker("gpu")
        return gpu is None or (config.getoption("rehearse") and item.get_closest_marker("rehearsed") is not None)

    config.hook.pytest_deselected(items=[item for item in items if not runs(item)])
    items[:] = [item for item in items if runs(item)]


def pytest_collection_finish(session):
    gc.freeze()  # tests and their imports stay, so that the garbage collector need not scan them


def pytest_terminal_summary(terminalreporter, config):
    """Print the seed of the order after failures, so that the order can be repeated."""
    if terminalreporter.stats.keys() & {"failed", "error"} and config.pluginmanager.hasplugin("randomly"):
        terminalreporter.write_line(
            f"the tests ran in the order of --randomly-seed={config.getoption('randomly_seed')}"
        )


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request):
    with left_behind.told(), left_behind.nothing_left_by_test(), recorded(request.node.nodeid):
        yield


@pytest.fixture(autouse=True, scope="module")
def _file_leaves_nothing_behind():
    left_behind.begin_file()
    yield
    with left_behind.told():
        left_behind.end_file()
    end_file_on_ranks()


@pytest.fixture(autouse=True)
def _as_users_run(request):
    """Turn off the tests' deterministic mode for `gpu` tests: it makes CUDA operators sort, and wait for the host."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    rehearsed = None if torch.cuda.is_available() else request.node.get_closest_marker("rehearsed")
    torch.use_deterministic_algorithms(False)
    if rehearsed is None:
        yield
    else:
        from tests.head.as_on_cuda import rehearsal

        with rehearsal(**rehearsed.kwargs):
            yield
    torch.set_deterministic_debug_mode("warn")


def pytest_unconfigure(config):
    close_pools()
    end_run()

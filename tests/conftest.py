import gc
import os

import pytest
import torch

from tests.ranks import close_pools, prepare_process


def pytest_configure(config):
    prepare_process()
    # Ray starts its actors with niceness 15: beside the other tests they would hardly get a turn.
    os.environ.setdefault("RAY_worker_niceness", "0")


def pytest_collection_modifyitems(config, items):
    """Tests marked `gpu` run wherever there is a CUDA device; elsewhere they are left out of the run, not skipped."""
    if not torch.cuda.is_available():
        gpu = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=gpu)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]


def pytest_collection_finish(session):
    gc.freeze()  # the tests and what they import stay: the garbage collector need not look at them again and again


@pytest.fixture(autouse=True)
def _same_random_numbers():
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _as_users_run(request):
    """The tests' own deterministic mode makes CUDA operators sort, and wait for the host."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    torch.use_deterministic_algorithms(False)
    yield
    torch.use_deterministic_algorithms(True, warn_only=True)


def pytest_unconfigure(config):
    close_pools()

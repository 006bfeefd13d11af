"""Run a test body on every rank of a gloo world: one pool of worker processes per world size, kept for the whole run.

As with users, each rank has its own interpreter, hash seed and imports (`tests/rank_servers.py`).

`@ranks(1, 2, 4)` above a module-level test function runs its body on all ranks, once per world size. A rank that fails
fails the test with its traceback. A pool in which a rank failed or did not answer is killed and replaced, so that
neither a hang nor a crash outlives its test. A pool whose ranks have many threads is replaced too: every gloo group has
threads that wake 100 times a second, and torch's caches of shardings keep groups. To fork a new pool takes 0.2 s.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import logging
import os
import pickle
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.calls import OF_TEST, recorded
from tests.rank_servers import FOLDER, fork

TIMEOUT_S = 900  # the time after which ranks and programs are taken to hang: no test takes that long on any machine
CROWD = 64  # threads of one rank at which its pool is replaced
STRAGGLERS_S = 3  # the time for which the other ranks may go on once one has failed

END_OF_FILE = ("", "end of file")  # the ranks' job at the end of a file, in the place of a test's module and name

_pools: dict[int, "_Pool"] = {}


_NCCL_RULES = {"lazy": {}, "eager": {"eager": True}}  # the values of pytest's option --nccl-rules
_chosen: list[str] = []


def choose_backend(option) -> None:
    """Choose the backend of tests that choose none: gloo (None), or the backend that hangs and refuses as NCCL does."""
    _chosen[:] = [option] if option else []


def _rules_of_run():
    if not _chosen:
        return "gloo"
    from megatron_on_cpu.nccl_rules import NcclRules

    return NcclRules(**_NCCL_RULES[_chosen[0]], order="raise", device_is_set=True)


def _backend(rules) -> str:
    if rules == "gloo":
        return "gloo"
    from megatron_on_cpu.nccl_rules import register

    register(rules)
    return "nccl_rules"


def prepare_process() -> None:
    """Prepare a process that runs test bodies: one thread, and uninitialised memory filled with NaN."""
    import torch

    from benchmarks.interpreter import round_to_bfloat16

    round_to_bfloat16()
    torch.set_num_threads(1)  # the ranks share a few cores, where more threads would be slower
    torch.set_deterministic_debug_mode("warn")  # fills with NaN; imports less than use_deterministic_algorithms
    torch.utils.deterministic.fill_uninitialized_memory = True


def _work(jobs, rank, world_size, store, rules):
    import torch
    import torch.distributed as dist

    prepare_process()
    faulthandler.enable()  # a crash prints its traceback
    logging.basicConfig()  # else a library's first warning would call it
    gc.freeze()  # the garbage collector need not scan preloaded modules, which took half of the time of many tests
    dist.init_process_group(
        _backend(rules),
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=10 * TIMEOUT_S),  # the pool decides when a test hangs, not gloo
    )
    from tests import left_behind

    left_behind.begin_file()
    world = left_behind.groups()
    while (job := pickle.loads(jobs.recv_bytes())) is not None:
        left_behind.end_groups(but=world)  # groups of the test before, which no rank uses any more
        torch.manual_seed(0)
        jobs.send((_error_of(*job), _threads()))
    dist.destroy_process_group()


def _threads():
    """Return the number of threads of this process, or 0 where it is not known."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0


def _error_of(module, name, kwargs, test, alone=False):
    """Run a test's body, or the check at the end of a file, on this rank; return the error, or None.

    `alone`: the rank ends with this test, and may leave anything behind.
    """
    from tests import left_behind

    try:
        if (module, name) == END_OF_FILE:
            with left_behind.told():
                left_behind.end_file(on_rank=True)
        else:
            function = getattr(importlib.import_module(module), name)
            left = contextlib.nullcontext() if alone else left_behind.nothing_left_by_test()
            with left_behind.told(), left, recorded(test), _undone(kwargs):
                function.body(**kwargs)
    except pytest.skip.Exception as skipped:
        return Skipped(str(skipped))
    except left_behind.LeftBehind as left:
        return str(left)
    except BaseException:  # also SystemExit: a rank must always answer
        return traceback.format_exc()
    return None


@contextlib.contextmanager
def _undone(fixtures):
    """Undo at the end what the body has replaced by `monkeypatch`, of which each rank has a copy unknown to pytest."""
    try:
        yield
    finally:
        for fixture in fixtures.values():
            if isinstance(fixture, pytest.MonkeyPatch):
                fixture.undo()


class Skipped(NamedTuple):
    """Answer of a rank whose body called `pytest.skip`; the test fails unless all ranks give it."""

    reason: str


class _Pool:
    def __init__(self, world_size, rules=None):
        handle, self.store = tempfile.mkstemp(prefix="gloo_")
        os.close(handle)
        os.unlink(self.store)
        self.used = False
        self.crowded = False
        self.workers = fork(world_size, _work, world_size, self.store, rules or _rules_of_run())

    def run(self, module, name, kwargs, alone=False):
        self.used = True
        self._tell((module, name, kwargs, os.environ.get(OF_TEST, ""), alone))
        pending = {worker.connection: rank for rank, worker in enumerate(self.workers)}
        errors, deadline, ended = {}, time.monotonic() + TIMEOUT_S, False
        while pending and not ended and (left := deadline - time.monotonic()) > 0:
            for connection in wait(list(pending), left):
                try:
                    error, threads = connection.recv()
                except EOFError:
                    ended = True
                    continue
                rank = pending.pop(connection)
                self.crowded |= threads > CROWD
                if error:
                    errors[rank] = error
                    deadline = min(deadline, time.monotonic() + STRAGGLERS_S)
        if len(errors) == len(self.workers) and all(isinstance(error, Skipped) for error in errors.values()):
            self.kill()
            pytest.skip(errors[0].reason)
        if errors or pending:
            self.kill()
            report = "\n".join(f"--- rank {rank} of {len(self.workers)} ---\n{e}" for rank, e in sorted(errors.items()))
            silent = f"ranks {sorted(pending.values())} {'ended or ' * ended}never answered\n" if pending else ""
            pytest.fail(f"{name}\n{silent}{report}", pytrace=False)

    def _tell(self, job):
        for worker in self.workers:
            with contextlib.suppress(OSError):  # `run` will notice that the rank has ended
                worker.connection.send_bytes(pickle.dumps(job))

    def kill(self):
        for worker in self.workers:
            worker.kill()
        self.remove_store()

    def close(self):
        self._tell(None)
        for worker in self.workers:
            if not wait([worker.connection], 5):  # 5 s for its end
                worker.kill()
        self.remove_store()

    def remove_store(self):
        if os.path.exists(self.store):
            os.unlink(self.store)


def ranks(*world_sizes, rules=None):
    """Run the decorated body on every rank, once for each of `world_sizes`; its parameters may be parametrized.

    More than two ranks are marked slow, unless the test gives its own `NcclRules`. `rules="gloo"` is for tests that
    need gloo. With `rules` the test has its own ranks, and may leave them unusable.
    """
    of_its_own = rules not in (None, "gloo")
    sizes = [pytest.param(n, marks=pytest.mark.slow if n > 2 and not of_its_own else ()) for n in world_sizes]

    def decorate(body):
        world = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)

        @pytest.mark.several_ranks
        @pytest.mark.parametrize("world_size", sizes, ids=lambda size: f"world{size}")
        @functools.wraps(body)
        def test(**kwargs):
            world_size = kwargs.pop("world_size")
            pool = None if rules else _pools.pop(world_size, None)
            pool = pool or _Pool(world_size, rules)
            # on failure the pool stays out of _pools
            pool.run(body.__module__, body.__name__, kwargs, alone=bool(rules))
            if pool.crowded or rules:
                pool.kill()
            else:
                _pools[world_size] = pool

        test.__signature__ = inspect.Signature([*inspect.signature(body).parameters.values(), world])
        test.body = body
        return test

    return decorate


def shared_folder():
    """Return a new folder, the same on all ranks, which is removed at the end of the run."""
    import torch.distributed as dist

    name = [tempfile.mkdtemp(dir=os.environ[FOLDER]) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return Path(name[0])


def end_file_on_ranks():
    """Fail if a file's tests have left something behind in the processes of their ranks."""
    for size in [size for size, pool in _pools.items() if pool.used]:
        pool = _pools.pop(size)
        pool.run(*END_OF_FILE, {})  # on failure the pool stays out of _pools
        pool.used = False
        _pools[size] = pool


def close_pools():
    while _pools:
        _pools.popitem()[1].close()

"""Run a test body on every rank of a gloo world: one pool of worker processes per world size, kept for the whole run.

`@ranks(1, 2, 4)` above a module-level test function runs its body on all ranks, once per world size. A rank that fails
fails the test with its traceback. A pool in which a rank failed or fell silent is killed and replaced, so that neither
a hang nor a crash outlives its test. So is one whose ranks have gathered threads: every gloo group has some, which wake
100 times a second, and torch's caches of shardings keep groups for good. A new pool is forked in a fifth of a second.
"""

import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from datetime import timedelta

import pytest

TIMEOUT_S = 900  # of ranks and programs, only to end what hangs: no machine is so slow that a test takes that long
# Imported once, before the ranks are forked.
_PRELOAD = [
    "torch.distributed.tensor",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "transformers.models.qwen2.modeling_qwen2",
]
CROWD = 64  # threads of one rank at which its pool is replaced
STRAGGLERS_S = 3  # how long the other ranks may go on once one has failed

_pools: dict[int, "_Pool"] = {}


def prepare_process() -> None:
    """What every process that runs test bodies sets: one thread, and uninitialised memory that shows (NaN)."""
    import torch

    from benchmarks.interpreter import round_to_bfloat16

    round_to_bfloat16()
    torch.set_num_threads(1)  # the ranks share a few cores; more threads only get in each other's way
    torch.use_deterministic_algorithms(True, warn_only=True)  # also fills torch.empty with NaN
    torch.utils.deterministic.fill_uninitialized_memory = True


def _work(rank, world_size, store, jobs, replies):
    import torch
    import torch.distributed as dist

    prepare_process()
    gc.freeze()  # the garbage collector need not look at what was preloaded: half of the time of many tests went there
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=10 * TIMEOUT_S),  # the pool decides when a test hangs, not gloo
    )
    while (job := jobs.get()) is not None:
        module, name, kwargs = job
        torch.manual_seed(0)
        try:
            getattr(importlib.import_module(module), name).body(**kwargs)
            error = None
        except BaseException:  # also SystemExit: a rank must always answer
            error = traceback.format_exc()
        replies.put((rank, error, _threads()))
    dist.destroy_process_group()


def _threads():
    """The threads of this process, 0 where that is not known."""
    tasks = "/proc/self/task"
    return len(os.listdir(tasks)) if os.path.isdir(tasks) else 0


class _Pool:
    def __init__(self, world_size, preload=_PRELOAD):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(preload)
        handle, self.store = tempfile.mkstemp(prefix="gloo_")
        os.close(handle)
        os.unlink(self.store)
        self.replies = context.Queue()
        self.crowded = False
        self.jobs = [context.SimpleQueue() for _ in range(world_size)]
        self.workers = [
            context.Process(target=_work, args=(rank, world_size, self.store, jobs, self.replies), daemon=True)
            for rank, jobs in enumerate(self.jobs)
        ]
        for worker in self.workers:
            worker.start()

    def run(self, module, name, kwargs):
        for jobs in self.jobs:
            jobs.put((module, name, kwargs))
        pending, errors, deadline = set(range(len(self.workers))), {}, time.monotonic() + TIMEOUT_S
        while pending and (left := deadline - time.monotonic()) > 0:
            try:
                rank, error, threads = self.replies.get(timeout=min(left, 1.0))
            except queue.Empty:
                if all(worker.is_alive() for worker in self.workers):
                    continue
                break
            pending.discard(rank)
            self.crowded |= threads > CROWD
            if error:
                errors[rank] = error
                deadline = min(deadline, time.monotonic() + STRAGGLERS_S)
        if errors or pending:
            self.kill()
            report = "\n".join(f"--- rank {rank} of {len(self.workers)} ---\n{e}" for rank, e in sorted(errors.items()))
            silent = f"ranks {sorted(pending)} never answered\n" if pending else ""
            pytest.fail(f"{name}\n{silent}{report}", pytrace=False)

    def kill(self):
        for worker in self.workers:
            worker.kill()
        self.remove_store()

    def close(self):
        for jobs in self.jobs:
            jobs.put(None)
        for worker in self.workers:
            worker.join(5)
            if worker.is_alive():
                worker.kill()
        self.remove_store()

    def remove_store(self):
        if os.path.exists(self.store):
            os.unlink(self.store)


def ranks(*world_sizes):
    """Run the decorated body on every rank, once for each of `world_sizes`. Its parameters may be parametrized.

    What runs on two ranks runs on more of them among the slow tests.
    """
    sizes = [
        pytest.param(size, marks=pytest.mark.slow if size > 2 and 2 in world_sizes else ()) for size in world_sizes
    ]

    def decorate(body):
        world = inspect.Parameter("world_size", inspect.Parameter.KEYWORD_ONLY)

        @pytest.mark.parametrize("world_size", sizes, ids=lambda size: f"world{size}")
        @functools.wraps(body)
        def test(**kwargs):
            world_size = kwargs.pop("world_size")
            pool = _pools.pop(world_size, None) or _Pool(world_size)
            pool.run(body.__module__, body.__name__, kwargs)  # on failure the pool stays out of _pools
            if pool.crowded:
                pool.kill()
            else:
                _pools[world_size] = pool

        test.__signature__ = inspect.Signature([*inspect.signature(body).parameters.values(), world])
        test.body = body
        return test

    return decorate


def close_pools():
    while _pools:
        _pools.popitem()[1].close()

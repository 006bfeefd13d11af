"""The state of a process that a test must leave as it found it, compared before and after.

`of_test()` is cheap and is compared around each test, `of_file()` costs a tenth of a second and is compared around each
test file; both also in the processes of ranks. They return dictionaries from names, for messages, to values.
"""

import contextlib
import functools
import gc
import logging
import os
import signal
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed.tensor import debug
from torch.nn.modules import module as nn_module
from torch.optim import optimizer as torch_optimizer

TRACKER = "megatron_ext.tensor_parallel._random.process_tracker"
# Globals of these modules hold the state that Megatron-Core, its schedules and its training loop share.
STATE = [
    TRACKER,
    "megatron.core.num_microbatches_calculator",
    "megatron.core.parallel_state",
    "megatron.core.rerun_state_machine",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.moe.moe_utils",
    "megatron.training.global_vars",
]
# The packages whose functions and classes tests replace.
REPLACEABLE = ("megatron.", "torch.distributed", "torch.nn", "torch.optim", "torch.utils.checkpoint", "torch._tensor")
KINDS = {type, types.FunctionType, staticmethod, classmethod, property, functools.partial}
# The packages whose functions may replace others only while a test runs.
OURS = ("megatron_ext", "megatron_on_cpu", "tests", "benchmarks", "examples")
# The packages in which no function of the tests may stay; functions of ours may stay in transformers' tables.
REPLACED_BY_TESTS = ("megatron_ext.", "megatron_on_cpu.", "transformers.")


CLEARS = [  # one function from torch 2.11 on, before it two
    getattr(debug, name)
    for name in (
        ["_clear_sharding_prop_cache"]
        if hasattr(debug, "_clear_sharding_prop_cache")
        else ["_clear_fast_path_sharding_prop_cache", "_clear_python_sharding_prop_cache"]
    )
]


_lasting: set = set()  # the groups that stay for later tests


def cached_with_groups(make: Callable) -> Callable:
    """Decorate a function that makes process groups, so that each is made once in a process, and stays.

    DTensor's cached shardings stay with them; to compute them anew takes a fifth of the time of tests.
    """

    @functools.cache
    def made(*arguments, **options):
        before = groups()
        result = make(*arguments, **options)
        _lasting.update(groups() - before)
        return result

    return made


def of_test() -> dict[str, object]:
    """Return the environment, torch's flags, hooks and handlers, and Megatron's globals."""
    libraries_own = ("PYTEST", "RAY_", "_TORCHINDUCTOR_")
    state: dict[str, object] = {
        f"os.environ[{name!r}]": value for name, value in os.environ.items() if not name.startswith(libraries_own)
    }
    state |= _flags_of_torch()
    state |= {
        "the working directory": os.getcwd(),
        "sys.path": tuple(path for path in sys.path if "site-packages" not in path),  # Ray adds a part of itself
        "sys.meta_path": tuple(map(id, sys.meta_path)),
        "handlers of the root logger": [repr(h) for h in logging.root.handlers if not _of_pytest(h)],
        "handlers of signals": tuple(map(signal.getsignal, (signal.SIGINT, signal.SIGTERM, signal.SIGALRM))),
    }
    state[f"{TRACKER}.Process.tracker"] = id(_tracker())
    for name in STATE:
        if name in sys.modules:
            variables = vars(sys.modules[name])
            state |= {f"{name}.{key}": _value(variables[key]) for key in _reset(variables)}
    return state


def _flags_of_torch() -> dict[str, object]:
    return {
        "torch's default dtype": torch.get_default_dtype(),
        "torch's default device": torch.get_default_device(),
        "torch's threads": torch.get_num_threads(),
        "torch's deterministic mode": torch.get_deterministic_debug_mode(),
        "torch.utils.deterministic.fill_uninitialized_memory": torch.utils.deterministic.fill_uninitialized_memory,
        "torch's gradient mode": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "torch's anomaly mode": torch.is_anomaly_enabled(),
        "torch's autocast": tuple(map(torch.is_autocast_enabled, ("cpu", "cuda"))),
        "torch's precision of products": torch.get_float32_matmul_precision(),
        "torch.backends.cudnn": (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark),
        "torch's function modes": torch._C._len_torch_function_stack(),
        "torch's dispatch modes": torch._C._len_torch_dispatch_stack(),
        "torch's hooks of saved tensors": torch._C._autograd._top_saved_tensors_default_hooks(True) is not None,
        "torch's hooks of all modules": tuple(
            len(hooks)
            for name, hooks in vars(nn_module).items()
            if name.startswith("_global_") and isinstance(hooks, dict)
        ),
        "torch's hooks of all optimizers": (
            len(torch_optimizer._global_optimizer_pre_hooks),
            len(torch_optimizer._global_optimizer_post_hooks),
        ),
        "torch.distributed.is_initialized()": torch.distributed.is_initialized(),
    }


def _of_pytest(handler: logging.Handler) -> bool:
    return type(handler).__module__.startswith("_pytest")


def _reset(variables: dict[str, object]) -> Iterable[str]:
    """Return the names of a module's state, without those that Megatron's own reset function leaves as they are."""
    destroy = getattr(variables.get("destroy_model_parallel"), "__code__", None)
    return (name for name in variables if name.isupper() and (destroy is None or name in destroy.co_names))


def _value(value: object) -> object:
    """Return a value that stays equal as long as `value` does not change; plain values are returned as they are."""
    if isinstance(value, (type(None), bool, int, float, str)):
        return value
    if isinstance(value, (Mapping, list, set)):
        return f"{type(value).__name__} of {len(value)}"
    return bool(value) and type(value).__name__


def of_file() -> dict[str, object]:
    """Return the open files, threads, handlers of loggers, and functions of ours in other packages' modules."""
    state: dict[str, object] = {}
    descriptors = Counter(map(_target, os.listdir("/proc/self/fd"))) if os.path.isdir("/proc/self/fd") else Counter()
    for name in list(descriptors):  # ranks, gloo and stores have some, and matplotlib keeps fonts open
        if name in ("socket", "pipe", "anon_inode", "gone") or name.endswith(".ttf"):
            del descriptors[name]
    state |= {f"open files {target}": count for target, count in descriptors.items()}
    threads = Counter(type(thread).__qualname__ for thread in threading.enumerate())
    for passing in ("TMonitor", "_DummyThread"):  # of tqdm, and threads that Python has not started
        del threads[passing]
    state |= {f"threads of the class {name}": count for name, count in threads.items()}
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith(("megatron", "tests")) and getattr(logger, "handlers", None):
            state[f"handlers of the logger {name}"] = repr(logger.handlers)
    for name, module in list(sys.modules.items()):
        by_tests = name.startswith(REPLACED_BY_TESTS)
        if type(module) is types.ModuleType and (by_tests or name.startswith(REPLACEABLE) or name == "torch"):
            ours = ("tests",) if by_tests else OURS
            values = {key: value for key, value in vars(module).items() if type(value) in KINDS}
            state |= {f"{name}.{key}": _at(value) for key, value in values.items() if _of(ours, value)}
            for kind in [value for value in values.values() if type(value) is type and value.__module__ == name]:
                state |= {f"{name}.{kind.__name__}.{k}": _at(v) for k, v in list(vars(kind).items()) if _of(ours, v)}
    if "megatron_ext.megatron.layer_specs" in sys.modules:
        state.pop("megatron.core.transformer.transformer_block.LayerNormImpl", None)  # replaced by its import
    return state


def new_models() -> dict[str, object]:
    """Return the number of live torch modules by class, without those that an earlier call has counted."""
    gc.collect()
    kinds = Counter(map(type, gc.get_objects()))
    gc.freeze()  # later calls skip these objects
    return {f"models alive of {kind}": n for kind, n in kinds.items() if _is_model(kind)}


def _is_model(kind: type) -> bool:
    return issubclass(kind, torch.nn.Module) and not issubclass(kind, torch.fx.GraphModule)  # of torch.compile's caches


def _of(packages: tuple[str, ...], value: object) -> bool:
    """Tell whether `packages` define the function or class; a function's `__module__` is not trusted."""
    kind = type(value)
    if kind is types.FunctionType:
        return str(value.__globals__.get("__name__")).startswith(packages)
    if kind is type:
        return str(value.__module__).startswith(packages)
    if kind in (staticmethod, classmethod):
        return _of(packages, value.__func__)
    if kind is property:
        return _of(packages, value.fget)
    if kind is functools.partial:
        return _of(packages, value.func)
    return False


def _at(value: object) -> str:
    return f"{getattr(value, '__qualname__', type(value).__name__)} at {id(value):#x}"


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}").split(":")[0]
    except OSError:
        return "gone"


def groups() -> set:
    """Return the process groups that exist."""
    return set(torch.distributed.distributed_c10d._world.pg_map)


def end_groups(but: set) -> None:
    """End all process groups but those in `but` and those that stay: a group has open files, and threads that wake 100
    times a second.

    No rank may use the ended groups any more, or still connect: a group that another rank has ended closes connections.
    """
    made = list(groups() - but - _lasting)
    if not made:
        return
    # DTensor's cached shardings name groups, and the next test's groups have the same names.
    for clear in CLEARS:
        clear()
    for group in made:
        torch.distributed.destroy_process_group(group)
    # gloo ends a group with the last reference to it, and waits for its threads, so all groups end at once.
    group = None
    with ThreadPoolExecutor(len(made)) as pool:
        for _ in range(len(made)):
            pool.submit(made.__delitem__, -1)


class LeftBehind(Exception):
    """An error whose message names the state that has changed."""


# Leftovers that a test may not have caused: of a library's cache or import, a thread that is about to end, the garbage
# collector, and `megatron_on_cpu`, in which Transformer Engine's tests run from their start.
PASSING = (
    *("open files", "threads of", "models alive", "sys.meta_path", "sys.path", "handlers of the root logger"),
    "megatron.core.dist_checkpointing.strategies.filesystem_async._process_memory",
)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """Print leftovers that begin as in `PASSING` on stderr, and raise all others; LEFT_BEHIND=error raises both."""
    try:
        yield
    except LeftBehind as left:
        _, *changes = str(left).splitlines()
        if os.environ.get("LEFT_BEHIND") == "error" or not all(change.startswith(PASSING) for change in changes):
            raise
        print(left, file=sys.stderr)


@contextlib.contextmanager
def nothing_left_by_test() -> Iterator[None]:
    """Raise `LeftBehind` if the test inside the context leaves something behind, unless the test itself fails."""
    before, had_tracker = of_test(), _tracker() is not None
    yield
    if not had_tracker and _tracker() is not None:  # layers make a tracker if there is none
        process = sys.modules[TRACKER].Process
        process.tracker, process.kind = None, type(process.kind)()
    _compare(before, of_test(), "this test")


def _tracker() -> object:
    return sys.modules[TRACKER].Process.tracker if TRACKER in sys.modules else None


_last: dict[str, object] = {}  # the state after the last file


def begin_file() -> None:
    """Record the state before the first file; before another file it is the state after the last one."""
    if not _last:
        new_models()
        _last.update(of_file())


def end_file(on_rank: bool = False) -> None:
    """Raise `LeftBehind` if the file that ends has left something behind.

    Ranks may keep models, since autograd holds the hooks of DistributedDataParallel and FSDP2 for good.
    """
    models = {} if on_rank else new_models()
    before, after = dict(_last), of_file()
    if (
        on_rank and after != before
    ):  # a patched model in a cycle keeps Megatron's functions wrapped until it is collected
        gc.collect()
        after = of_file()
    _last.clear()
    _last.update(after)
    _compare(before, after | models, "a test of this file")


def _compare(before: dict[str, object], after: dict[str, object], who: str) -> None:
    imported = [module for module in STATE if not any(name.startswith(module) for name in before)]
    changed = [
        f"{name}: {before.get(name, 'nothing')!s:.200} became {after.get(name, 'nothing')!s:.200}"
        for name in before | after
        if before.get(name) != after.get(name) and not name.startswith(tuple(imported))
    ]
    if changed:
        raise LeftBehind("\n".join([f"{who} leaves behind", *changed]))

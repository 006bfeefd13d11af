"""Programs as `python` and `torchrun` start them, forked from a process that has torch and Megatron imported.

Those imports take longer than what the programs do. What imports itself matters to is started by `subprocess`.
"""

import atexit
import multiprocessing
import os
import runpy
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import wait
from pathlib import Path
from subprocess import CompletedProcess
from typing import NoReturn

from megatron_ext.distributed.held_port import hold_port
from tests.ranks import _PRELOAD, TIMEOUT_S

ROOT = Path(__file__).parents[1]


def python(*words: str, cwd: Path = ROOT, ranks: int = 0, ignore_warnings: bool = False) -> CompletedProcess:
    """What became of `python WORDS`: a script or `-m MODULE` with its arguments, or `-c CODE`.

    With `ranks` as many processes, with the environment that torchrun gives them; once one fails the others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    port, held = hold_port()
    with held, tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        processes = []
        for rank in range(max(ranks, 1)):
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            world |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
            environment = {name: str(value) for name, value in world.items()} if ranks else {}
            arguments = (list(map(str, words)), str(cwd), environment, str(out), str(err), ignore_warnings)
            processes.append(context.Process(target=_become, args=arguments))
        try:
            for process in processes:
                process.start()
            pending, deadline = list(processes), time.monotonic() + TIMEOUT_S
            while pending and not any(process.exitcode for process in processes):
                assert wait([process.sentinel for process in pending], deadline - time.monotonic()), "it hangs"
                pending = [process for process in pending if process.exitcode is None]
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()
                    process.join()
        code = 1 if ranks and any(process.exitcode for process in processes) else processes[0].exitcode
        return CompletedProcess(words, code, out.read_text(), err.read_text())


def _become(
    words: list[str], cwd: str, environment: dict[str, str], out: str, err: str, ignore_warnings: bool
) -> NoReturn:
    import torch

    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    atexit._clear()  # of what the process before had there
    os.chdir(cwd)
    os.environ.update(environment)
    torch.set_num_threads(1)
    if ignore_warnings:
        warnings.simplefilter("ignore")
    code: object = 0
    try:
        _run(words)
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # as the interpreter itself
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _run(words: list[str]) -> None:
    what, *rest = words
    if what == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), {"__name__": "__main__"})
    elif what == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(what).resolve().parent))
        runpy.run_path(what, run_name="__main__")

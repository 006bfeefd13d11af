"""Programs as `python` and `torchrun` start them, forked from processes that have torch and Megatron imported.

The imports take longer than the programs themselves. `alone` starts programs that must import by themselves.
"""

import atexit
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, NoReturn

from tests.calls import recorded
from tests.held_port import hold_port
from tests.rank_servers import fork
from tests.ranks import TIMEOUT_S

ROOT = Path(__file__).parents[1]


def python(
    *words: str, cwd: Path = ROOT, ranks: int = 0, ignore_warnings: bool = False, interpreted: bool = False
) -> CompletedProcess:
    """Run `python WORDS`: a script or `-m MODULE` with its arguments, or `-c CODE`.

    With `ranks` that many processes run, with the environment of torchrun; once one fails the others are ended.
    `interpreted`: CPU tensors take Triton's kernels.
    """
    port, held = hold_port()
    with held, tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        world = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        environment = dict(os.environ) | {name: str(value) for name, value in world.items() if ranks}
        arguments = (list(map(str, words)), str(cwd), environment, (str(out), str(err)), ignore_warnings)
        processes = fork(max(ranks, 1), _become, *arguments, interpreted=interpreted)
        pending, codes = [process.connection for process in processes], []
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while pending and not any(codes):
                ready = wait(pending, deadline - time.monotonic())
                assert ready, "it hangs"
                codes += [_exit_code(connection) for connection in ready]
                pending = [connection for connection in pending if connection not in ready]
        finally:
            for process in processes:
                if process.connection in pending:
                    process.kill()
        return CompletedProcess(words, 1 if ranks and any(codes) else codes[0], out.read_text(), err.read_text())


def alone(*words: str, **options: Any) -> CompletedProcess:
    """Run `python WORDS` in a new interpreter, and check that its exit status is 0."""
    common: dict[str, Any] = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": TIMEOUT_S}
    done = subprocess.run([sys.executable, *words], **common | options)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def _exit_code(connection: Any) -> int:
    """Return the exit code that a process has sent at its end, or 255 if it was killed."""
    try:
        return connection.recv()
    except EOFError:
        return 255


def _become(
    connection: Connection,
    rank: int,
    words: list[str],
    cwd: str,
    environment: dict[str, str],
    files: tuple[str, str],
    ignore_warnings: bool,
) -> NoReturn:
    import torch

    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    atexit._clear()  # drop functions that were registered before the fork
    os.chdir(cwd)
    os.environ.update(environment)
    if "WORLD_SIZE" in environment:
        os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    torch.set_num_threads(1)
    if ignore_warnings:
        warnings.simplefilter("ignore")
    code: object = 0
    try:
        with recorded():
            _run(words)
    except SystemExit as error:
        code = error.code
        if code is not None and not isinstance(code, int):
            print(code, file=sys.stderr)
            code = 1
    except BaseException:  # print the traceback as the interpreter does
        traceback.print_exc()
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    connection.send(code or 0)
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

"""Processes for test ranks, forked in milliseconds, each from its own interpreter as under torchrun.

Each rank number has a server: a process with its own hash seed (orders of sets differ between ranks, as they do for
users) and its own imports, which take seconds and are made once for a run. Ranks that run Triton's kernels on the CPU
have other servers, since Triton chooses its interpreter at import. Servers are started when they are first needed,
serve all processes of a run (pytest-xdist's workers too), and end with the run.
"""

import contextlib
import fcntl
import importlib.util
import json
import os
import pickle
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

_RUN = "MEGATRON_EXT_TEST_RUN"  # the environment variable that names the run's folder
FOLDER = "MEGATRON_EXT_RANKS_FOLDER"  # the variable that names the run's folder in the environment of the ranks
PRELOAD = [
    # Where Transformer Engine's Python package is installed, all ranks emulate its compiled module.
    *(["tests.on_transformer_engine.preload"] if importlib.util.find_spec("transformer_engine") else []),
    "torch.distributed.tensor",
    "megatron.core.models.gpt",
    "megatron.core.optimizer",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
    "megatron_ext.head",
    "megatron_ext.dtensor",
]
INTERPRETING = ["torch", "triton.language", "triton.runtime.interpreter", "megatron_ext.head.kernels"]
_environment: dict[str, str] = {}
_began: list[int] = []  # the process that began the run


class Child:
    """A process that a server has forked, and a `connection` to it."""

    def __init__(self, connection: Connection):
        self.connection = connection
        self.pid: int = connection.recv()

    def kill(self) -> None:
        """Kill the process, if it has not ended, and close `connection`."""
        self.connection.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def fork(count: int, function: Callable[..., object], *arguments: Any, interpreted: bool = False) -> list[Child]:
    """Start processes that call `function(connection, rank, *arguments)`, `rank` from 0 to `count` - 1, and end.

    `interpreted`: CPU tensors take Triton's kernels in them.
    """
    connections = []
    for rank in range(count):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(_server(rank, interpreted)))
            connections.append(Connection(client.detach()))
        connections[-1].send_bytes(pickle.dumps((function, rank, arguments)))
    return [Child(connection) for connection in connections]


def begin_run() -> None:
    """Begin a run, or take part in the run of the process that has started this one.

    Servers get the present environment, and end when the run's first process ends.
    """
    _environment.update(os.environ)
    if _RUN not in os.environ:
        folder = tempfile.mkdtemp(prefix="ranks_")
        os.environ[_RUN] = folder
        _began.append(os.getpid())
        os.mkfifo(f"{folder}/alive")
        os.open(f"{folder}/alive", os.O_RDWR)  # stays open as long as this process lives


def end_run() -> None:
    if os.getpid() in _began:
        shutil.rmtree(os.environ.pop(_RUN, ""), ignore_errors=True)


def _server(rank: int, interpreted: bool) -> Path:
    """Return the socket's path of the server of `rank`, which is started if it does not run."""
    if _RUN not in os.environ:
        begin_run()
    # A process that interprets kernels may take part in the run of a process that does not, and needs other servers.
    interpreted |= _environment.get("TRITON_INTERPRET") == "1"
    folder = Path(os.environ[_RUN])
    path = folder / f"{'interpreted_' * interpreted}rank{rank}"
    environment = _environment | {"PYTHONHASHSEED": str(rank + 1), FOLDER: str(folder)}
    environment |= {"TRITON_INTERPRET": "1"} if interpreted else {}
    with (folder / "lock").open("w") as lock, socket.socket(socket.AF_UNIX) as listener:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():
            return path
        listener.bind(str(path))
        listener.listen(64)
        alive = os.open(folder / "alive", os.O_RDONLY | os.O_NONBLOCK)
        code = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from tests.rank_servers import serve; "
        subprocess.Popen(
            [sys.executable, "-c", f"{code}serve({listener.fileno()}, {alive})", json.dumps(sys.path)],
            pass_fds=[listener.fileno(), alive],
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run's first process
        )
        os.close(alive)
    return path


def serve(listener_fd: int, alive: int) -> None:
    """Fork a child for each connection, as long as a process holds the other end of `alive`."""
    for name in INTERPRETING if os.environ.get("TRITON_INTERPRET") == "1" else PRELOAD:
        # A machine may lack some modules; the tests that need them will say so.
        with contextlib.suppress(Exception), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the children
    with socket.socket(fileno=listener_fd) as listener:
        while alive not in select.select([listener, alive], [], [])[0]:
            connection, _ = listener.accept()
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.close()
                os.close(alive)
                _become_child(Connection(connection.detach()))
            connection.close()
    os.killpg(0, signal.SIGKILL)  # this process and its children: a run that was killed leaves ranks that wait


def _become_child(connection: Connection) -> NoReturn:
    code = 1
    try:
        connection.send(os.getpid())
        function, rank, arguments = pickle.loads(connection.recv_bytes())
        function(connection, rank, *arguments)
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

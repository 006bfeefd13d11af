"""The start of an example: checks of its arguments and folders before the run, its ranks, and a Ctrl-C that works at
once, whatever the process is waiting for."""

import errno
import multiprocessing
import os
import signal
import sys
import threading
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

import torch

_ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}


def take_no_arguments(documentation: str | None) -> None:
    """Print the example's documentation for `--help`, and refuse other arguments."""
    ArgumentParser(description=documentation, formatter_class=RawDescriptionHelpFormatter).parse_args()


def flag(name: str) -> str:
    """Return the command line's flag for the argument `name`."""
    return "--" + name.replace("_", "-")


def check_files(data: list[str] | None) -> None:
    """Raise ValueError if `--data` names something that is not a file."""
    for file in data or []:
        if not Path(file).is_file():
            raise ValueError(f"--data names {file!r}, which is not a file")


def check_writable(**paths: str | os.PathLike | None) -> None:
    """Make each path a folder if it is none, and check that it can be written; None: nothing will be written.

    Raises:
        ValueError: the path is no folder, or this process may not write there; the keyword names the flag.
    """
    for name, path in paths.items():
        if path is None:
            continue
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            where, reason = f"{flag(name)} writes to {os.fspath(path)!r}", error.strerror
            raise ValueError(f"{where}: {reason}; give a folder that can be written") from None


def ranks(*allowed: int) -> int:
    """Return the number of ranks that torchrun started, or 1; end the program if `allowed` is given and lacks it."""
    os.environ.update(_ALONE | os.environ)
    started = int(os.environ["WORLD_SIZE"])
    if allowed and started not in allowed:
        fitting = " or ".join(map(str, allowed))
        sys.exit(
            f"{sys.argv[0]}: started on {started} ranks, runs on {fitting}: torchrun --nproc-per-node {allowed[-1]}"
        )
    return started


def has_gpus() -> bool:
    """Tell whether this machine has a GPU for each of its ranks."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= torch.cuda.device_count()


def end_on_interrupt() -> None:
    """Let SIGINT end this process and its children of `multiprocessing`, at once and silently.

    Python's own handler waits for the main thread, which may be waiting in a collective for a rank that is gone. Here a
    thread waits for the signal. Call it before any other thread starts, so that all threads inherit the blocked signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    threading.Thread(target=_wait_for_interrupt, daemon=True).start()


def _wait_for_interrupt() -> None:
    signal.sigwait([signal.SIGINT])
    for child in multiprocessing.active_children():  # Megatron's checkpoint writers ignore the signal
        child.kill()
    os._exit(128 + signal.SIGINT)

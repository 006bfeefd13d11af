"""Start of an example: its arguments and folders, looked at first (at a run's end it would be too late), its ranks, and
Ctrl-C that works at once, whatever the process is waiting for."""

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
    """Print the example's documentation where `--help` asks for it, and refuse other arguments."""
    ArgumentParser(description=documentation, formatter_class=RawDescriptionHelpFormatter).parse_args()


def flag(name: str) -> str:
    """Return the flag of the command line for a value of this name."""
    return "--" + name.replace("_", "-")


def check_files(data: list[str] | None) -> None:
    """Raises ValueError: `--data` names what is no file."""
    for file in data or []:
        if not Path(file).is_file():
            raise ValueError(f"--data names {file!r}, which is not a file")


def check_writable(**paths: str | os.PathLike | None) -> None:
    """Each path, named by its flag, is a folder that can be written, or is made one. None: nothing will be written.

    Raises:
        ValueError: the path is something else, or this process may not write there.
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
    """Count the ranks that torchrun started; 1 without torchrun. Ends the program where `allowed` lacks that number."""
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
    """Have SIGINT end this process and those that it started through `multiprocessing`, at once and silently.

    Python's own handler waits for the main thread, which may be waiting in a collective for a rank that is gone. Here a
    thread waits for the signal. To be called before any other thread starts, which then inherits the blocked signal.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    threading.Thread(target=_wait_for_interrupt, daemon=True).start()


def _wait_for_interrupt() -> None:
    signal.sigwait([signal.SIGINT])
    for child in multiprocessing.active_children():  # Megatron's checkpoint writers, which ignore the signal
        child.kill()
    os._exit(128 + signal.SIGINT)

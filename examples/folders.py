"""Files and folders that a run is given, looked at before it starts: at its end it would be too late."""

import errno
import os
from pathlib import Path


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
        reason = None
        try:
            Path(path).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror
        if reason is None and not os.access(path, os.W_OK):
            reason = os.strerror(errno.EACCES)
        if reason is not None:
            raise ValueError(f"{flag(name)} writes to {os.fspath(path)!r}: {reason}; give a folder that can be written")

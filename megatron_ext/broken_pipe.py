"""A quiet end for a program whose output is no longer read, as in `megatron-ext memory ... | head`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def until_the_reader_leaves() -> Iterator[None]:
    """End the program with exit code 1, and no traceback, when it prints to a pipe that is no longer read."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes the rest at exit
        raise SystemExit(1) from None

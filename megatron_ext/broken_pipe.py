"""The end of a program whose output nobody reads any more, as in `megatron-ext memory ... | head`."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def until_the_reader_leaves() -> Iterator[None]:
    """End the program with exit code 1, and no traceback, once what it prints goes to a pipe that nobody reads."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python writes what is left when it exits
        raise SystemExit(1) from None

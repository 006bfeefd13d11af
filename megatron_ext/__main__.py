"""`python -m megatron_ext`, or `megatron-ext`: the package's version, and its programs by name."""

import argparse
import sys
from collections.abc import Callable

import megatron_ext
from megatron_ext import compare, doctor, run
from megatron_ext.memory import __main__ as memory

_PROGRAMS: dict[str, Callable[[list[str]], int | None]] = {
    "compare": compare.main,
    "doctor": doctor.main,
    "memory": memory.main,
    "run": run.main,
}


def main(argv: list[str] | None = None) -> None:
    """Run the program that the first argument names, with the other arguments; None: the process's arguments."""
    parser = argparse.ArgumentParser(
        prog="megatron-ext",
        description="Run a program of megatron_ext.",
        epilog="megatron-ext PROGRAM --help tells more",
    )
    parser.add_argument("--version", action="version", version=f"megatron_ext {megatron_ext.__version__}")
    parser.add_argument(
        "program",
        choices=_PROGRAMS,
        help="compare: a script's first steps, stock and ours; doctor: what is installed and active; "
        "memory: bytes of the lm head; run: a Megatron script",
    )
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's arguments")
    options = parser.parse_args(argv)
    found = _PROGRAMS[options.program](options.arguments)
    if found is not None:
        sys.exit(found)


if __name__ == "__main__":
    main()

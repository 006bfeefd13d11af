"""Flags without which an unmodified Megatron script asks for kernels that a CPU does not have.

The script's parser reads these flags before the user's arguments, so that a contrary flag of the user takes precedence.
`sys.argv` is not changed.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest import mock

# Flag: (its value, the kernel that runs without the flag).
_FLAGS = {
    "--transformer-impl": ("local", "Transformer Engine's layers"),
    "--no-persist-layer-norm": ("", "Apex's layer norm"),
    "--no-gradient-accumulation-fusion": ("", "Apex's addition of weight gradients"),
    "--no-masked-softmax-fusion": ("", "Megatron's CUDA softmax"),
    "--no-rope-fusion": ("", "Transformer Engine's rotary embedding"),
}


@contextmanager
def flags_for_cpu(tell: Callable[[str], None]) -> Iterator[None]:
    """Add these flags to Megatron's own parser inside the context; `tell` receives a sentence on the added flags, and
    one for each that the user's arguments overrule."""
    parse, tell = argparse.ArgumentParser.parse_known_args, functools.cache(tell)  # Megatron parses several times

    def parse_known_args(
        parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        given = sys.argv[1:] if args is None else list(args)
        if all(flag in parser._option_string_actions for flag in _FLAGS):
            given = [*_added(given, tell), *given]
            return parse(parser, given, namespace)
        return parse(parser, args, namespace)

    with mock.patch.object(argparse.ArgumentParser, "parse_known_args", parse_known_args):
        yield


def _added(given: list[str], tell: Callable[[str], None]) -> list[str]:
    """Return the flags, with values, for which the user has given neither the flag nor its contrary."""
    words = [part for word in given for part in word.split("=", 1)]
    following = dict(pairwise([*words, ""]))
    added: list[str] = []
    for flag, (value, kernel) in _FLAGS.items():
        contrary = flag if value else flag.replace("--no-", "--")
        if contrary in following and (not value or following[flag] != value):
            own = f"{contrary} {following[flag]}" if value else contrary
            tell(f"the script's own {own} stays, and wants {kernel}, which a CPU lacks; leave it out on a CPU")
        elif flag not in following:
            added += [flag, value] if value else [flag]
    if added:
        tell(f"on a CPU the script gets {' '.join(added)} as well")
    return added

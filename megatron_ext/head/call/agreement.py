"""Agreement of the ranks of a call, as two numbers that travel in the exchange: its options and its labels.

Statistics of ranks that disagree would be combined into wrong numbers without a word. The numbers are checksums below
2^23, exact in fp32, odd, and alike in every process; 0 stands for one that is not known.

Legend: T tokens, N ids of them.
"""

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from megatron_ext.distributed import collectives
from megatron_ext.distributed.groups import Group
from megatron_ext.numerics.readable_values import has_values, on_host

_MULTIPLIER = 0x9E3779B97F4A7C15 - (1 << 64)  # of Fibonacci hashing (Knuth, The Art of Computer Programming 3)
_MASK = (1 << 23) - 1
_more: ContextVar[str] = ContextVar("_more", default="")


def in_words(options: dict[str, Any]) -> str:
    """Names and values; of equal numbers the same words."""
    words = []
    for name, value in options.items():
        plain = float(value) if isinstance(value, int) and not isinstance(value, bool) else value
        words.append(f"{name} {plain}")
    return ", ".join(words)


def of_options(words: str) -> int:
    """A number for options in words."""
    return _odd(zlib.crc32((words + _more.get()).encode()))


@contextmanager
def also(words: str) -> Iterator[None]:
    """Calls within must agree on these words, too: a rank that alone has them is told as one of other options is."""
    token = _more.set(_more.get() + words)
    try:
        yield
    finally:
        _more.reset(token)


def of_labels(ids: Sequence[Tensor], places_T: Tensor | None = None) -> Tensor | int:
    """A number for ids `[T]` or `[T, N]`, whatever their order in memory; 0 of none. On CUDA it is int64 without dims.

    `places_T`: where the tokens are in the order that all ranks know, if they are in another one.
    """
    sums: list[Tensor] = []
    for x in ids:
        places = torch.arange(x.shape[0], device=x.device) if places_T is None or not len(x) else places_T
        if x.dim() == 2:
            places = places.unsqueeze(1) * x.shape[1] + torch.arange(x.shape[1], device=x.device)
        sums.append(scrambled(torch.add(x, places, alpha=_MULTIPLIER)).sum())
    if not sums:
        return 0
    total = reduce(torch.add, sums)
    return _odd(total.item() if on_host(total) else total)


def scrambled(x: Tensor) -> Tensor:
    """int64 numbers as others; only the upper half, which depends on all bits below it."""
    mixed = x * _MULTIPLIER
    mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIER
    return mixed >> 32


def gathered(numbers: Sequence[int], words: str, ids: Sequence[Tensor], group: Group, device: torch.device) -> Tensor:
    """Every rank's `numbers`, and behind them those of its options and its labels, int64 `[R, N + 2]`.

    Communicates: 1 all-gather.
    """
    own = torch.zeros(1, len(numbers) + 2, dtype=torch.int64, device=device)
    for i, number in enumerate(numbers):
        own[:, i] = number
    if has_values(own):
        own[:, -2], own[:, -1] = of_options(words), of_labels(ids)
    return collectives.all_gather(own, group)


def _odd(checksum: Any) -> Any:
    return (checksum & _MASK) | 1

"""What the ranks of a call must have in common, as two numbers that travel in the exchange: its options and its labels.

Statistics of ranks that disagree would be combined into wrong numbers without a word. The numbers are checksums below
2^23, exact in fp32, odd, and alike in every process; 0 stands for one that is not known.

Legend: T tokens, N ids of them.
"""

import dataclasses
import zlib
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.engine.options import HeadOptions

_COMPUTED = ("label_smoothing", "smooth_others", "z_loss", "softcap", "temperature", "ignore_index", "entropy", "hits")
_MULTIPLIER, _BITS = (
    0x9E3779B97F4A7C15 - (1 << 64),
    22,
)  # of Fibonacci hashing (Knuth, The Art of Computer Programming 3)


def options_in_words(options: HeadOptions, **more: Any) -> str:
    """The options that all ranks must share, and `more` of a read-out's."""
    chosen = {name: getattr(options, name) for name in _COMPUTED} | more
    if options.hidden_layout == "sequence":  # whether backward gathers the hidden states follows from it
        chosen["cache=1"] = options.cache == 1
    return ", ".join(f"{name} {_plain(value)}" for name, value in chosen.items())


def of_options(options: HeadOptions, **more: Any) -> int:
    """A number for them."""
    return _odd(zlib.crc32(options_in_words(options, **more).encode()))


def of_labels(ids: Tensor, places_T: Tensor | None = None) -> Tensor:
    """A number, int64 without dims, for ids `[T]` or `[T, N]`, whatever their order in memory.

    `places_T`: where the tokens are in the order that all ranks know, if they are in another one.
    """
    places = torch.arange(ids.shape[0], device=ids.device)
    if places_T is not None and len(ids):
        places = places_T
    if ids.dim() == 2:
        places = places.unsqueeze(1) * ids.shape[1] + torch.arange(ids.shape[1], device=ids.device)
    mixed = (ids + places * _MULTIPLIER) * _MULTIPLIER
    mixed = (mixed ^ (mixed >> 29)) * _MULTIPLIER
    return _odd((mixed ^ (mixed >> 32)).sum())


def scalars(read_out: Any) -> dict[str, Any]:
    """The fields of a dataclass that are neither options nor tensors, and its name."""
    fields = {field.name: getattr(read_out, field.name) for field in dataclasses.fields(read_out)}
    chosen = {name: x for name, x in fields.items() if not isinstance(x, HeadOptions | Tensor)}
    return {"of": type(read_out).__name__, **chosen}


def _odd(checksum: Any) -> Any:
    return (checksum & ((1 << _BITS) - 1)) * 2 + 1


def _plain(value: Any) -> str:
    """Of equal numbers the same words."""
    return str(float(value) if isinstance(value, int) and not isinstance(value, bool) else value)

"""Every option of the head in one frozen dataclass, validated when it is made."""

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron_ext.distributed.groups import Group, group_size
from megatron_ext.distributed.vocab import VocabShard

Layout = Literal["replicated", "sequence"]
Reduction = Literal["none", "sum", "mean"]
Cache = float | Literal["bounded", "auto"]

LEAST_BYTES = 1024  # as `cache`: what is between 1 and this is meant as a percentage or a factor, and is neither


@dataclass(frozen=True)
class HeadOptions:
    """What one call of the head computes, and how. All ranks of `group` hold equal options, `vocab` aside.

    Attributes:
        group: the ranks that share the vocabulary; None: not sharded.
        vocab: this rank's columns.
        hidden_layout: "replicated": every rank holds all tokens; "sequence": a slice of dim 0.
        ignore_index: label of tokens that get 0 and no gradient.
        label_smoothing: e of `(1 - e) nll - e mean_log_prob`, in [0, 1).
        smooth_others: e is the mass of the other tokens alone: `e V / (V - 1)` stands for e.
        z_loss: factor of `lse^2` in the loss.
        z_apart: the loss is given without `z_loss lse^2`, which is a read-out of its own; the gradient is with it.
        softcap: logits become `softcap * tanh(logits / softcap)`; None: they stay.
        temperature: logits are divided by it, after the softcap.
        entropy, hits: further per-token read-outs: the entropy, and whether the label has the largest logit.
        cache: fraction (0 to 1) of the columns whose exponentials are kept for backward; from 1024 on: bytes; "bounded"
            or "auto": see `chunk_sizes.cached_columns`.
        chunk_tokens: tokens per chunk; None: chosen from the sizes.
        fuse_main_grad: the weight gradient is added into `weight.main_grad`.
    """

    group: Group
    vocab: VocabShard
    hidden_layout: Layout = "replicated"
    ignore_index: int = -100
    label_smoothing: float = 0.0
    smooth_others: bool = False
    z_loss: float = 0.0
    z_apart: bool = False
    softcap: float | None = None
    temperature: float = 1.0
    entropy: bool = False
    hits: bool = False
    cache: Cache = "bounded"
    chunk_tokens: int | None = None
    fuse_main_grad: bool = False

    def __post_init__(self) -> None:
        one_of("hidden_layout", self.hidden_layout, get_args(Layout))
        if isinstance(self.ignore_index, bool) or not isinstance(self.ignore_index, int):
            raise ValueError(f"ignore_index is {self.ignore_index!r}: it must be an int; PyTorch's default is -100")
        _number("label_smoothing", self.label_smoothing, "in [0, 1)", lambda e: 0 <= e < 1, "0.0 turns it off")
        _number("z_loss", self.z_loss, "at least 0 and finite", _at_least_0, "0.0 turns it off")
        check_temperature(self.temperature)
        if self.softcap is not None:
            _number("softcap", self.softcap, "above 0 and finite", _positive, "None turns it off")
        if self.cache not in ("bounded", "auto"):
            rule = f"in [0, 1], a fraction of the columns, or at least {LEAST_BYTES}, bytes"
            _number("cache", self.cache, rule, _fraction_or_bytes, '"bounded" goes by the sizes, "auto" by free memory')
        if self.chunk_tokens is not None and (_not_an_int(self.chunk_tokens) or self.chunk_tokens < 1):
            raise ValueError(
                f"chunk_tokens is {self.chunk_tokens!r}: it must be a positive int; None lets the head choose"
            )

    @property
    def ranks(self) -> int:
        """Number of ranks that share the vocabulary."""
        return group_size(self.group)


def one_of(argument: str, value: Any, allowed: tuple[str, ...]) -> None:
    """Raises ValueError unless `value` is one of the names in `allowed`."""
    if value not in allowed:
        raise ValueError(f"{argument} is {value!r}: it must be one of {', '.join(map(repr, allowed))}")


def check_temperature(value: Any) -> None:
    """Raises ValueError unless logits can be divided by it."""
    _number("temperature", value, "above 0 and finite", _positive, "1.0 leaves the logits as they are")


def _number(argument: str, value: Any, rule: str, holds: Any, fix: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not holds(value):
        raise ValueError(f"{argument} is {value!r}: it must be a number {rule}; {fix}")


def _not_an_int(value: Any) -> bool:
    return isinstance(value, bool) or not isinstance(value, int)


def _positive(value: float) -> bool:
    return 0 < value < math.inf


def _at_least_0(value: float) -> bool:
    return 0 <= value < math.inf


def _fraction_or_bytes(value: float) -> bool:
    return 0 <= value <= 1 or LEAST_BYTES <= value < math.inf

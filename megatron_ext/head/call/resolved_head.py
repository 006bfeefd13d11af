"""`ResolvedHead`: a head in one call, with its group and shard found, and which sums over rows are wanted."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group
from megatron_ext.distributed.vocab import VocabShard

Bits = Literal["fast", "batch", "tensor_parallel"]
Cache = float | Literal["bounded", "auto"]


@dataclass(frozen=True)
class ResolvedHead:
    """The part of a head that every pass, exchange and gradient of one call takes; no tensors of the caller's.

    `LmHead.resolved` and `Logits.resolved` make it. On all ranks of `group` they are equal, `vocab` and `chosen` aside.

    Attributes:
        group: the ranks that share the vocabulary; None: not sharded.
        vocab: this rank's columns.
        softcap, temperature, logit_scale: logits become `softcap * tanh(logit_scale * logits / softcap) / temperature`;
            softcap None: no cap.
        chunk_tokens: tokens per chunk; None: chosen from the sizes.
        cache: fraction (0 to 1) of the columns whose exponentials are kept for backward; from 1024 on: bytes; "bounded"
            or "auto": see `chunk_sizes.cached_columns`.
        fuse_main_grad: the weight gradient is added into `weight.main_grad`.
        largest: what logits reach that a softcap bounds, over the temperature where that makes them smaller; None:
            no softcap.
        bits: "fast", "batch" or "tensor_parallel": which other numbers a token's bits may depend on, see `LmHead`.
        mean, expected, hits: which sums the pass over rows takes beside the softmax's own: of the logits, of the
            logits times their probabilities, and whether the label has the largest logit.
        rounds: logits are rounded to the hidden states' 16 bits before anything else is done with them.
        chosen: int64, rising: the columns of this rank whose logits are made; None: all.
        leaf: which of this rank's leaves `vocab` is; None: it is all of this rank's columns.
        in_slices: each rank has its slice of dim 0 of the hidden states.
        guessed: the caller gave no `vocab`, and equal shards are assumed.
    """

    group: Group
    vocab: VocabShard
    softcap: float | None = None
    temperature: float = 1.0
    chunk_tokens: int | None = None
    cache: Cache = "bounded"
    fuse_main_grad: bool = False
    mean: bool = False
    expected: bool = False
    hits: bool = False
    logit_scale: float = 1.0
    largest: float | None = None
    bits: Bits = "fast"
    rounds: bool = False
    chosen: Tensor | None = None
    leaf: int | None = None
    in_slices: bool = False
    guessed: bool = False

    @property
    def fixed(self) -> bool:
        """Return whether every sum has one order, which other tokens do not change."""
        return self.bits != "fast"

    @property
    def counted(self) -> int:
        """Count the columns, from the first one on, of the logits that are made and count."""
        return self.vocab.counted if self.chosen is None else self.chosen.shape[0]

    def sums(self, counted: int) -> dict[str, Any]:
        """The options of `row_statistics`, of logits of which `counted` columns count."""
        return {
            "counted": counted,
            "softcap": self.softcap,
            "temperature": self.temperature,
            "with_mean": self.mean,
            "with_entropy": self.expected,
            "with_hits": self.hits,
        }

    def place(self, columns: Tensor) -> Tensor:
        """Return the places of `columns` of this rank's shard among the logits that are made."""
        return columns if self.chosen is None else torch.searchsorted(self.chosen, columns)

    def without_scale(self) -> "ResolvedHead":
        """This head, its scale in softcap and temperature: `c tanh(s z / c) = s (c / s) tanh(z / (c / s))`."""
        if self.logit_scale == 1.0:
            return self
        softcap = None if self.softcap is None else self.softcap / self.logit_scale
        temperature = self.temperature / self.logit_scale
        return replace(self, softcap=softcap, temperature=temperature, logit_scale=1.0)

    def without_bends(self) -> "ResolvedHead":
        """Return this head for logits that have passed scale and softcap already."""
        bent = self.softcap is not None or self.logit_scale != 1.0
        return replace(self, softcap=None, logit_scale=1.0) if bent else self

    @property
    def ranks(self) -> int:
        """Number of ranks that share the vocabulary."""
        return 1 if self.group is None else self.group.size()

"""What losses from hidden states share: the head's options, and the way from hidden states to log-probabilities.

Legend: B rows, S positions, D hidden size, V vocabulary, R ranks of `tp_group`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from numbers import Real
from typing import Any, NoReturn

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, group_size, tensor_parallel_group
from megatron_ext.distributed.vocab import VocabShard
from megatron_ext.head import linear_log_probs
from megatron_ext.head.checks import check_floating
from megatron_ext.head.options import Cache, Layout
from megatron_ext.head.rows import accumulation_dtype

Metrics = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class FromHidden:
    """How a head makes log-probabilities: options of `megatron_ext.linear_log_probs`, which says more of each.

    Attributes:
        tp_group: the ranks that share the vocabulary; None: Megatron's tensor-parallel group, or no sharding.
        hidden_layout: "sequence": each rank has its slice of dim 0 of the hidden states.
        vocab: this rank's columns; None: equal shards.
        temperature, softcap: of the logits.
        chunk_tokens: tokens whose logits exist at a time; None: chosen from the sizes.
        gradient_accumulation_fusion: weight gradients go straight into `weight.main_grad`.
    """

    tp_group: Group = None
    hidden_layout: Layout = "replicated"
    vocab: VocabShard | None = None
    temperature: float = 1.0
    chunk_tokens: int | None = None
    gradient_accumulation_fusion: bool = False

    def _head(self) -> dict[str, Any]:
        return {
            "tp_group": self.tp_group,
            "hidden_layout": self.hidden_layout,
            "vocab": self.vocab,
            "temperature": self.temperature,
            "chunk_tokens": self.chunk_tokens,
            "gradient_accumulation_fusion": self.gradient_accumulation_fusion,
        }

    def _token_shape(self, hidden: Tensor) -> torch.Size:
        """That of one number for each token: of all ranks', with the sequence layout."""
        check_floating("hidden", hidden)
        shape = hidden.shape[:-1]
        slices = group_size(tensor_parallel_group(self.tp_group)) if self.hidden_layout == "sequence" else 1
        return torch.Size((shape[0] * slices, *shape[1:])) if len(shape) else shape


@dataclass(frozen=True, kw_only=True)
class LogProbLoss(FromHidden, ABC):
    """A loss that reads the log-probabilities of labels, in rows: `loss(hidden, weight, labels, ...)` or
    `loss.from_log_probs(log_probs, ...)`, which take the same further arguments.

    Attributes:
        sequence_first: labels and all else per token are `[S, B]`, hidden states `[S, B, D]` (`[S/R, B, D]`), as
            Megatron has them; False: `[B, S]` and `[B, S, D]` (`[B/R, S, D]`).
        ignore_index: a label of tokens that do not count.
        softcap: logits become `softcap * tanh(logits / softcap)`, before the temperature.
        cache, skip_ignored: what the head keeps for backward; leave out tokens that do not count.

    Communicates what one call of `linear_log_probs` does: forward 1 collective, backward 1, with the sequence layout 2
    and 2; `from_log_probs` nothing.
    """

    sequence_first: bool = False
    ignore_index: int = -100
    softcap: float | None = None
    cache: Cache = "auto"
    skip_ignored: bool = False

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, *given: Any, mask: Tensor | None = None, **others: Any
    ) -> tuple[Tensor, Metrics]:
        """The loss, a scalar, and metrics, 0-d tensors without gradient; on every rank alike.

        Args:
            hidden, weight: of the head; see `linear_log_probs`.
            labels: the token that each position predicts: shifted already.
            mask: which tokens count, or weights of them; None: all whose label is not `ignore_index`.
            given, others: what `from_log_probs` takes beside log-probabilities and mask: by position only what comes
                before its mask (`advantages`, `desirable`), by keyword all else.

        Raises:
            ValueError: shapes that do not fit; what the head refuses. On every rank of `tp_group`, also what one of
                them alone is given, but for labels of another shape, and for a mask of another shape with
                `skip_ignored`: the ranks would not agree on how many tokens there are.
        """
        fault = fault_of(self._check, labels.shape, *given, mask=mask, **others)
        if mask is None or (isinstance(mask, Tensor) and mask.shape == labels.shape):
            mask = _float(labels != self.ignore_index, mask)

        def head(own: Tensor) -> Any:
            return linear_log_probs(
                hidden,
                own,
                labels,
                **self._head(),
                ignore_index=self.ignore_index,
                softcap=self.softcap,
                cache=self.cache,
                skip_ignored=self.skip_ignored,
                loss_mask=mask if self.skip_ignored else None,
            )

        if fault is not None:
            refuse(fault, head, weight)
        return self.from_log_probs(head(weight), *given, mask=mask, **others)

    @abstractmethod
    def from_log_probs(self, log_probs: Tensor, *given: Any, **others: Any) -> tuple[Tensor, Metrics]:
        """The loss from log-probabilities of the labels, the shape of these."""

    @abstractmethod
    def _check(self, shape: torch.Size, *given: Any, **others: Any) -> None:
        """Raises ValueError unless the arguments of `from_log_probs` fit labels of this shape."""

    def _rows(self, x: Tensor) -> Tensor:
        """`[B, S]`, of 16-bit numbers in fp32."""
        x = widened(x)
        return x.t() if self.sequence_first and x.dim() == 2 else x

    def _inputs(self, log_probs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and weights of tokens, 1 without a mask, `[B, S]`."""
        log_probs_BS = self._rows(log_probs)
        return log_probs_BS, torch.ones_like(log_probs_BS) if mask is None else self._rows(mask).to(log_probs_BS.dtype)


def fault_of(check: Callable[..., None], *args: Any, **kwargs: Any) -> ValueError | None:
    """What `check` raises of these arguments."""
    try:
        check(*args, **kwargs)
    except ValueError as fault:
        return fault
    return None


def refuse(fault: ValueError, head: Callable[[Tensor], Any], columns: Tensor) -> NoReturn:
    """Raises `fault` on this rank, and on those of the group what the head says of a rank that refused its arguments.

    `head(columns)` is the call that they are in, of this rank's weight `[V/R, D]` or logits `[..., V/R]`. With one of
    no width instead the head tells them, in the exchange that they wait in.
    """
    with suppress(ValueError):
        head(columns[..., :0])
    raise fault from None


def _float(kept: Tensor, mask: Tensor | None) -> Tensor:
    """fp32 weights of tokens."""
    return kept.float() if mask is None else mask.float().where(kept, 0.0)


def widened(x: Tensor) -> Tensor:
    """In fp32, or fp64 where it is that: sums of 16-bit log-probabilities lose their digits."""
    return x.to(accumulation_dtype(x.dtype))


def check_rows(shape: torch.Size) -> None:
    """Raises ValueError unless tokens lie in rows."""
    if len(shape) != 2:
        raise ValueError(
            f"labels (log_probs) have shape {tuple(shape)}: the loss is one of rows: they must be 2-D; unflatten them"
        )


def check_per_token(shape: torch.Size, **tensors: Tensor | None) -> None:
    """Raises ValueError unless all that are given have the shape of the labels."""
    for name, x in tensors.items():
        if x is not None and (not isinstance(x, Tensor) or x.shape != shape):
            found = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(f"{name} is {found}: it must be a tensor {tuple(shape)}, a number for each label")


def check_number(
    name: str, value: Any, rule: str, holds: Callable[[float], bool] = lambda x: x == x, optional: bool = False
) -> None:
    """Raises ValueError unless `value` is a number for which `holds` is true, or, where `optional`, None."""
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, Real) or not holds(float(value)):
        raise ValueError(f"{name} is {value!r}: it must be {rule}{', or None' * optional}")


def at_least_0(x: float) -> bool:
    return x >= 0


def above_0(x: float) -> bool:
    return x > 0

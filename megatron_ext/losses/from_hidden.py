"""Base of losses from hidden states: the head's options, and the way from hidden states to log-probabilities.

Legend: B rows, S positions, D hidden size, V vocabulary, R ranks of `tp_group`.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from megatron_ext.distributed.groups import Group, VocabShard, group_size, tensor_parallel_group
from megatron_ext.head import LmHead, LogProbs
from megatron_ext.head.checks import Bits, Cache, HiddenLayout, check_floating, token_bound
from megatron_ext.head.layer_facts import with_options
from megatron_ext.losses.checks import (
    check_rows,
    check_tensor,
    count_fault,
    first_fault,
    per_token_fault,
    raise_if_any,
)
from megatron_ext.numerics.tensors import accumulation_dtype

Metrics = dict[str, Tensor]
# Arguments of `from_log_probs`: those with a number for each label, and those that divide sums.
_PER_TOKEN = ("mask", "old_log_probs", "reference_log_probs", "sampling_log_probs")
_COUNTS = ("count", "sft_count")


class LogProbLossInputs(TypedDict, total=False):
    """Keywords of all losses from hidden states, beside the mask, for completion and type checkers."""

    advantages: Tensor
    desirable: Tensor
    old_log_probs: Tensor | None
    reference_log_probs: Tensor | None
    sampling_log_probs: Tensor | None
    kl: Tensor | float
    count: Tensor | float | None
    sft_count: Tensor | float | None


@dataclass(frozen=True, kw_only=True)
class FromHidden:
    """Options of the head that computes log-probabilities, as of `megatron_ext.linear_log_probs`. For all options of a
    head pass an `LmHead` in place of the weight. An option of the loss that is not None takes effect if the `LmHead`
    has that option's default; otherwise the two must be equal.

    Attributes:
        tp_group: the ranks that share the vocabulary; None: Megatron's tensor-parallel group, or no sharding.
        hidden_layout: "sequence": each rank has its slice of dim 0 of the hidden states; None: the head's, or whole.
        vocab: this rank's columns; None: equal shards.
        temperature: divides the logits; None: the head's, or 1. `from_log_probs` takes log-probabilities of logits that
            are divided already.
        chunk_tokens: tokens whose logits exist at a time; None: chosen from the sizes.
        gradient_accumulation_fusion: weight gradients go straight into `weight.main_grad`.
        bits: the conditions under which results keep their bits, see `LmHead`; None: by Megatron's
            `batch_invariant_mode`.
        skip_ignored: leave out tokens that do not count; an int bounds those that do. See `linear_cross_entropy`.
        logit_dtype: the hidden states' 16-bit dtype: logits are rounded to it, as in inference engines; None: fp32.
    """

    tp_group: Group = None
    hidden_layout: HiddenLayout | None = None
    vocab: VocabShard | None = None
    temperature: float | None = None
    chunk_tokens: int | None = None
    gradient_accumulation_fusion: bool | None = None
    bits: Bits | None = None
    skip_ignored: bool | int = False
    logit_dtype: torch.dtype | None = None

    def _head(self, weight: Tensor | LmHead, **more: Any) -> LmHead:
        """Make the head of a weight `[V/R, D]`, or of an `LmHead`, with these options."""
        options = {name: getattr(self, name) for name in _OF_THE_HEAD} | more
        options = {name: value for name, value in options.items() if value is not None}
        if isinstance(weight, LmHead):
            return with_options(weight, options, "the loss", "the LmHead")
        check_tensor("weight", weight, "a tensor, this rank's [V/R, D]; of a layer pass LmHead.of(layer)")
        return LmHead(weight, **options)

    def _only(self, counts: Tensor | None) -> dict[str, Any]:
        """Return the keywords with which `LmHead.read` leaves out tokens that do not count, if `skip_ignored`."""
        if not self.skip_ignored or counts is None:
            return {}
        return {"counts": counts, "at_most": token_bound(self.skip_ignored)}


_OF_THE_HEAD = tuple(field.name for field in fields(FromHidden) if field.name != "skip_ignored")


def token_shape(hidden: Tensor, head: LmHead) -> torch.Size:
    """Return the shape of one number for each token that `head` reads; in the sequence layout for all ranks' tokens."""
    check_floating("hidden", hidden)
    shape = hidden.shape[:-1]
    slices = group_size(tensor_parallel_group(head.tp_group)) if head.hidden_layout == "sequence" else 1
    return torch.Size((shape[0] * slices, *shape[1:])) if len(shape) else shape


@dataclass(frozen=True, kw_only=True)
class LogProbLoss(FromHidden, ABC):
    """A loss that reads the log-probabilities of labels, in rows: `loss(hidden, weight, labels, ...)` or
    `loss.from_log_probs(log_probs, ...)`, which take the same further arguments.

    Attributes:
        sequence_first: labels and all else per token are `[S, B]`, hidden states `[S, B, D]` (`[S/R, B, D]`), as
            Megatron has them; False: `[B, S]` and `[B, S, D]` (`[B/R, S, D]`).
        ignore_index: a label of tokens that do not count.
        cache: what the head keeps for backward, see `LmHead`; None: the head's, or "bounded".

    Communicates what one call of `linear_log_probs` does: forward 1 collective, backward 1, with the sequence layout 2
    and 2; `from_log_probs` nothing.
    """

    sequence_first: bool = False
    ignore_index: int = -100
    cache: Cache | None = None

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor | LmHead,
        labels: Tensor,
        *given: Tensor,
        mask: Tensor | None = None,
        **others: Unpack[LogProbLossInputs],
    ) -> tuple[Tensor, Metrics]:
        """Return the loss, a scalar, and metrics, 0-d tensors without gradient; both are equal on all ranks.

        Args:
            hidden, weight: of the head; see `linear_log_probs`. The weight may be an `LmHead`, with which the loss's
                options are merged.
            labels: integer ids of the token that each position predicts, shifted already.
            mask: which tokens count, or their weights; None: all whose label is not `ignore_index`.
            given: arguments of `from_log_probs` that come before its mask: `advantages` of `GRPOLoss`, `desirable` of
                `KTOLoss`; other losses have none.
            others: the other arguments of `from_log_probs`, by keyword, such as `reference_log_probs` of `DPOLoss` and
                `old_log_probs` of `GRPOLoss`.

        Raises:
            ValueError: before anything is communicated, faults that every rank sees: an argument that is missing or of
                another type, labels of a shape that the loss cannot take, options. After the exchange, on every rank of
                `tp_group`, faults that one rank alone may have: a shape that is not the labels', a negative count, what
                the head refuses. One rank's labels of another shape, and with `skip_ignored` its mask of another shape,
                are not detected: the ranks would not agree on the number of tokens.
        """
        check_tensor("labels", labels, "a tensor of integer token ids")
        head = self._head(weight, cache=self.cache)
        fault = self._fault(labels.shape, self._bound(given, mask=mask, **others))
        counts = labels.long() != self.ignore_index
        if mask is None or mask.shape == labels.shape:
            mask = counts.float() if mask is None else mask.float().where(counts, 0.0)
            counts = mask != 0
        read_out = LogProbs(labels, self.ignore_index)
        log_probs = head.read(hidden, read_out, fault=fault, **self._only(counts))
        return self.from_log_probs(log_probs, *given, mask=mask, **others)

    def _bound(self, given: tuple[Tensor, ...], **others: Any) -> dict[str, Any]:
        """Bind the arguments of `from_log_probs` to their names; a TypeError says how the loss is called."""
        signature, name = inspect.signature(self.from_log_probs), type(self).__name__
        try:
            return signature.bind(None, *given, **others).arguments
        except TypeError as fault:
            first, options = list(signature.parameters)[1:], [field.name for field in fields(self)]
            before = first[: first.index("mask")]
            named = [*before, *(f"{x}=" for x in first if x not in before)]
            lines = [f"{name}(...)(hidden, weight, labels, {', '.join(named)})"]
            for unknown in (x for x in others if x not in first):
                near = get_close_matches(unknown, [*first, *options], 1)
                if unknown in options or (near and near[0] in options):
                    lines.append(f"{near[0]} is an option of the loss, {name}({near[0]}=...)")
                elif near:
                    lines.append(f"{unknown} may mean {near[0]}")
            raise TypeError(f"{name}: {fault}; call {', and '.join(lines)}") from None

    @abstractmethod
    def from_log_probs(self, log_probs: Tensor, *given: Any, **others: Any) -> tuple[Tensor, Metrics]:
        """Compute loss and metrics from the labels' log-probabilities, of the labels' shape."""

    def _fault(self, shape: torch.Size, given: Mapping[str, Any]) -> ValueError | None:
        """Return the fault, which one rank alone may see, of the arguments of `from_log_probs` for labels of this
        shape.

        Raises ValueError for faults that every rank sees.
        """
        check_rows(shape)
        return first_fault(
            *(count_fault(name, given.get(name)) for name in _COUNTS),
            per_token_fault(shape, **{name: given.get(name) for name in _PER_TOKEN}),
        )

    def _check(self, shape: torch.Size, **given: Any) -> None:
        """Raise ValueError unless the arguments of `from_log_probs` fit labels of this shape."""
        raise_if_any(self._fault(shape, given))

    def _row_count(self, shape: torch.Size) -> int:
        return shape[1 if self.sequence_first else 0]

    def _apart(self, log_probs_BS: Tensor, reference_log_probs: Tensor | None) -> Tensor:
        """Subtract a reference policy's log-probabilities, which get no gradient, if there is one."""
        if reference_log_probs is None:
            return log_probs_BS
        return log_probs_BS - self._rows(reference_log_probs.detach())

    def _rows(self, x: Tensor) -> Tensor:
        """Return `x` as `[B, S]`, 16-bit numbers in fp32."""
        x = widened(x)
        return x.t() if self.sequence_first and x.dim() == 2 else x

    def _inputs(self, log_probs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return log-probabilities, and weights of tokens (1 without a mask), both `[B, S]`."""
        log_probs_BS = self._rows(log_probs)
        return log_probs_BS, torch.ones_like(log_probs_BS) if mask is None else self._rows(mask).to(log_probs_BS.dtype)


def widened(x: Tensor) -> Tensor:
    """Return `x` in fp32, or an fp64 `x` as it is: sums of 16-bit log-probabilities lose their digits."""
    return x.to(accumulation_dtype(x.dtype))

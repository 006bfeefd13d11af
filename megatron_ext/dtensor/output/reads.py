"""Read-outs of an lm head: functions of hidden states, the same functions of logits, and a model's own cross entropy.

Legend: B sequences, P tokens of this rank, D hidden size, V vocabulary, R tensor-parallel ranks.
"""

import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import UNSHARDED, group_size
from megatron_ext.head import linear_cross_entropy, vocab_parallel_cross_entropy
from megatron_ext.head.call import statistics
from megatron_ext.head.checks import Bits, bits_or_mode, or_refuse, rounds
from megatron_ext.head.layer_facts import head_facts, local_shard, unwrapped


class LogitArithmetic(NamedTuple):
    """Logits are `scale * z`, or with a cap `scale * tanh(inside * z)`; z is the head's product, bias included."""

    scale: float = 1.0
    inside: float | None = None

    def facts(self, temperature: float) -> dict[str, float | None]:
        """Return the softcap and the temperature for the head's functions, with logits divided by `temperature`."""
        if self.inside is None:
            return {"softcap": None, "temperature": temperature / self.scale}
        return {"softcap": 1 / self.inside, "temperature": temperature / (self.inside * self.scale)}


class CrossEntropyArguments(NamedTuple):
    """The arguments of a model's own call of cross entropy, beside logits and targets."""

    ignore_index: int = -100
    reduction: str = "mean"
    label_smoothing: float = 0.0


class Read(NamedTuple):
    """A function of the fused head (`hidden`), and the same function of logits (`logits`); both take a temperature.

    The arguments are hidden states and weight, or logits, then the labels and other inputs for each position. The
    functions return one tensor or several, with one number, or `columns` numbers, for each position. `hidden` is None:
    logits are always made. `bits`, `logit_dtype`: as in `LmHead`; a model's own logits have only "fast" bits and its
    own rounding. `agrees`: ranks compare labels before slices of the counted tokens are sent, whose sizes depend on
    them. `options`: the options given that a model's own loss lacks, in words.
    """

    temperature: float
    hidden: Callable[..., Any] | None
    logits: Callable[..., Any]
    columns: tuple[int, ...] = ()
    bits: Bits | None = None
    logit_dtype: torch.dtype | None = None
    agrees: bool = False
    options: str = ""

    def shape(self, labels_BP: Tensor) -> tuple[int, ...]:
        """Return the shape of the first result, alone in a tuple: a refusal sends only that to other ranks."""
        return (1, *labels_BP.shape, *self.columns)


PLAIN = Read(1.0, linear_cross_entropy, vocab_parallel_cross_entropy)


def say_that_logits_are_made(reason: str, read: Read) -> None:
    """Warn once, or raise ValueError if a model's own logits or loss lack what `read` asks for: options of the loss,
    bits (also by Megatron's mode), or a dtype to which logits are rounded."""
    if read.options:
        raise ValueError(
            f"use_fused_loss was given {read.options}, and {reason}: the model's own loss has no such option; leave it "
            f"out, or change the model so that its loss is fused"
        )
    if rounds(read.logit_dtype):
        raise ValueError(
            f"logit_dtype is {read.logit_dtype}, and {reason}: its log-probabilities come through logits that the "
            f"model makes, and rounds as it does; pass logit_dtype=None, or use a model whose head is read from hidden "
            f"states"
        )
    if (bits := bits_or_mode(read.bits)) != "fast":
        raise ValueError(
            f'bits is "{bits}", and {reason}: its log-probabilities come through logits that the model makes, whose '
            f'bits may depend on the batch; pass bits="fast", turn off batch_invariant_mode or VLLM_BATCH_INVARIANT, '
            f"where they ask for others, or use a model whose head is read from hidden states"
        )
    say_once(reason)


@functools.cache
def say_once(reason: str) -> None:
    warnings.warn(
        f"{reason}: its logits are made, and take memory of the vocabulary's size for each token",
        stacklevel=2,
    )


def read_logits(read: Read, logits: Tensor, given_BP: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], ValueError | None]:
    """Return the results of `read` from a model's own logits, and its fault or None: see `or_refuse`."""
    local, group, vocab = local_shard(logits, -1)
    return or_refuse(
        lambda: _tuple(read.logits(local, *given_BP, tp_group=group, vocab=vocab, temperature=read.temperature)),
        read.shape(given_BP[0]),
        local,
    )


def read_hidden(
    head: Any,
    logits: dict[str, Any],
    read: Read,
    hidden: Tensor,
    given_BP: Sequence[Tensor],
    columns: int | None = None,
) -> tuple[tuple[Tensor, ...], ValueError | None]:
    """Return the results of `read` from the hidden states `[B, P, D]` at `head`, or this rank's slice of them, and its
    fault or None: see `or_refuse`.

    `logits`: softcap and temperature of the logits; `columns`: use only that many first columns of the head.
    """
    facts = head_facts(head, {})
    weight, group, vocab = local_shard(unwrapped(head)[0].weight, 0)
    if isinstance(hidden, DTensor):
        hidden = hidden.to_local()
    in_slices = hidden.dim() > 2 and hidden.shape[1] != given_BP[0].shape[1]
    if in_slices and group is UNSHARDED:
        raise ValueError("the residual stream is sharded and the lm head is not; shard both in custom_parallel_plan")
    if columns is not None and columns < vocab.size:
        vocab = dataclasses.replace(vocab, size=columns)
    # In the head's "sequence" layout dim 0 is sliced.
    if in_slices:
        hidden, given_BP = hidden.transpose(0, 1), [x.transpose(0, 1) for x in given_BP]
    assert read.hidden is not None
    fused = functools.partial(_agreed, group, read.hidden) if in_slices and read.agrees else read.hidden
    found, fault = or_refuse(
        lambda: _tuple(
            fused(
                hidden if torch.is_autocast_enabled(weight.device.type) else hidden.to(weight.dtype),
                weight,
                *given_BP,
                tp_group=group,
                hidden_layout="sequence" if in_slices else "replicated",
                bias=facts.get("bias"),
                lora=facts["lora"],
                vocab=vocab,
                **logits,
                bits=read.bits,
                logit_dtype=read.logit_dtype,
            )
        ),
        read.shape(given_BP[0]),
        weight,
    )
    # Copies: FSDP2 registers its backward hook on the results, and warns that a view can lose the hook.
    return tuple((x.transpose(0, 1) if in_slices else x).clone() for x in found), fault


def _agreed(group: Any, fused: Callable[..., Any], hidden: Tensor, weight: Tensor, labels: Tensor, **given: Any) -> Any:
    """Return the result of `fused`, after a check that all ranks have the same labels, and all or none see a change."""
    numbers = statistics.gathered_numbers([], "", [labels.flatten()], group, labels.device)
    statistics.check_agreement(numbers.cpu(), "")
    return fused(hidden, weight, labels, **given)


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)


def with_arguments(read: Read, own: CrossEntropyArguments) -> Read:
    """Return `read` with the arguments of a model's own cross entropy; raises ValueError if both smooth labels."""
    assert read.hidden is not None
    if own.label_smoothing and "label_smoothing" in read.options:
        raise ValueError(
            f"use_fused_loss was given {read.options}, and the model's own loss has label_smoothing="
            f"{own.label_smoothing}: leave it out in one of the two"
        )
    smoothing = {"label_smoothing": own.label_smoothing} if own.label_smoothing else {}
    return read._replace(hidden=functools.partial(read.hidden, ignore_index=own.ignore_index, **smoothing))


class HeadCall:
    """A call of an lm head in a model's forward, whose logits were not made.

    Attributes:
        hidden: `[..., D]` at the head's input; of a sharded sequence this rank's slice.
        tokens: the leading dims of the logits.
        columns, dtype: the last dim and the dtype of the logits.
        in_slices: whether hidden states are a slice, so that tokens cannot be chosen among them; then `whole` is True.
        whole: whether the cross entropy of some tokens is read in a pass over all, so that ranks send the same sizes.
        trains: whether hidden states or the head need a gradient.
        made: the head's logits, once code asked for them; `read_by` names the function that did.
        redeemed: the arguments of the last cross entropy that was read from hidden states.
        promises: weak references to all promises of the call.
    """

    def __init__(self, head: Any, read: Read, hidden: Tensor, given: dict[str, Any], is_copy: bool = False):
        """`given`: the arguments of the forward; `is_copy`: whether `head` is a copy with whole parameters."""
        weight = unwrapped(head)[0].weight
        self.head, self.read, self.hidden, self.is_copy = head, read, hidden, is_copy
        self.tokens, self.columns = tuple(hidden.shape[:-1]), weight.shape[0]
        self.in_slices, ranks = False, 1
        if isinstance(weight, DTensor) and hidden.dim() == 3:
            group = local_shard(weight, 0)[1]
            labels = next(given[name] for name in ("labels", "shift_labels") if given.get(name) is not None)
            length = hidden.shape[1] if not isinstance(hidden, DTensor) else hidden.to_local().shape[1]
            ranks = 1 if isinstance(group, str) else group_size(group)
            self.in_slices = ranks > 1 and labels.shape[-1] != length
            self.tokens = (hidden.shape[0], labels.shape[-1]) if self.in_slices else self.tokens
        self.whole = ranks > 1
        self.trains = hidden.requires_grad or any(x.requires_grad for x in head.parameters())
        self.divisor = given.get("num_items_in_batch") if isinstance(head, FSDPModule) else None
        self.dtype = weight.dtype
        if torch.is_autocast_enabled(hidden.device.type) and not is_copy:
            self.dtype = torch.get_autocast_dtype(hidden.device.type)
        self.versions = None if weight.is_inference() else self._versions()
        self.is_called = isinstance(weight, DTensor) or isinstance(head, FSDPModule)
        self.made: Tensor | None = None
        self.read_by: str | None = None
        self.redeemed: CrossEntropyArguments | None = None
        self.promises: list[weakref.ref[Any]] = []

    def _versions(self) -> list[int]:
        return [*map(attrgetter("_version"), self.head.parameters())]

    def logits(self) -> Tensor:
        """Return the head's own logits, which the first call makes."""
        if self.made is None:
            if self.versions is not None and self.versions != self._versions():
                raise ValueError(
                    "logits of an earlier call, which were not made, are asked for, and the lm head has changed since: "
                    "read them in the model's forward, or before the optimizer's step"
                )
            self.made = self.head(self.hidden) if self.is_called else self.head.forward(self.hidden)
        return self.made

    def redeem(
        self, hidden: Tensor, targets: Tensor, logits: LogitArithmetic, columns: int, own: CrossEntropyArguments
    ) -> Tensor:
        """Compute a model's own call of cross entropy, with arguments `own`, from hidden states `[..., D]`."""
        read = with_arguments(self.read, own)
        targets = targets.view(self.tokens) if targets.dim() == 1 and hidden.dim() == 3 else targets
        count = (targets != own.ignore_index).sum() if own.reduction == "mean" else self.divisor
        count = count.to(hidden.device) if isinstance(count, Tensor) else count

        def losses(hidden: Tensor) -> tuple[Tensor, ValueError | None]:
            (found,), fault = read_hidden(self.head, logits.facts(1.0), read, hidden, [targets], columns)
            if own.reduction == "none":
                return found, fault
            total = found.sum()
            return (total if count is None else total / count), fault

        # The mean is taken inside of the call: FSDP2 may round the call's result and gradient, which is 1 for a mean.
        with torch.autocast(hidden.device.type, enabled=False) if self.is_copy else nullcontext():
            loss, fault = _called(self.head, losses)(hidden)
        if fault is not None:
            raise fault
        if own.reduction == "none":
            return loss.flatten()
        return loss * count if own.reduction == "sum" and count is not None else loss


def _called(head: Any, read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Return `read` as a call of the lm head if FSDP2 wraps the head: its hooks gather the weight, also in backward."""
    if not isinstance(head, FSDPModule):
        return read
    layer: Any = head

    def call(hidden: Tensor) -> Any:
        own = vars(head).get("forward")
        head.__dict__["forward"] = read
        try:
            return layer(hidden)
        finally:
            del head.__dict__["forward"]
            if own is not None:
                head.__dict__["forward"] = own

    return call

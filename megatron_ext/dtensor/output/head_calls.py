"""A call of an lm head whose logits are promised, and the cross entropy that is read from its hidden states.

Legend: B sequences, P positions of this rank, D hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import group_size
from megatron_ext.dtensor.output.promised_logits import CrossEntropyArguments, HeadCall, LogitArithmetic
from megatron_ext.dtensor.output.reads import Read, read_hidden
from megatron_ext.head.layer_facts import local_shard, unwrapped


def head_call(head: Any, read: Read, hidden: Tensor, given: dict[str, Any], whole: bool = False) -> HeadCall:
    """A call of `head` in a forward that was `given` these arguments; `whole`: of a copy that is sharded no longer."""
    weight = unwrapped(head)[0].weight
    tokens = tuple(hidden.shape[:-1])
    columns, in_slices, ranks = weight.shape[0], False, 1
    if isinstance(weight, DTensor) and hidden.dim() == 3:
        group = local_shard(weight, 0)[1]
        labels = next(given[name] for name in ("labels", "shift_labels") if given.get(name) is not None)
        length = hidden.shape[1] if not isinstance(hidden, DTensor) else hidden.to_local().shape[1]
        ranks = 1 if isinstance(group, str) else group_size(group)
        in_slices = ranks > 1 and labels.shape[-1] != length
        tokens = (hidden.shape[0], labels.shape[-1]) if in_slices else tokens
    divisor = given.get("num_items_in_batch") if isinstance(head, FSDPModule) else None
    dtype = weight.dtype
    if torch.is_autocast_enabled(hidden.device.type) and not whole:
        dtype = torch.get_autocast_dtype(hidden.device.type)

    def make(hidden: Tensor) -> Tensor:
        return head(hidden) if isinstance(weight, DTensor) or isinstance(head, FSDPModule) else head.forward(hidden)

    def redeem(
        hidden: Tensor, targets: Tensor, logits: LogitArithmetic, columns: int, given: CrossEntropyArguments
    ) -> Tensor:
        with torch.autocast(hidden.device.type, enabled=False) if whole else nullcontext():
            return _cross_entropy(head, read, hidden, targets, logits.facts(1.0), (columns, given, divisor, tokens))

    return HeadCall(hidden, tokens, columns, dtype, make, redeem, in_slices, ranks > 1)


def with_arguments(read: Read, own: CrossEntropyArguments) -> Read:
    """`read`, as a model's own call of cross entropy asks for it. Raises ValueError where both smooth labels."""
    assert read.hidden is not None
    if own.label_smoothing and "label_smoothing" in read.options:
        raise ValueError(
            f"use_fused_loss was given {read.options}, and the model's own loss has label_smoothing="
            f"{own.label_smoothing}: leave it out in one of the two"
        )
    smoothing = {"label_smoothing": own.label_smoothing} if own.label_smoothing else {}
    return read._replace(hidden=functools.partial(read.hidden, ignore_index=own.ignore_index, **smoothing))


def _cross_entropy(
    head: Any, read: Read, hidden: Tensor, targets: Tensor, logits: dict[str, Any], asked: Any
) -> Tensor:
    """A model's own call of cross entropy, from hidden states."""
    columns, own, divisor, tokens = asked
    read = with_arguments(read, own)
    targets = targets.view(tokens) if targets.dim() == 1 and hidden.dim() == 3 else targets
    count = (targets != own.ignore_index).sum() if own.reduction == "mean" else divisor

    def losses(hidden: Tensor) -> tuple[Tensor, ValueError | None]:
        (found,), fault = read_hidden(head, logits, read, hidden, [targets], columns)
        if own.reduction == "none":
            return found, fault
        total = found.sum()
        return (total if count is None else total / _there(count, total)), fault

    # FSDP2 may round what leaves the head, and its gradient: a mean's is 1.
    loss, fault = _called(head, losses)(hidden)
    if fault is not None:
        raise fault
    if own.reduction == "none":
        return loss.flatten()
    return loss * _there(count, loss) if own.reduction == "sum" and count is not None else loss


def _there(count: Any, like: Tensor) -> Any:
    return count.to(like.device) if isinstance(count, Tensor) else count


def _called(head: Any, read: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """`read`, as a call of the lm head where FSDP2 wraps that: its hooks gather the weight, and again in backward."""
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

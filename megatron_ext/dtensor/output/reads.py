"""Read-outs of an lm head: functions of its hidden states, and the same ones of its logits.

Legend: B sequences, P tokens of this rank, D hidden size, V vocabulary, R tensor-parallel ranks.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from megatron_ext.distributed.groups import UNSHARDED
from megatron_ext.head import linear_cross_entropy, vocab_parallel_cross_entropy
from megatron_ext.head.call import statistics
from megatron_ext.head.checks import Bits, bits_or_mode, or_refuse, rounds
from megatron_ext.head.layer_facts import head_facts, local_shard, unwrapped


class Read(NamedTuple):
    """A function of the fused head, and the same of logits; both take a temperature.

    After hidden states and weight, or logits, come the labels, and what else is given of each position. They give
    a tensor or several, each a number of a position, or `columns` numbers. None of hidden states: logits are made.
    `bits`, `logit_dtype`: as in `LmHead`; of logits that a model makes none but "fast" can be had, and they are as it
    rounds them. `agrees`: ranks compare labels before they send slices of the tokens that these leave in: a model's own
    loss may choose others.
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
        """Return the shape of the first result alone, which tells all ranks of a refusal."""
        return (1, *labels_BP.shape, *self.columns)


PLAIN = Read(1.0, linear_cross_entropy, vocab_parallel_cross_entropy)


def say_that_logits_are_made(reason: str, read: Read) -> None:
    """Warns, once; or raises ValueError if a model's own logits or loss do not have what `read` asks for: options of
    the loss, bits, by Megatron's mode too, or a dtype that they are rounded to."""
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
    """Return what `read` makes of the logits that a model made."""
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
    """Return what `read` makes of the hidden states `[B, P, D]` at `head`, or this rank's slice; and
    what it refuses: see `or_refuse`.

    `logits`: the cap and the temperature of its logits; `columns`: the first ones alone, of a head that is whole.
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
    # The head's "sequence" layout has slices of dim 0.
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
    # FSDP2 hangs its backward hook on these, and warns that a view can lose it.
    return tuple((x.transpose(0, 1) if in_slices else x).clone() for x in found), fault


def _agreed(group: Any, fused: Callable[..., Any], hidden: Tensor, weight: Tensor, labels: Tensor, **given: Any) -> Any:
    """Return what `fused` gives, once all ranks have the same labels, and tell of no change or of the same one."""
    numbers = statistics.gathered_numbers([], "", [labels.flatten()], group, labels.device)
    statistics.check_agreement(numbers.cpu(), "")
    return fused(hidden, weight, labels, **given)


def _tuple(found: Any) -> tuple[Tensor, ...]:
    return found if isinstance(found, tuple) else (found,)

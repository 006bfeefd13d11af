"""Read-outs of this rank's tokens at a model's lm head: from hidden states, or through the logits it makes.

The model's own forward runs, with a head that gives promised logits: from what it returns is read where hidden states
enter the head, and what is done to the logits. The first call compares that with the logits of a sample.

Legend: B sequences, P tokens of this rank, D hidden size, V vocabulary.
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method

from megatron_ext.distributed.groups import group_size
from megatron_ext.dtensor.attention import lay_out, sequence_hook
from megatron_ext.dtensor.decoder import output_head_path
from megatron_ext.dtensor.output.fused_classes import forward_of
from megatron_ext.dtensor.output.head_calls import head_call
from megatron_ext.dtensor.output.loss_proof import basis, groups_of, losses_of_logits, not_fusable, prove
from megatron_ext.dtensor.output.promised_logits import DeferredLogits, HeadCall
from megatron_ext.dtensor.output.reads import PLAIN, Read, read_hidden, read_logits, say_that_logits_are_made
from megatron_ext.dtensor.output.stand_ins import (
    REGISTERED,
    bring_back,
    is_registered,
    promising,
    why_logits_are_made,
    with_head,
)
from megatron_ext.proof import Proof, Proofs, module_parts, proof_mode

_PROOFS = {True: Proofs(), False: Proofs()}  # of models in training, and in eval mode

_Found = tuple[tuple[Tensor, ...], ValueError | None]


def register(model: nn.Module) -> None:
    """Let FSDP2 gather the root's parameters for `_through_head`, too."""
    model.__dict__[REGISTERED] = functools.partial(_through_head, model)
    register_fsdp_forward_method(model, REGISTERED)


def read_out(model: nn.Module, read: Read, tokens_BP: Tensor, given_BP: Sequence[Tensor], **inputs: Any) -> _Found:
    """Return what `read` makes of these tokens, each result `[B, P]`, and what it refuses: see `or_refuse`.

    `given_BP`: the labels, and what else `read` takes of each position; `inputs`: what the model takes.
    """
    inputs = {"input_ids": tokens_BP, **inputs}
    if read.hidden is not None:
        inside: Any = model if is_registered(model) else getattr(model, "_orig_mod", model)  # not the compiled one
        reason = why_logits_are_made(inside)
        if reason is None:
            proof = logits_proof(inside, inputs)
            if proof.fused:
                through_head = getattr(inside, REGISTERED, functools.partial(_through_head, inside))
                return through_head(read, given_BP, inputs)
            reason = proof.reason
        say_that_logits_are_made(f"{type(inside).__name__.removeprefix('FSDP')} makes its own logits ({reason})", read)
    return read_logits(read, model(**inputs).logits, given_BP)


def logits_proof(model: nn.Module, inputs: dict[str, Any]) -> Proof:
    """The proof that what is read from hidden states equals what is read from the logits of `model(**inputs)`.

    Communicates, at the first call: the head's weight, whole, and a small exchange.
    """
    path = output_head_path(model)
    head = model.get_submodule(path)
    if (reason := not_fusable(model, head)) is not None:
        return Proof.not_comparable(reason)
    if isinstance(model, FSDPModule) and not is_registered(model):
        return Proof.not_comparable("FSDP2 gathers its weights in its own forward; use what parallelize makes")
    hook = sequence_hook(model)
    cp_group = None if hook is None else hook.cp_group
    given = inputs | {"labels": inputs["input_ids"]}

    def call_of(copy: nn.Module, hidden: Tensor) -> HeadCall:
        return head_call(copy, PLAIN, hidden, {}, whole=True)

    return _PROOFS[model.training].of(
        model,
        lambda: basis(model, module_parts(model), head),
        lambda: prove(
            model,
            forward_of(model),
            path,
            given,
            call_of,
            losses_of_logits,
            alone=not is_registered(model) and group_size(cp_group) == 1,
        ),
        proof_mode(),
        groups_of(head) or [cp_group],
    )


def _through_head(model: nn.Module, read: Read, given_BP: Sequence[Tensor], inputs: dict[str, Any]) -> _Found:
    """Return what `read` makes of these tokens' hidden states, `[B, P]` each, and what it refuses: see `or_refuse`."""
    path = output_head_path(model)
    head = model.get_submodule(path)
    calls: list[HeadCall] = []

    def call_of(hidden: Tensor) -> HeadCall:
        return head_call(head, read, hidden, {"shift_labels": given_BP[0]})

    stub = with_head(model, path, promising(head, call_of, calls.append))
    args, inputs = lay_out(model, (), inputs)
    logits = forward_of(model)(stub, *args, **inputs).logits
    bring_back(model, stub)
    if not isinstance(logits, DeferredLogits):
        return read_logits(read, logits, given_BP)
    if logits.made is not None:
        return read_logits(read, logits.made, given_BP)
    state = logits.state
    columns = None if calls[0].in_slices else state.columns
    return read_hidden(head, state.transform.facts(read.temperature), read, state.hidden, given_BP, columns)

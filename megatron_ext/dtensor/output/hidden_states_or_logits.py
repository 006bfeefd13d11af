"""Read-outs of this rank's tokens at a model's lm head: from hidden states, or through the logits that it makes.

The model's own forward runs with a head that gives promised logits. The promise that it returns says which hidden
states entered the head, and what was done to the logits. The first call compares the result of that with the result of
real logits, on a sample. If they differ, the model makes its logits, and they are read in shards.

Legend: B sequences, P tokens of this rank, D hidden size, V vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method

from megatron_ext.distributed.groups import UNSHARDED, Group, group_size
from megatron_ext.dtensor.attention import lay_out, sequence_hook
from megatron_ext.dtensor.decoder import output_head_path
from megatron_ext.dtensor.output.decisions import (
    Decision,
    ToldFault,
    basis,
    decide,
    not_fusable,
    tell_of_change,
    tell_of_unread_head,
    telling_of_change,
    told,
)
from megatron_ext.dtensor.output.loss_proof import losses_of_logits, prove
from megatron_ext.dtensor.output.promised_logits import DeferredLogits
from megatron_ext.dtensor.output.reads import HeadCall, Read, read_hidden, read_logits, say_that_logits_are_made
from megatron_ext.dtensor.output.stand_ins import (
    REGISTERED,
    VOCABULARY,
    forward_of,
    is_registered,
    promising,
    standing_in,
    why_logits_are_made,
)
from megatron_ext.head.layer_facts import local_shard
from megatron_ext.proof import Proof, Proofs, cannot_prove_now, module_parts, proof_mode

_PROOFS = {True: Proofs(), False: Proofs()}  # of models in training, and in eval mode

_Found = tuple[tuple[Tensor, ...], ValueError | None]


def register(model: nn.Module, group: Group) -> None:
    """Let FSDP2 gather the root's parameters for `_through_head` too. `group`: the ranks that share the vocabulary."""
    model.__dict__[VOCABULARY] = group
    model.__dict__[REGISTERED] = functools.partial(_through_head, model)
    register_fsdp_forward_method(model, REGISTERED)


def read_out(model: nn.Module, read: Read, tokens_BP: Tensor, given_BP: Sequence[Tensor], **inputs: Any) -> _Found:
    """Return the results of `read` for these tokens, `[B, P]` each, and its fault or None: see `or_refuse`.

    `given_BP`: the labels, and the other inputs of `read` for each position; `inputs`: other arguments of the model.
    """
    inputs = {"input_ids": tokens_BP, **inputs}
    if read.hidden is not None:
        inside: Any = model if is_registered(model) else getattr(model, "_orig_mod", model)  # not torch.compile's
        path = output_head_path(inside)
        proof, anew = _decision(inside, path, inputs)
        try:
            if proof.fused:
                through_head = getattr(inside, REGISTERED, functools.partial(_through_head, inside))
                return through_head(path, read, given_BP, inputs, anew)
            _say_why(inside, proof, read)
            logits = model(**inputs).logits
            if anew is not None:
                return _logits_of_changed(inside, read, logits, given_BP, anew)
            return _of_logits(inside, read, logits, given_BP)
        except ToldFault as fault:
            return (torch.zeros(read.shape(given_BP[0]), device=tokens_BP.device),), fault
    return read_logits(read, model(**inputs).logits, given_BP)


def _say_why(model: nn.Module, proof: Proof, read: Read) -> None:
    say_that_logits_are_made(f"{type(model).__name__.removeprefix('FSDP')} makes its own logits ({proof.reason})", read)


def _copied(found: _Found) -> _Found:
    """Copy the results, as FSDP2 warns of views."""
    return tuple(x.clone() for x in found[0]), found[1]


def _logits_of_changed(
    model: nn.Module, read: Read, logits: Tensor, given_BP: Sequence[Tensor], anew: Callable[[], Proof]
) -> _Found:
    """Read logits, and tell other ranks of a change by it; if all ranks see one, prove anew for the next calls."""
    with telling_of_change():
        found, fault = _of_logits(model, read, logits, given_BP)
    if fault is None:
        anew()
    return found, None if fault is None else told(model, fault)


def _of_logits(
    model: nn.Module, read: Read, logits: Tensor, given_BP: Sequence[Tensor], changed: bool = False
) -> _Found:
    """Read the logits that a forward has made. If they are whole, or the model may have `changed` so that its head was
    not called, other ranks may wait in a call of the head: they are told."""
    if group_size(vars(model).get(VOCABULARY)) > 1 and (changed or local_shard(logits, -1)[1] is UNSHARDED):
        tell_of_unread_head(model, model.get_submodule(output_head_path(model)), read, given_BP)
    return read_logits(read, logits, given_BP)


def _decision(model: nn.Module, path: str, inputs: dict[str, Any]) -> Decision:
    """Decide whether read-outs from hidden states equal those from the logits of `model(**inputs)`."""
    head, mode, group = model.get_submodule(path), proof_mode(), vars(model).get(VOCABULARY)
    reason = why_logits_are_made(model) or not_fusable(model, path, head)
    if reason is not None and group is None:
        return Proof.not_comparable(reason), None
    hook = sequence_hook(model)
    cp_ranks = group_size(None if hook is None else hook.cp_group)
    given = inputs | {"labels": inputs["input_ids"]}

    def proved() -> Proof:
        if reason is not None:
            return Proof.not_comparable(reason)
        return prove(model, forward_of(model), path, given, losses_of_logits, cp_ranks)

    rests_on = basis(model, module_parts(model), head, mode, reason)
    proof, anew = decide(_PROOFS[model.training], model, rests_on, proved, mode, group)
    if anew is not None and (unproved := cannot_prove_now()) is not None:
        return Proof.not_comparable(unproved), None  # reading logits sends the same as reading hidden states
    return proof, anew


def _through_head(
    model: nn.Module,
    path: str,
    read: Read,
    given_BP: Sequence[Tensor],
    inputs: dict[str, Any],
    anew: Callable[[], Proof] | None,
) -> _Found:
    """Return the results of `read` from these tokens' hidden states, `[B, P]` each, and its fault: see `or_refuse`.

    `path`: the name of the lm head. `anew`: see `Decision`.
    """
    head = model.get_submodule(path)
    calls: list[HeadCall] = []

    def call_of(hidden: Tensor) -> HeadCall:
        call = HeadCall(head, read, hidden, {"shift_labels": given_BP[0]})
        if anew is not None and not calls:
            tell_of_change(model, head, read, hidden, given_BP)
            if not (proof := anew()).fused:
                _say_why(model, proof, read)
                call.logits()
        return call

    args, inputs = lay_out(model, (), inputs)
    with standing_in(model, path, promising(head, call_of, calls.append)) as stub:
        logits = forward_of(model)(stub, *args, **inputs).logits
    if not isinstance(logits, DeferredLogits):
        return _copied(_of_logits(model, read, logits, given_BP, changed=anew is not None and not calls))
    state = logits.state
    if logits.made is not None or calls[0].made is not None or (state.chosen and calls[0].in_slices):
        return _copied(read_logits(read, logits.logits("a read-out"), given_BP))
    columns = None if calls[0].in_slices else state.columns
    return read_hidden(head, state.transform.facts(read.temperature), read, state.hidden, given_BP, columns)

"""The decision whether a call reads hidden states, which ranks that share the head's vocabulary take together.

They agree by one exchange at the first call. Later ones send nothing for it: a rank that sees another model than it saw
then tells the others by a word among the head's options, which the head compares in the exchange that it makes anyway.
Where all see another one they prove anew, on some alone every rank raises. All other ranks (data- and context-parallel
ones) decide alone: a proof sends nothing, and the head with or without logits sends the same.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ext.distributed.groups import Group, group_size
from megatron_ext.dtensor.attention import sequence_hook
from megatron_ext.dtensor.output.reads import Read, read_hidden
from megatron_ext.head.call import statistics
from megatron_ext.head.call.statistics import OptionsDiffer
from megatron_ext.head.layer_facts import unwrapped
from megatron_ext.proof import Proof, ProofBasis, ProofMode, Proofs, words_of_change

_CHANGED = (
    "the lm head, the loss, a value that their code reads, or an argument of this {} has changed since its "
    "tensor-parallel ranks decided to fuse it, and they cannot decide anew: {}. Change it on every rank alike, as "
    "also a counter that the loss function keeps, and give every rank the same arguments"
)


class ToldFault(ValueError):
    """The fault with which a call of the head that tells of a change has ended, on every rank."""


class HeadDecision(NamedTuple):
    """The proof that holds for a call; `anew` makes another one, once all ranks have told that they see a change."""

    proof: Proof
    anew: Callable[[], Proof] | None = None


class HeadDecider(NamedTuple):
    """The parts of a decision that are the same for all calls of a model's way in.

    Attributes:
        proofs: those of the way in.
        owners: of proofs of other kinds of calls.
        mode: when proofs are made.
        group: ranks that share the vocabulary of the model's head, if any do.
    """

    proofs: Proofs
    owners: Sequence[Any]
    mode: ProofMode
    group: Group

    def decide(self, owner: Any, basis: ProofBasis, prove: Callable[[], Proof]) -> HeadDecision:
        """Decide about a call of the kind of `owner`.

        Communicates: over several ranks of the group an all-gather of a small object, at the first call.
        """

        def made() -> Proof:
            return self.proofs.of(owner, lambda: basis, prove, self.mode, self.group)

        if group_size(self.group) > 1:
            known = [proof for each in (owner, *self.owners) if (proof := self.proofs.made(each)) is not None]
            new = self.proofs.made(owner) is None
            if known and (new or self.proofs.has_changed(owner, basis)):
                return HeadDecision(known[0], made)
        return HeadDecision(made())


def tell_of_change(model: Any, head: Any, read: Read, hidden: Tensor, given: Sequence[Tensor]) -> None:
    """Have the head tell the other ranks that this one sees another model; raises `ToldFault` unless all do.

    `given`: the labels, and what else `read` takes of each position.
    """
    with telling_of_change():
        _tell(model, head, read, hidden.detach(), given)


def tell_of_unread_head(model: Any, head: Any, read: Read, given: Sequence[Tensor]) -> None:
    """Tell the ranks that have called the head, and wait for this one, that this rank's forward has not called it.

    Raises `ToldFault`, unless no rank has called it.
    """
    hook, weight = sequence_hook(model), unwrapped(head)[0].weight
    rows, positions = given[0].shape[:2]
    slices = 1 if hook is None else hook.slices
    hidden = torch.zeros(rows, positions // slices, weight.shape[1], dtype=weight.dtype, device=given[0].device)
    with statistics.agreeing_on("the lm head was not called"):
        _tell(model, head, read, hidden, given)


@torch.no_grad()
def _tell(model: Any, head: Any, read: Read, hidden: Tensor, given: Sequence[Tensor]) -> None:
    fault = read_hidden(head, {}, read, hidden, given)[1]
    if fault is not None:
        raise ToldFault(*told(model, fault).args) from fault


def telling_of_change() -> AbstractContextManager[None]:
    """A call of the head within tells the other ranks that this one sees another model."""
    return statistics.agreeing_on(words_of_change(dist.get_rank()))


def told(model: Any, fault: ValueError) -> ValueError:
    """The error for a fault of the call that tells of a change, which says so where some ranks alone have changed."""
    if not isinstance(fault, OptionsDiffer):
        return fault
    return ValueError(_CHANGED.format(type(model).__name__.removeprefix("FSDP"), fault))

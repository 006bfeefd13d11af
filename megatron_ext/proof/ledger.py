"""`Proofs`: the proofs that were made, each with what it rests on, and the decision whether to make another."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch

from megatron_ext.distributed.groups import Group
from megatron_ext.proof.agreement import agreed
from megatron_ext.proof.basis import ProofBasis
from megatron_ext.proof.result import Proof
from megatron_ext.proof.settings import ProofMode

_TRUSTED = Proof("trusted")


class Proofs:
    """The proofs of one way in, by model or another owner. Owners are not kept alive; a copy is proved again."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Any, tuple[ProofBasis, Proof]] = WeakKeyDictionary()

    def of(
        self,
        owner: Any,
        basis: Callable[[], ProofBasis],
        prove: Callable[[], Proof],
        mode: ProofMode = "first",
        groups: Sequence[Group] = (),
    ) -> Proof:
        """The proof that holds for this call: the one that was made, as long as `basis()` is the same, or a new one.

        Args:
            owner: whose loss is replaced, any object that can be referenced weakly and has a hash.
            basis: gives what the proof rests on; called at every call, so it must be cheap.
            prove: makes a proof, by `compare` as a rule. All ranks of `groups` call it, or none.
            groups: the ranks that must go the same way; they agree on each new proof by one exchange a group.

        A proof that is not comparable for a reason of this call alone (a captured graph) is not kept.
        """
        if mode == "off":
            return _TRUSTED
        if (reason := cannot_prove_now()) is not None:
            found = self._made.get(owner)
            kept = mode == "first" and found is not None and found[0].same_as(basis())
            return found[1] if kept and found is not None else Proof.not_comparable(reason)
        rests_on = basis()
        found = self._made.get(owner)
        if mode == "first" and found is not None and found[0].same_as(rests_on):
            return found[1]
        proof = agreed(prove(), groups)
        self._made[owner] = (rests_on, proof)
        return proof

    def made(self, owner: Any) -> Proof | None:
        """The last proof of `owner`, for reports."""
        found = self._made.get(owner)
        return None if found is None else found[1]

    def forget(self, owner: Any) -> None:
        """Drop the proof of `owner`: its next call makes another."""
        self._made.pop(owner, None)


def cannot_prove_now() -> str | None:
    """Why nothing can be compared in this call, or None: a graph is being captured, or a function compiled."""
    if torch.compiler.is_compiling():
        return "torch.compile traces the call, in which nothing can be compared"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured, in which nothing can be compared"
    return None

"""Outcomes of comparing a model's own loss with the fused one, their bases, and the decision to compare again.

An option or an environment variable says when a proof is made; another variable turns all fusion off.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from types import MethodType
from typing import Any, Literal, NamedTuple, cast, get_args
from weakref import WeakKeyDictionary

import torch

from megatron_ext.distributed.collectives import all_gather_object
from megatron_ext.distributed.groups import Group, group_size
from megatron_ext.proof.values import PLAIN

Verdict = Literal["proved", "trusted", "refused", "not comparable"]
ProofMode = Literal["first", "always", "off"]  # first call and after changes of the basis; every call; never

SAMPLE_TOKENS = 64  # the most tokens of a sample
PROOF_VARIABLE = "MEGATRON_EXT_PROOF"
FUSION_VARIABLE = "MEGATRON_EXT_FUSION"
MANY_CHANGES = 10


@dataclass(frozen=True)
class Proof:
    """The outcome of one comparison; `str(proof)` is a sentence for reports.

    Attributes:
        verdict: "proved": both losses are equal within rounding; "trusted": the user asked for no comparison;
            "refused": they differ; "not comparable": the model's own loss could not be computed on a sample.
        reason: why the verdict is "refused" or "not comparable", in words.
        tokens: how many tokens were compared.
        largest_difference: the largest relative difference of losses and gradients (of hidden states and parameters).
    """

    verdict: Verdict
    reason: str = ""
    tokens: int = 0
    largest_difference: float = 0.0

    @classmethod
    def refused(cls, reason: str, tokens: int = 0, largest_difference: float = 0.0) -> "Proof":
        """Make the outcome of two losses that differ."""
        return cls("refused", reason, tokens, largest_difference)

    @classmethod
    def not_comparable(cls, reason: str) -> "Proof":
        """Make the outcome of a comparison that could not be run."""
        return cls("not comparable", reason)

    @property
    def fused(self) -> bool:
        """Return whether the fused loss may be used."""
        return self.verdict in ("proved", "trusted")

    def __str__(self) -> str:
        if self.verdict == "proved":
            return f"proved on {self.tokens} tokens, largest difference {self.largest_difference:.0e}"
        if self.verdict == "trusted":
            return "not compared with the model's own loss, as the proof is off"
        if self.verdict == "refused":
            return f"the model's own loss is another one: {self.reason} (compared on {self.tokens} tokens)"
        return f"not compared with the model's own loss: {self.reason}"


def agreed(proof: Proof, group: Group) -> Proof:
    """Return one proof for all ranks of `group`: the worst.

    Communicates: one all-gather of a small object over several ranks.
    """
    return worst(all_gather_object(proof, group)) if group_size(group) > 1 else proof


def worst(proofs: Iterable[Proof]) -> Proof:
    """Return the first proof that is not fused, or else the proof with the largest difference."""
    proofs = list(proofs)
    not_fused = [proof for proof in proofs if not proof.fused]
    return not_fused[0] if not_fused else max(proofs, key=lambda proof: proof.largest_difference)


_TRUSTED = Proof("trusted")


class ProofBasis:
    """Basis of a proof: the objects and values on which it rests.

    Two bases are the same if their parts are: plain values are compared by value, other objects by identity. A bound
    method counts as its function and its object; a list, tuple or dict as its items. Parts are referenced weakly, so
    that a proof keeps no model alive; a part that was deleted equals no other. Tensors are not read.
    """

    __slots__ = ("_parts",)

    def __init__(self, *parts: Any):
        self._parts: list[Any] = []
        left: list[Any] = [parts]  # a stack instead of recursion, as every training step runs this
        while left:
            part = left.pop()
            if isinstance(part, PLAIN):
                self._parts.append(part)
            elif type(part) in (tuple, list):
                self._parts.append(len(part))
                left += reversed(part)
            elif type(part) is MethodType:  # a proxy of a method counts as an object of its own
                left.append((part.__func__, part.__self__))
            elif isinstance(part, Mapping):
                left.append([*chain.from_iterable(part.items())])
            else:
                try:
                    self._parts.append(weakref.ref(part))  # Python gives the same reference while the object lives
                except TypeError:
                    self._parts.append(part)

    def same_as(self, other: "ProofBasis") -> bool:
        """Return whether all parts of both bases are the same."""
        if len(self._parts) != len(other._parts):
            return False
        for a, b in zip(self._parts, other._parts, strict=True):
            if a is b:
                continue
            # NaN equals NaN here.
            if type(a) is not type(b) or not isinstance(a, PLAIN) or (a != b and (a == a or b == b)):
                return False
        return True


class _Made(NamedTuple):
    """A proof, its basis, whether each call of its owner makes a new proof, and how often the basis changed before."""

    basis: ProofBasis
    proof: Proof
    always: bool
    changes: int


class Proofs:
    """The proofs of one way in, by model or another owner. Owners are not kept alive; a copy is proved again."""

    def __init__(self) -> None:
        self._made: WeakKeyDictionary[Any, _Made] = WeakKeyDictionary()

    def of(
        self,
        owner: Any,
        basis: ProofBasis,
        prove: Callable[[], Proof],
        mode: ProofMode = "first",
        group: Group = None,
    ) -> Proof:
        """Return the proof that holds for this call: the last one while its basis is the same, or a new one.

        Args:
            owner: the object whose loss is replaced; it must be hashable and allow weak references.
            prove: a function that makes a proof, usually by `compare`, without communication.
            group: the ranks that must decide alike. They agree on each new proof by one exchange, even if a rank cannot
                make it or need not; so all of them must ask for a new proof together: see `has_changed`.

        A proof that is not comparable for a reason of this call alone (a captured graph) is not kept.
        """
        reason, shared = cannot_prove_now(), group_size(group) > 1
        if mode == "off" and (reason is not None or not shared):
            return _TRUSTED
        found = self._made.get(owner)
        holds = found if found is not None and found.basis.same_as(basis) else None
        if reason is not None:
            return Proof.not_comparable(reason) if holds is None or mode != "first" else holds.proof
        always = mode == "always" if found is None or not shared else found.always
        if holds is not None and not always:
            return holds.proof
        proof, always = _agreed(prove, mode, group) if shared else (prove(), always)
        changes = 0 if found is None or always else found.changes + 1
        warn_of_changes(changes)
        self._made[owner] = _Made(basis, proof, always, changes)
        return proof

    def has_changed(self, owner: Any, basis: ProofBasis) -> bool:
        """Tell whether this rank would make a new proof now, for which the other ranks of a group would be needed."""
        found = self._made.get(owner)
        return found is not None and not found.always and not found.basis.same_as(basis)

    def made(self, owner: Any) -> Proof | None:
        """Return the last proof of `owner`, or None, for reports."""
        found = self._made.get(owner)
        return None if found is None else found.proof


def _agreed(prove: Callable[[], Proof], mode: ProofMode, group: Group) -> tuple[Proof, bool]:
    """Return the proof of all ranks, and whether every rank makes a proof at each call."""
    try:
        proof = _TRUSTED if mode == "off" else prove()
    except Exception as error:  # raised here, it would leave the other ranks waiting in the exchange
        proof = Proof.not_comparable(f"on one rank the comparison raised {error_words(error)}")
    found = all_gather_object((proof, mode == "always"), group)
    return worst(proof for proof, _ in found), all(always for _, always in found)


def error_words(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])


def cannot_prove_now() -> str | None:
    """Return why nothing can be compared in this call: a graph is being captured, or a function compiled; else None."""
    if torch.compiler.is_compiling():
        return "torch.compile traces the call, in which nothing can be compared"
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return "a CUDA graph is being captured, in which nothing can be compared"
    return None


def warn_of_changes(changes: int) -> None:
    """Warn, at the tenth change of a model's basis, that its proofs do not last."""
    if changes == MANY_CHANGES:
        warnings.warn(
            f"the lm head or the loss of a model, or a value that their code reads, has changed {changes} times since "
            f"its first call, and each change takes another comparison of the fused loss with the model's own: let "
            f"the training loop, and not the loss function, keep counters and logs",
            stacklevel=2,
        )


def words_of_change(rank: int) -> str:
    """Return the words by which `rank` tells others, in an exchange that compares words, that it sees a changed model.

    Ranks that can prove anew all have the same words. If nothing can be compared, as while a graph is captured, each
    rank has other words, so that a replay of this exchange ends with an error on every rank.
    """
    reason = cannot_prove_now()
    return "the model has changed" if reason is None else f"the model has changed on rank {rank}, and {reason}"


def proof_mode(option: str | None = None) -> ProofMode:
    """Return the mode given as `option`, or else the mode in MEGATRON_EXT_PROOF, or else "first".

    Raises:
        ValueError: the option, or the variable, is no mode.
    """
    said = os.environ.get(PROOF_VARIABLE) or "first"
    name, value = ("proof", option) if option is not None else (PROOF_VARIABLE, said)
    if value not in get_args(ProofMode):
        raise ValueError(
            f'{name} is {value!r}: it must be "first" (the first call compares the fused loss with the model\'s own), '
            f'"always" or "off" (the fused loss is trusted); pass one of them'
        )
    return cast(ProofMode, value)


def fusion_is_on() -> bool:
    """Return whether MEGATRON_EXT_FUSION is not "off"; raises as `why_fusion_is_off`."""
    return why_fusion_is_off() is None


def why_fusion_is_off() -> str | None:
    """Return a reason, for reports and refusals, if MEGATRON_EXT_FUSION is "off"; None if fusion is on.

    With "off" every model computes its loss as if this package were not there. Raises ValueError for a variable that is
    neither "on" nor "off".
    """
    value = os.environ.get(FUSION_VARIABLE) or "on"
    if value not in ("on", "off"):
        raise ValueError(f'{FUSION_VARIABLE} is {value!r}: it must be "on" or "off"; set one of them, or unset it')
    return None if value == "on" else f"{FUSION_VARIABLE}=off is set in the environment"

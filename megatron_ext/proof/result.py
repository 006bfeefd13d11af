"""`Proof`: the outcome of comparing a model's own loss with the fused one, on all ranks or on none."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from megatron_ext.distributed.collectives import all_gather_object
from megatron_ext.distributed.groups import Group, group_size

Verdict = Literal["proved", "trusted", "refused", "not comparable"]


@dataclass(frozen=True)
class Proof:
    """The outcome of one comparison; `str(proof)` is a sentence for reports.

    Attributes:
        verdict: "proved": both are equal within rounding; "trusted": the user asked for no comparison; "refused": they
            differ; "not comparable": the model's own could not be run on a sample.
        reason: for the last two, in words.
        tokens: how many were compared.
        largest_difference: relative, of losses, of gradients of hidden states and of each parameter of the head.
    """

    verdict: Verdict
    reason: str = ""
    tokens: int = 0
    largest_difference: float = 0.0

    @classmethod
    def refused(cls, reason: str, tokens: int = 0, largest_difference: float = 0.0) -> "Proof":
        """The outcome if both ways were run, and differ."""
        return cls("refused", reason, tokens, largest_difference)

    @classmethod
    def not_comparable(cls, reason: str) -> "Proof":
        """The outcome if one of the two ways cannot be run."""
        return cls("not comparable", reason)

    @property
    def fused(self) -> bool:
        """Return whether the fused way may be used."""
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
    """The proof that all ranks of `group` have: see `worst`.

    Communicates: one all-gather of a small object over several ranks.
    """
    return worst(all_gather_object(proof, group)) if group_size(group) > 1 else proof


def worst(proofs: Iterable[Proof]) -> Proof:
    """The first proof that is not fused, or else the one that differs most."""
    proofs = list(proofs)
    not_fused = [proof for proof in proofs if not proof.fused]
    return not_fused[0] if not_fused else max(proofs, key=lambda proof: proof.largest_difference)

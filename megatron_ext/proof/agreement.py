"""The exchange by which ranks agree on a proof: a fusion is proved on all of them, or on none."""

from collections.abc import Iterable

from megatron_ext.distributed.collectives import all_gather_object
from megatron_ext.distributed.groups import Group, group_size
from megatron_ext.proof.result import Proof


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

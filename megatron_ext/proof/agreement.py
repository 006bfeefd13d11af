"""The exchange by which ranks agree on a proof: a fusion is proved on all of them, or on none."""

from collections.abc import Sequence

from megatron_ext.distributed.collectives import all_gather_object
from megatron_ext.distributed.groups import Group, group_size
from megatron_ext.proof.result import Proof


def agreed(proof: Proof, groups: Sequence[Group]) -> Proof:
    """The proof that all ranks of `groups` have: the first one that is not fused, or else the one that differs most.

    Groups that are the dims of a grid of ranks make all of the grid agree, also in the words of a refusal.
    Communicates: one all-gather of a small object for each group with several ranks.
    """
    for group in groups:
        if group_size(group) > 1:
            proof = _worst(all_gather_object(proof, group))
    return proof


def _worst(proofs: Sequence[Proof]) -> Proof:
    not_fused = [proof for proof in proofs if not proof.fused]
    return not_fused[0] if not_fused else max(proofs, key=lambda proof: proof.largest_difference)

"""Total variation between a draft's distribution and that of the model it drafts for, and how often it is accepted.

With p of the draft (the student) and q of the target (the teacher), of each token

    total variation    1/2 sum |p - q| = 1 - sum min(p, q)      dz = p (s - sum p s),  s = sign(p - q) / 2

Speculative sampling accepts a token that the draft drew with probability `sum min(p, q)` (Leviathan et al., 2023), so
that total variation is what training a draft for it should minimise (Bebop, arXiv 2606.12370).
"""

from torch import Tensor

from megatron_ext.head.readouts.divergences.normalised_sides import NormalisedSides


class TotalVariation(NormalisedSides):
    """Total variation between a draft and its target over the whole vocabulary: `[...]`, fp32 (fp64 for fp64).

    1 less the rate at which speculative sampling accepts the draft's tokens.

    Args:
        teacher: the target; as for `KL`.

    Communicates, at several ranks: forward 1 small collective a chunk and 1 more beside the common one.
    """

    def summed(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        p = student.exp()
        return p * _side(student, teacher), (p - teacher.exp()).abs_()

    def value(self, first_T: Tensor, second_T: Tensor) -> Tensor:
        return second_T / 2

    def pulled(self, student: Tensor, teacher: Tensor, first_t1: Tensor) -> Tensor:
        return _side(student, teacher) - first_t1


class AcceptanceRate(TotalVariation):
    """`sum min(p, q)` of a draft and its target, else as `TotalVariation`, from which 1 it differs: `[...]`.

    Summed by itself: it keeps its digits where it is small, for a loss of its logarithm.
    """

    def summed(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        return super().summed(student, teacher)[0], student.minimum(teacher).exp()

    def value(self, first_T: Tensor, second_T: Tensor) -> Tensor:
        return second_T

    def pulled(self, student: Tensor, teacher: Tensor, first_t1: Tensor) -> Tensor:
        return first_t1 - _side(student, teacher)


def _side(student: Tensor, teacher: Tensor) -> Tensor:
    """Half the sign of what the draft's probability is above the target's; 0 where both are 0."""
    return (student > teacher).to(student.dtype).sub_((student < teacher).to(student.dtype)).div_(2)

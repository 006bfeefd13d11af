"""Jensen-Shannon divergence between a student's distribution and a teacher's; gradients reach the student.

With p of the student, q of the teacher, and m = (1 - b) p + b q, of each token

    (1 - b) KL(p | m) + b KL(q | m)                         dz = (1 - b) p ((log p - log m) - KL(p | m))

as TRL and Liger define the generalised divergence (Agarwal et al., 2023).
"""

import math
from typing import Any

import torch
from torch import Tensor

from megatron_ext.head.readouts.divergences.normalised_sides import NormalisedSides
from megatron_ext.head.validation.option_checks import check_number


def check_beta(beta: float) -> None:
    """Raises ValueError unless both distributions have a share of the mixture."""
    limits = "kl_divergence has the limits, 'forward' of 0 and 'reverse' of 1"
    check_number("beta", beta, "in (0, 1)", lambda x: 0 < x < 1, limits)


class JensenShannon(NormalisedSides):
    """Jensen-Shannon divergence of a student and a teacher over the whole vocabulary: `[...]`, fp32 (fp64 for fp64).

    Args:
        teacher: as for `KL`.
        beta: in (0, 1), the teacher's share of the mixture. Near 0 the result is `beta` times KL(teacher | student),
            near 1 `1 - beta` times KL(student | teacher).

    Communicates, at several ranks: forward 1 small collective a chunk and 1 more beside the common one.
    """

    def __init__(self, teacher: Any, beta: float = 0.5):
        check_beta(beta)
        super().__init__(teacher)
        self.beta = beta

    def summed(self, student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
        mixture = self._mixture(student, teacher)
        return _weighed(student, mixture), _weighed(teacher, mixture)

    def value(self, first_T: Tensor, second_T: Tensor) -> Tensor:
        return (1 - self.beta) * first_T + self.beta * second_T

    def pulled(self, student: Tensor, teacher: Tensor, first_t1: Tensor) -> Tensor:
        return (1 - self.beta) * (student - self._mixture(student, teacher) - first_t1)

    def _mixture(self, student: Tensor, teacher: Tensor) -> Tensor:
        """`logaddexp`, whose bits on a CPU depend on an element's place, of functions whose bits do not."""
        one, other = student + math.log1p(-self.beta), teacher + math.log(self.beta)
        largest = torch.maximum(one, other)
        below = torch.minimum(one, other).sub_(largest).nan_to_num_(0.0, 0.0, -torch.inf)  # of two -inf nan
        return largest + below.exp_().log1p_()


def _weighed(log_p: Tensor, mixture: Tensor) -> Tensor:
    """`p (log p - log m)`, 0 where p is 0."""
    p = log_p.exp()
    return (p * (log_p - mixture)).where(p > 0, 0.0)

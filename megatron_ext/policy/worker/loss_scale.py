"""A factor on the loss that keeps fp16 gradients from vanishing."""

import math
from collections.abc import Mapping

GROWTH_STEPS = 1000


class LossScale:
    """Loss scale without overflow: halved where gradients are not finite, doubled after good steps.

    Every rank sees the same norms, so that all have the same scale. Not `dynamic`: always 1. (Micikevicius et al.,
    "Mixed precision training", 2018.)
    """

    def __init__(self, dynamic: bool):
        self.value = 2.0**14 if dynamic else 1.0
        self._dynamic, self._good_steps = dynamic, 0

    def state_dict(self) -> dict[str, float]:
        """Empty unless it is dynamic: a scale of 1 is no place to begin for one that is."""
        if not self._dynamic:
            return {}
        return {"value": self.value, "good_steps": self._good_steps}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        if self._dynamic and state:
            self.value, self._good_steps = float(state["value"]), int(state["good_steps"])

    def overflowed(self, norm: float) -> bool:
        """Return whether a step with gradients of this norm must be left out since the scale was too large."""
        if not self._dynamic:
            return False
        if math.isfinite(norm):
            self._good_steps += 1
            if self._good_steps % GROWTH_STEPS == 0:
                self.value *= 2
            return False
        self._good_steps = 0
        self.value /= 2
        return self.value >= 1  # below that it is not the scale's fault

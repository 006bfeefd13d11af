"""Steps of two runs beside each other, stock and ours: how much they differ, and a table of both."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_NORMS_DIFFER = 10  # times as much as losses, which are means over tokens


@dataclass(frozen=True)
class RecordedStep:
    """One step of one rank; None for what the rank does not know, seconds of the first step among it.

    Attributes:
        loss: of all micro-batches.
        gradient_norm: before clipping.
        peak_mib: what was allocated at most.
        seconds: from the end of the step before.
        losses_fused: losses and read-outs of models without logits, from the first step on.
    """

    loss: float | None
    gradient_norm: float | None
    peak_mib: float | None
    seconds: float | None
    losses_fused: int = 0


def relative_difference(a: float, b: float) -> float:
    """The difference of two numbers relative to the first; 0 if both are NaN, infinite where one of them is."""
    if (math.isnan(a) and math.isnan(b)) or a == b:
        return 0.0
    difference = abs(a - b) / abs(a) if a else math.inf
    return difference if math.isfinite(difference) else math.inf


@dataclass(frozen=True)
class TwoRuns:
    """The steps of one rank in both runs, and how much their losses may differ, relatively."""

    stock: Sequence[RecordedStep]
    ours: Sequence[RecordedStep]
    tolerance: float

    @property
    def largest(self) -> tuple[float, float]:
        """The largest relative difference of a step's loss, and of its gradient norm; 0 where neither run has one."""
        return self._largest("loss"), self._largest("gradient_norm")

    @property
    def limits(self) -> tuple[float, float]:
        """The largest relative differences that are allowed: of a step's loss, and of its gradient norm."""
        return self.tolerance, _NORMS_DIFFER * self.tolerance

    @property
    def agreement(self) -> str:
        """The limits of what both runs have, in words."""
        numbers = zip(("loss", "gradient_norm"), ("losses", "gradient norms"), self.limits, strict=True)
        had = {name for step in self.stock for name, x in vars(step).items() if x is not None}
        return " and ".join(f"{words} within {limit:g}" for name, words, limit in numbers if name in had)

    @property
    def clipped(self) -> list[str]:
        """The numbers of two digits that a step's gradient norm is in both runs, as is one that was clipped."""
        found = set()
        for a, b in zip(self.stock, self.ours, strict=False):
            norms = [a.gradient_norm or 0.0, b.gradient_norm or 0.0]
            limit = f"{norms[0]:.2g}"
            if all(0 < x < math.inf and math.isclose(x, float(limit), rel_tol=1e-5) for x in norms):
                found.add(limit)
        return sorted(found)

    @property
    def differences(self) -> str:
        """The largest differences, in words."""
        loss, norm = self.largest
        return f"largest relative difference: loss {loss:.1e}, gradient norm {norm:.1e}"

    @property
    def fuses_nothing(self) -> bool:
        """Return whether this rank has losses, and none of the changed run was fused."""
        return any(step.loss is not None for step in self.ours) and not any(step.losses_fused for step in self.ours)

    @property
    def shows_nothing(self) -> bool:
        """Return whether no step has a loss or a gradient norm, as on an early stage whose optimizer skips steps."""
        return all(step.loss is step.gradient_norm is None for step in (*self.stock, *self.ours))

    def _largest(self, name: str) -> float:
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(self.stock, self.ours, strict=False)]
        found = [relative_difference(*pair) if None not in pair else math.inf for pair in pairs if pair != (None, None)]
        return max(found, default=0.0)

    @property
    def fault(self) -> str | None:
        """Return how the runs differ; None if they are the same within the tolerance."""
        if not self.stock or len(self.stock) != len(self.ours):
            return (
                f"the stock run took {len(self.stock)} steps of an optimizer, the other one {len(self.ours)}: "
                f"there is nothing to compare beyond the shorter one"
            )
        for name, found, limit in zip(("loss", "gradient norm"), self.largest, self.limits, strict=True):
            if found > limit:
                return f"the {name} of a step differs by {found:.1e}, and at most {limit:.1e} is allowed"
        return None

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("step", "loss", "", "gradient norm", "", "peak MiB", "", "ms", "")]
        rows.append(("", *("stock", "ours") * 4))
        for at, (a, b) in enumerate(zip(self.stock, self.ours, strict=False), 1):
            forms = {"loss": "#.7g", "gradient_norm": "#.6g", "peak_mib": ".0f"}
            cells = [_shown(getattr(step, name), form) for name, form in forms.items() for step in (a, b)]
            rows.append((str(at), *cells, *(_shown(s.seconds and 1e3 * s.seconds, ".0f") for s in (a, b))))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        if self.clipped:
            lines.append(f"gradient norms of {', '.join(self.clipped)} look clipped, which hides how gradients differ")
        return "\n".join([*lines, self.differences])


def _shown(x: float | None, form: str) -> str:
    return "-" if x is None else format(x, form)

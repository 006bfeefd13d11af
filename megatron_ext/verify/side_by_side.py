"""Steps of a stock run and of ours, side by side: how much they differ, a table of both, and a picture."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NORMS_DIFFER = 10  # gradient norms may differ by so many times as much as losses, which are means over tokens
_STOCK, _OURS = "#9aa5b1", "#0b6e4f"
_LEAST = 2.0**-26  # equal numbers are drawn here, where a log axis has no 0


@dataclass(frozen=True)
class RecordedStep:
    """One step of one rank; a number that the rank does not know is None, such as the seconds of the first step.

    Attributes:
        loss: the sum of the losses of all micro-batches.
        gradient_norm: the norm of the gradients before clipping.
        peak_mib: the most memory that was allocated.
        seconds: the time since the end of the step before.
        losses_fused: the number of losses and read-outs without logits so far.
    """

    loss: float | None
    gradient_norm: float | None
    peak_mib: float | None
    seconds: float | None
    losses_fused: int = 0


def relative_difference(a: float, b: float) -> float:
    """Return the difference of two numbers relative to the first; 0 if both are NaN, infinite if one of them is."""
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
        """Return the largest relative differences of a step's loss and gradient norm; 0 if neither run has one."""
        return self._largest("loss"), self._largest("gradient_norm")

    @property
    def limits(self) -> tuple[float, float]:
        """Return the largest relative differences allowed, of a step's loss and of its gradient norm."""
        return self.tolerance, _NORMS_DIFFER * self.tolerance

    @property
    def agreement(self) -> str:
        """Return, in words, the limits of the numbers that the stock run has."""
        numbers = zip(("loss", "gradient_norm"), ("losses", "gradient norms"), self.limits, strict=True)
        had = {name for step in self.stock for name, x in vars(step).items() if x is not None}
        return " and ".join(f"{words} within {limit:g}" for name, words, limit in numbers if name in had)

    @property
    def clipped(self) -> list[str]:
        """Return gradient norms that are the same number of two digits in both runs of a step, as if clipped to it."""
        found = set()
        for a, b in zip(self.stock, self.ours, strict=False):
            norms = [a.gradient_norm or 0.0, b.gradient_norm or 0.0]
            limit = f"{norms[0]:.2g}"
            if all(0 < x < math.inf and math.isclose(x, float(limit), rel_tol=1e-5) for x in norms):
                found.add(limit)
        return sorted(found)

    @property
    def differences(self) -> str:
        """Return, in words, the largest differences."""
        loss, norm = self.largest
        return f"largest relative difference: loss {loss:.1e}, gradient norm {norm:.1e}"

    @property
    def fuses_nothing(self) -> bool:
        """Return whether this rank has losses, and no loss of our run was fused."""
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
                f"the stock run took {len(self.stock)} steps of an optimizer, the other run {len(self.ours)}: "
                f"steps of one run alone cannot be compared"
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


def draw(runs: TwoRuns, file: Path) -> str:
    """Write a PNG of each step's loss, differences, memory and time; return words for the user: the file, or that
    matplotlib, which is optional, is missing."""
    try:
        from matplotlib.figure import Figure  # writes files, needs no screen
    except ImportError:
        return "no picture: matplotlib is not installed"
    picture = Figure(figsize=(10, 6), layout="constrained")
    panels = picture.subplots(2, 2)
    _both(panels[0, 0], runs, "loss", "loss")
    _both(panels[1, 0], runs, "peak_mib", "peak MiB")
    _both(panels[1, 1], runs, "seconds", "seconds of a step")
    for name, colour in (("loss", _OURS), ("gradient_norm", "#b4691f")):
        pairs = [(getattr(a, name), getattr(b, name)) for a, b in zip(runs.stock, runs.ours, strict=False)]
        found = [_LEAST if None in pair else max(relative_difference(*pair), _LEAST) for pair in pairs]
        panels[0, 1].plot(range(1, len(found) + 1), found, "o", color=colour, label=name.replace("_", " "))
    panels[0, 1].axhline(runs.tolerance, color="#7b8794", linestyle="--", label="tolerance of the loss")
    panels[0, 1].set(title="relative difference", yscale="log", xlabel="step")
    panels[0, 1].legend(frameon=False)
    file.parent.mkdir(parents=True, exist_ok=True)
    picture.savefig(file, dpi=120)
    return f"picture: {file}"


def _both(axes: Any, runs: TwoRuns, name: str, title: str) -> None:
    """Draw the numbers of both runs; missing ones leave a gap."""
    for label, steps, colour, width in (("stock", runs.stock, _STOCK, 5), ("ours", runs.ours, _OURS, 1.8)):
        values = [float("nan") if (x := getattr(step, name)) is None else x for step in steps]
        axes.plot(range(1, len(values) + 1), values, "o-", color=colour, linewidth=width, label=label)
    axes.set(title=title, xlabel="step")
    axes.legend(frameon=False)

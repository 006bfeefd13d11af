"""Draw two runs: losses, their differences, memory and time of each step. Needs matplotlib, which is optional."""

from pathlib import Path
from typing import Any

from megatron_ext.verify.side_by_side import TwoRuns, relative_difference

_STOCK, _OURS = "#9aa5b1", "#0b6e4f"
_LEAST = 2.0**-26  # equal numbers are drawn here, where a log axis has no 0


def draw(runs: TwoRuns, file: Path) -> str:
    """Write a PNG of the runs; return a sentence that says where, or why there is none."""
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
    """The numbers of both runs; those that are missing leave a gap."""
    for label, steps, colour, width in (("stock", runs.stock, _STOCK, 5), ("ours", runs.ours, _OURS, 1.8)):
        values = [float("nan") if (x := getattr(step, name)) is None else x for step in steps]
        axes.plot(range(1, len(values) + 1), values, "o-", color=colour, linewidth=width, label=label)
    axes.set(title=title, xlabel="step")
    axes.legend(frameon=False)

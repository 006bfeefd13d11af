"""Pictures of the head's time and memory, from the committed rows: `python -m benchmarks.plot`.

docs/figures/head_cache.png: both against `cache`. docs/figures/head_overview.png: both beside other heads, as
measured on a CPU and on an H200.
"""

import argparse
from pathlib import Path

from benchmarks.cases import GPU_CASES, MEGATRON, cpu_cases
from benchmarks.implementations import kept_by_default
from benchmarks.record import RESULTS, Row, read

FIGURES = Path(__file__).parent.parent / "docs" / "figures"
OURS, PEERS, TEXT, GRID = "#0b6e4f", "#9aa5b1", "#52606d", "#e6e8eb"
TIME, MEMORY = "time / unfused", "peak of the allocator"
PREFIX, DEFAULT = "ours, cache ", "ours, default"
STYLE = {
    "font.size": 9.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#7b8794",
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "xtick.color": TEXT,
    "ytick.color": TEXT,
}
# Heads that a reader knows: name in the rows to name in the pictures.
BESIDE = {MEGATRON: "Megatron unfused", "pytorch chunked": "PyTorch chunked"}
OVERVIEW = BESIDE | {"megatron fused": "Megatron fused", "liger": "Liger", "verl's algorithm": "verl's algorithm"}
OVERVIEW["cut-cross-entropy"] = "cut-cross-entropy"


def cache_figure(rows: list[Row], path: Path = FIGURES / "head_cache.png") -> Path:
    """Draw a column for each case: above the time over Megatron's unfused head, below the peak MiB beyond inputs."""
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.case for row in rows if row.metric == TIME))
    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(2.9 * len(names) + 0.6, 5.4), layout="constrained")
        panels = picture.subplots(2, len(names), sharex=True, squeeze=False)
        for column, name in enumerate(names):
            found = [row for row in rows if row.case == name]
            for axes, metric in zip(panels[:, column], (TIME, MEMORY), strict=True):
                _panel(axes, [row for row in found if row.metric == metric], first=column == 0)
            panels[0, column].set_title(name)
        panels[0, 0].set_ylabel("time, Megatron unfused = 1")
        panels[1, 0].set_ylabel("peak MiB, gradients included")
        picture.supxlabel("cache: fraction of the logits whose exponentials are kept", fontsize=9.5)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=90)
    return path


def _panel(axes, rows: list[Row], first: bool) -> None:
    own = sorted((float(row.impl.removeprefix(PREFIX)), row) for row in rows if row.impl.startswith(PREFIX))
    by_default = next((row.p50 for row in rows if row.impl == DEFAULT), None)
    caches = [cache for cache, _ in own]
    middle = [row.p50 for _, row in own]
    axes.fill_between(caches, [row.p20 for _, row in own], [row.p80 for _, row in own], color=OURS, alpha=0.18, lw=0)
    axes.plot(caches, middle, color=OURS, marker="o", linewidth=1.8, label="megatron_ext")
    if by_default is not None:
        axes.axhline(by_default, color=OURS, linewidth=1.2, linestyle=":", label="by default")
    for row in rows:
        if row.impl in BESIDE:
            axes.axhline(row.p50, color=PEERS, linewidth=1.2, linestyle="-" if row.impl == MEGATRON else "--")
            below = row.impl == MEGATRON  # and at the left: there our line is far above, or far below it
            axes.annotate(
                BESIDE[row.impl],
                (0.0, row.p50) if below else (0.5, row.p50),
                xytext=(0, -10 if below else 3),
                textcoords="offset points",
                ha="left" if below else "center",
                fontsize=8,
                color=TEXT,
            )
    drawn = [row.p80 for _, row in own] + [row.p50 for row in rows if row.impl in BESIDE]
    axes.set_ylim(0, 1.12 * max(drawn))
    if first:
        axes.legend(frameon=False, fontsize=8, loc="lower center")


def overview_figure(on_cpu: list[Row], on_gpu: list[Row], path: Path = FIGURES / "head_overview.png") -> Path:
    """Draw heads by time (to the right) and memory (upwards), Megatron's unfused head at (1, 1)."""
    import matplotlib
    from matplotlib.figure import Figure

    panels = (
        ("Two CPU cores", cpu_cases()[1], on_cpu),
        ("One H200", GPU_CASES[0], on_gpu),
        ("One H200, a shard of 8", GPU_CASES[1], on_gpu),
    )
    with matplotlib.rc_context(STYLE | {"axes.titlesize": 9.5}):
        picture = Figure(figsize=(11.4, 3.9), layout="constrained")
        for axes, (title, case, rows) in zip(picture.subplots(1, 3), panels, strict=True):
            found: dict[str, dict[str, float]] = {}
            for row in rows:
                known = row.impl in OVERVIEW or row.impl.startswith(("ours, cache", "ours, default"))
                if row.case == case.name and row.metric in ("time", MEMORY) and known:
                    found.setdefault(row.impl, {})[row.metric] = row.p50
            places = {name: (by["time"], by[MEMORY]) for name, by in found.items() if len(by) == 2}
            _places(axes, places)
            sizes = f"T {case.tokens}, D {case.width}, V {case.vocab}\ndefault: cache {kept_by_default(case):.3g}"
            axes.set_title(f"{title}\n{sizes}")
            axes.set_xlabel("time, Megatron unfused = 1 (bf16)")
        picture.axes[0].text(0.05, 0.55, "in green: megatron_ext", color=OURS, fontsize=9)
        picture.axes[0].set_ylabel("peak memory, Megatron unfused = 1")
        picture.savefig(path, dpi=110)
    return path


# The least vertical distance of labels whose points are closer than the second number horizontally, in axes' units.
_APART, _TOGETHER = 0.075, 0.5


def _places(axes, places: dict[str, tuple[float, float]]) -> None:
    """Draw a point for each head, ours in colour, with a label that is pushed down where it would lie over another."""
    seconds, peak = places[MEGATRON]
    labels: list[tuple[float, float]] = []
    for name, (x, y) in sorted(places.items(), key=lambda place: -place[1][1]):
        own = name.startswith("ours, ")
        color, label = (OURS, name.removeprefix("ours, ")) if own else (TEXT, OVERVIEW[name])
        axes.plot(x / seconds, y / peak, "o", color=OURS if own else PEERS, markersize=8 if own else 6)
        at = min([y / peak, *(above - _APART for right, above in labels if abs(right - x / seconds) < _TOGETHER)])
        labels.append((x / seconds, at))
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
        axes.annotate(
            label,
            (x / seconds, y / peak),
            xytext=(x / seconds + 0.1, at),
            ha="left",
            va="center",
            fontsize=8,
            color=color,
            arrowprops=line,
        )
    widest = max(x for x, _ in places.values()) / seconds
    axes.set_xlim(0, 1.08 * max(widest, 1.9))
    axes.set_ylim(0, 1.15)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / "cpu.csv")
    measured = read(parser.parse_args().results)
    print(cache_figure(measured))
    print(overview_figure(measured, read(RESULTS / "nvidia-h200.csv")))


if __name__ == "__main__":
    main()

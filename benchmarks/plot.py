"""Time and memory of our head against `cache`, from a results file: docs/figures/head_cache.png."""

import argparse
from pathlib import Path

from benchmarks.cases import MEGATRON
from benchmarks.record import RESULTS, Row, read

FIGURE = Path(__file__).parent.parent / "docs" / "figures" / "head_cache.png"
OURS, PEERS, TEXT, GRID = "#0b6e4f", "#9aa5b1", "#52606d", "#e6e8eb"
TIME, MEMORY = "time / unfused", "peak of the allocator"
PREFIX = "ours, cache "
# Beside the line: the ones a reader knows.
BESIDE = {MEGATRON: "Megatron unfused", "pytorch chunked": "PyTorch chunked"}


def cache_figure(rows: list[Row], path: Path = FIGURE) -> Path:
    """One column a case: above the time over Megatron's unfused head, below the peak MiB beyond the inputs."""
    import matplotlib
    from matplotlib.figure import Figure

    names = list(dict.fromkeys(row.case for row in rows if row.metric == TIME))
    style = {
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
    with matplotlib.rc_context(style):
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
    caches = [cache for cache, _ in own]
    middle = [row.p50 for _, row in own]
    axes.fill_between(caches, [row.p20 for _, row in own], [row.p80 for _, row in own], color=OURS, alpha=0.18, lw=0)
    axes.plot(caches, middle, color=OURS, marker="o", linewidth=1.8, label="megatron_ext")
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="?", default=RESULTS / "cpu.csv")
    print(cache_figure(read(parser.parse_args().results)))


if __name__ == "__main__":
    main()

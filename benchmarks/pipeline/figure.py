"""The picture docs/figures/pipeline.png of timelines: one row for each stage, passes in colours."""

from pathlib import Path

from benchmarks.pipeline.schedules import Timeline
from benchmarks.plot import TEXT
from megatron_ext.experimental.pipeline_vocabulary.order.pass_order import Kind

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "pipeline.png"
# By kind of pass: (colour, legend). Passes of the embedding are too short to be seen.
COLOURS = {
    Kind.FORWARD: ("#9ecae1", "layers, forward"),
    Kind.BACKWARD: ("#4a7fb5", "layers, backward"),
    Kind.PRODUCTS: ("#f4a259", "head, first pass"),
    Kind.WEIGHT: ("#c8553d", "head, second pass"),
}


def draw(timelines: dict[str, Timeline], path: Path = FIGURE) -> Path:
    """Draw one panel for each schedule, all with the same time axis; numbers in passes are micro-batches."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    longest = max(timeline.seconds for timeline in timelines.values())
    style = {"font.size": 9.5, "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.titleweight": "bold"}
    with matplotlib.rc_context(style):
        rows = [len(timeline.runs) for timeline in timelines.values()]
        picture = Figure(figsize=(13, 0.34 * sum(rows) + 0.55 * len(rows) + 0.9), layout="constrained")
        panels = picture.subplots(len(rows), 1, sharex=True, squeeze=False, height_ratios=rows)[:, 0]
        for axes, (name, timeline) in zip(panels, timelines.items(), strict=True):
            _panel(axes, timeline, longest)
            axes.set_title(f"{name}: {timeline.seconds * 1e3:.0f} ms, {timeline.bubble * 100:.0f} % idle")
        panels[-1].set_xlabel("ms, simulated")
        patches = [Patch(color=colour, label=label) for colour, label in COLOURS.values()]
        picture.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.savefig(path, dpi=100)
    return path


def _panel(axes, timeline: Timeline, longest: float) -> None:
    for stage, line in enumerate(timeline.runs):
        for what, start, end in line:
            if what.kind not in COLOURS:
                continue
            colour, _ = COLOURS[what.kind]
            axes.barh(
                stage,
                (end - start) * 1e3,
                left=start * 1e3,
                height=0.86,
                color=colour,
                edgecolor="white",
                linewidth=0.4,
            )
            if end - start > longest / 75:
                axes.text(
                    (start + end) * 500, stage, str(what.micro_batch + 1), ha="center", va="center", fontsize=7.5,
                    color="white" if what.kind is not Kind.FORWARD else TEXT,
                )  # fmt: skip
    axes.set_xlim(0, longest * 1e3)
    axes.set_ylim(len(timeline.runs) - 0.45, -0.55)
    axes.set_yticks(range(len(timeline.runs)), [f"stage {at}" for at in range(len(timeline.runs))])
    axes.tick_params(length=0, colors=TEXT)
    for side in ("top", "right", "left", "bottom"):
        axes.spines[side].set_visible(False)

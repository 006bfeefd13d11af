"""Two runs side by side: a table to read and a picture to look at."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from megatron_ext.verify.side_by_side import relative_difference

matplotlib.use("Agg")  # this backend writes files and needs no screen

STOCK, OURS, GRID = "#9aa5b1", "#0b6e4f", "#e6e8eb"


def largest_difference(stock: dict, ours: dict) -> float:
    """Return the largest relative difference of a step's loss between the two runs."""
    return max(map(relative_difference, stock["losses"], ours["losses"]))


def table(stock: dict, ours: dict) -> str:
    """Return a table of the runs' metrics, which `pretrain_gpt.py --metrics` has written, in aligned columns."""
    fp32 = stock["head"], ours["head"], ours["head_least_memory"]
    bf16 = stock["head_bf16"], ours["head_bf16"], ours["head_bf16_least_memory"]
    rows = [
        ("", "Megatron-Core", "megatron_ext", "least memory"),
        ("final loss", f"{stock['losses'][-1]:.5f}", f"{ours['losses'][-1]:.5f}", ""),
        ("largest difference of a step's loss", "", f"{largest_difference(stock, ours):.1e}", ""),
        ("tokens/s", f"{stock['tokens_per_s']:.0f}", f"{ours['tokens_per_s']:.0f}", ""),
        ("head step in bf16, peak MiB", *(f"{m['peak_mib']:.1f}" for m in bf16)),
        ("head step in bf16, ms", *(f"{m['time_ms']:.0f}" for m in bf16)),
        ("head step in fp32, peak MiB", *(f"{m['peak_mib']:.1f}" for m in fp32)),
        ("head step in fp32, ms", *(f"{m['time_ms']:.0f}" for m in fp32)),
        ("collectives of a head call", *(f"{m['collectives']}" for m in fp32)),
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]).rstrip() for row in rows]
    return "\n".join([lines[0], "─" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


def gained(stock: dict, ours: dict) -> str:
    """Return a sentence on time, memory and collectives of our head compared with Megatron-Core's."""
    theirs, quick, lean = stock["head_bf16"], ours["head_bf16"], ours["head_bf16_least_memory"]

    def of(cost: dict, metric: str) -> str:
        return f"{cost[metric] / theirs[metric]:.2f}"

    return (
        f"In bf16 the head took {of(quick, 'time_ms')} of Megatron-Core's time in {of(quick, 'peak_mib')} of its "
        f"memory, or {of(lean, 'time_ms')} in {of(lean, 'peak_mib')}, with {quick['collectives']} collectives instead "
        f"of {theirs['collectives']}; no step's loss differs by more than {largest_difference(stock, ours):.1e}."
    )


def figure(stock: dict, ours: dict, subtitle: str, path: Path) -> None:
    """Draw both loss curves, their relative difference, and the head's memory, as a PNG at `path`."""
    style = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#7b8794",
        "axes.titlesize": 11,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "axes.titlepad": 10,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "grid.color": GRID,
        "xtick.color": "#52606d",
        "ytick.color": "#52606d",
    }
    with matplotlib.rc_context(style):
        picture = Figure(figsize=(11, 5.4), layout="constrained")
        panels = picture.subplot_mosaic(
            [["loss", "memory"], ["difference", "memory"]], width_ratios=[1.9, 1], height_ratios=[2.6, 1]
        )
        _losses(panels["loss"], stock, ours)
        _differences(panels["difference"], stock, ours)
        _memory(panels["memory"], stock, ours)
        panels["loss"].sharex(panels["difference"])
        panels["loss"].tick_params(labelbottom=False)
        picture.suptitle(subtitle, x=0.008, ha="left", fontsize=9.5, color="#52606d")
        picture.savefig(path, dpi=160)


def _losses(axes, stock: dict, ours: dict) -> None:
    steps = range(1, len(stock["losses"]) + 1)
    axes.plot(
        steps, stock["losses"], color=STOCK, linewidth=6, alpha=0.75, label="Megatron-Core", solid_capstyle="round"
    )
    axes.plot(steps, ours["losses"], color=OURS, linewidth=1.8, label="megatron_ext")
    axes.set_title("Loss: the same run twice")
    axes.set_ylabel("loss per token")
    axes.legend(frameon=False)


def _differences(axes, stock: dict, ours: dict) -> None:
    steps = range(1, len(stock["losses"]) + 1)
    differences = [abs(a - b) / abs(a) for a, b in zip(stock["losses"], ours["losses"], strict=True)]
    smallest = 2.0**-24  # half an fp32 rounding; equal losses are drawn here, where a log axis has no 0
    axes.plot(steps, [max(d, smallest) for d in differences], ".", color=OURS, markersize=5)
    axes.axhline(2.0**-23, color="#7b8794", linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate("one fp32 rounding", (1, 2.0**-23), (0, 3), textcoords="offset points", fontsize=8, color="#52606d")
    axes.set_yscale("log")
    axes.set_ylim(3e-8, max(1e-5, 2 * max(differences)))
    axes.set_title("Relative difference of each step's loss")
    axes.set_xlabel("step")


def _memory(axes, stock: dict, ours: dict) -> None:
    bars = {
        "Megatron-Core": (stock["head_bf16"], STOCK),
        "megatron_ext": (ours["head_bf16"], OURS),
        "megatron_ext\nleast memory": (ours["head_bf16_least_memory"], "#57b894"),
    }
    peaks = [cost["peak_mib"] for cost, _ in bars.values()]
    drawn = axes.bar(list(bars), peaks, color=[color for _, color in bars.values()], width=0.62)
    captions = [
        f"{cost['peak_mib']:.1f} MiB\n{cost['time_ms']:.0f} ms\n{cost['collectives']} collectives"
        for cost, _ in bars.values()
    ]
    axes.bar_label(drawn, captions, padding=4, fontsize=8.5)
    axes.set_ylim(0, 1.25 * max(peaks))
    axes.set_title("Head step in bf16: peak memory")
    axes.set_ylabel("MiB that one rank allocates")

"""`python -m benchmarks.pipeline`: simulates a training step of pipelines under each schedule. Needs no GPU.

Prints for each case and schedule the step, the idle part, memory and bytes sent, stage by stage; writes the rows of
benchmarks/results/pipeline.csv and draws docs/figures/pipeline.png. Times are estimates: `costs.py` says of what.
"""

import argparse
from dataclasses import replace
from pathlib import Path

from tqdm import tqdm

from benchmarks import record
from benchmarks.pipeline.costs import LINKS, WORDS_256K, Setup, setups
from benchmarks.pipeline.figure import FIGURE, draw
from benchmarks.pipeline.schedules import SCHEDULES, Timeline
from megatron_ext.head.call.gpu_properties import DEVICES

CSV = record.RESULTS / "pipeline.csv"
STEP, GAIN, BUSIEST, BUBBLE, LOAD = "step", "throughput / 1F1B", "busiest stage, a micro-batch", "idle", "link busy"
SENT = "sent by a rank for a micro-batch"
LEAST_STATE, MOST_STATE = "weights, gradients, optimizer: least", "weights, gradients, optimizer: most"
ACTIVATIONS, BOTH, IN_FLIGHT = "activations: most", "both together: most", "micro-batches in flight"

_FORMS = {STEP: ".0f", GAIN: ".2f", BUSIEST: ".1f", BUBBLE: ".1f", LEAST_STATE: ".1f", MOST_STATE: ".1f"}
_FORMS |= {ACTIVATIONS: ".1f", BOTH: ".1f", IN_FLIGHT: ".3g", SENT: ".0f", LOAD: ".1f"}

# Ours, and the best redistribution of layers beside it.
BESIDE_BEST = (("ours", "1F1B, layers redistributed"), ("ours, interleaved", "interleaved, layers redistributed"))


def rows(setup: Setup, timelines: dict[str, Timeline]) -> record.Rows:
    """Return the rows of one case, which are committed."""
    plain, made = timelines["1F1B"].seconds, []
    for name, timeline in timelines.items():
        stages = timeline.stages
        states = [stage.state_bytes for stage in stages]
        values = [
            (STEP, "ms", timeline.seconds * 1e3),
            (GAIN, "1", plain / timeline.seconds),
            (BUSIEST, "ms", max(timeline.busy_seconds) / setup.micro_batches * 1e3),
            (BUBBLE, "%", timeline.bubble * 100),
            (LOAD, "%", timeline.link_load * 100),
            (SENT, "MB", timeline.sent_bytes / 1e6),
            (LEAST_STATE, "GB", min(states) / 1e9),
            (MOST_STATE, "GB", max(states) / 1e9),
            (ACTIVATIONS, "GB", max(stage.activation_bytes for stage in stages) / 1e9),
            (BOTH, "GB", max(stage.state_bytes + stage.activation_bytes for stage in stages) / 1e9),
            (IN_FLIGHT, "1", max(stage.in_flight for stage in stages)),
        ]
        made += [(name, metric, unit, [value]) for metric, unit, value in values]
    return made


def text(setup: Setup, timelines: dict[str, Timeline]) -> str:
    """Return one case as text to read: a block for each schedule, with a column for each stage."""
    lines = [f"{setup.name}: {setup.micro_batches} micro-batches of {setup.tokens} tokens, {setup.device.name}"]
    lines += [f"  {remark}" for remark in account_for_options(setup)]
    for name, timeline in timelines.items():
        lines.append(
            f"  {name}: {timeline.seconds * 1e3:.0f} ms, {timeline.bubble * 100:.1f} % idle; each rank sends "
            f"{timeline.sent_bytes / 1e6:.0f} MB for a micro-batch, its link is busy {timeline.link_load * 100:.1f} %"
        )
        table = {
            "layers": [str(sum(layers)) for layers in timeline.layers],
            "weights, gradients, optimizer, GB": [f"{stage.state_bytes / 1e9:.1f}" for stage in timeline.stages],
            "activations, GB": [f"{stage.activation_bytes / 1e9:.1f}" for stage in timeline.stages],
            "micro-batches in flight": [f"{stage.in_flight:.1f}" for stage in timeline.stages],
        }
        lines += [f"    {what:34}" + "".join(f"{value:>6}" for value in values) for what, values in table.items()]
    return "\n".join(lines)


def account_for_options(setup: Setup) -> list[str]:
    """Return sentences on the effect of Megatron's options that count embedding or loss as a layer each."""
    said = []
    for options, more in (("one of account_for_{embedding,loss}_in_pipeline_split", 1), ("both of them", 2)):
        layers = setup.model.layers + more
        if layers % setup.stages:
            said.append(f"{options}: refused by Megatron, {layers} does not divide by {setup.stages}")
        else:
            said.append(f"{options}: {layers // setup.stages} a stage, counting those")
    return said


def summary(path: Path) -> str:
    """Return the rows in `path` as Markdown tables, those of docs/pipeline.md: gains of all cases, all rows of some."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in record.read(path):
        found.setdefault(row.case, {}).setdefault(row.impl, {})[row.metric] = row.p50
    first, *others = SCHEDULES
    over = [f"{mine} / {best}" for mine, best in BESIDE_BEST]
    gains = [[case, *_gains(one)] for case, one in found.items()]
    tables = [record.markdown(["", f"{first}, ms", *others, *over], gains)]
    heads = "|step, ms|x 1F1B|busiest, ms|idle, %|state, GB|activations, GB|both, GB|in flight|sent, MB|link, %"
    for case, schedules in found.items():
        if case.endswith("400 Gb/s"):
            cells = [[name, *_cells(values)] for name, values in schedules.items()]
            tables.append(f"**{case}**\n\n" + record.markdown(heads.split("|"), cells))
    return "\n\n".join(tables)


def _gains(schedules: dict[str, dict[str, float]]) -> list[str]:
    first, *others = schedules.values()
    over = [schedules[best][STEP] / schedules[mine][STEP] for mine, best in BESIDE_BEST]
    return [f"{first[STEP]:.0f}", *(f"{gain:.2f}" for gain in [*(values[GAIN] for values in others), *over])]


def _cells(values: dict[str, float]) -> list[str]:
    cells = {metric: f"{values[metric]:{form}}" for metric, form in _FORMS.items()}
    least = cells.pop(LEAST_STATE)
    if least != cells[MOST_STATE]:
        cells[MOST_STATE] = f"{least} to {cells[MOST_STATE]}"
    return [*cells.values()]


def figure(path: Path) -> Path:
    """Draw the case with the largest head, with few micro-batches."""
    setup = Setup(WORDS_256K, 4, 1, 2, 8, LINKS["400 Gb/s"])
    shown = ("1F1B", "1F1B, layers redistributed", "ours", "ours, interleaved")
    return draw({name: SCHEDULES[name](setup) for name in shown}, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", default="", help="only those whose name contains this, as 'PP8'; with --out")
    parser.add_argument("--device", choices=list(DEVICES), default="H200")
    parser.add_argument("--tokens", type=int, default=8192, help="of a micro-batch: one sequence")
    parser.add_argument("--batches-per-stage", type=int, default=4, help="micro-batches of a step / pipeline stages")
    parser.add_argument("--layer-rate", type=float, default=0.7, help="of layers / that of a large matrix product")
    parser.add_argument("--data-parallel", type=int, default=0, help="ranks that share the optimizer's state; 0: none")
    parser.add_argument("--out", type=Path, help="a CSV (default: that of the repository, unless an option is given)")
    parser.add_argument("--figure", type=Path, help="a picture (default: that of the repository, as for --out)")
    options = parser.parse_args()
    given = {name: value for name, value in vars(options).items() if value != parser.get_default(name)}
    out = options.out or (None if given else CSV)
    origin = replace(
        record.Origin.here("cpu"), device=f"simulated for {options.device}", versions="", commit="", date=""
    )
    known = setups(
        options.batches_per_stage,
        tokens=options.tokens,
        layer_rate=options.layer_rate,
        device=DEVICES[options.device],
        data_parallel=options.data_parallel,
    )
    chosen = [setup for setup in known if options.cases in setup.name]
    for setup in tqdm(chosen, "pipelines", leave=False, dynamic_ncols=True, disable=None):
        timelines = {name: schedule(setup) for name, schedule in SCHEDULES.items()}
        tqdm.write(text(setup, timelines) + "\n")
        if out is not None:
            record.write(out, [origin.row(setup.name, *row) for row in rows(setup, timelines)])
    print(f"{len(chosen)} pipelines simulated" + ("" if out is None else f", rows in {out}"))
    if options.figure or not given:
        print(f"drawn: {figure(options.figure or FIGURE)}")


if __name__ == "__main__":
    main()

"""`python -m benchmarks.run plan`: what the head would launch on a GPU, launch by launch, and how long that might take.

The head's own code runs on fake tensors (`launches.py`), so the rows change when it does. Times are estimates from the
table in `megatron_ext/head/call/gpu_properties.py`: matrix products by whole waves of tiles, the rest by bytes.
Beside them stand the times of the same launches at the limit of the card's power, and measured times.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import gpu_reads, record
from benchmarks.cases import GPU_CASES, Case
from benchmarks.implementations import MEAN, OURS, UNFUSED, Implementation, fused_epilogue, kept_by_default, of_bits
from benchmarks.launches import Launch, Plan, planned
from benchmarks.measure import empty
from benchmarks.meter import measure
from megatron_ext.head import LmHead, LogProbs
from megatron_ext.head.call.gpu_properties import DEVICES, Device
from megatron_ext.memory.byte_counter import fake_world

# The second case was measured on a GPU for B with `bits="tensor_parallel"`: one rank sums all eight leaves.
A, EIGHT_LEAVES = GPU_CASES
B = Case("B, one rank of 8", 16384, 8192, 152064, 8, torch.bfloat16)
CASES = [
    A,
    B,
    Case("32768 x 4096 x 128256", 32768, 4096, 128256, 1, torch.bfloat16),
    Case("16384 x 4096 x 131072, one rank of 8", 16384, 4096, 131072, 8, torch.bfloat16),
    Case("2048 x 4096 x 131072", 2048, 4096, 131072, 1, torch.bfloat16),
    Case("8192 x 5120 x 151936, one rank of 4", 8192, 5120, 151936, 4, torch.bfloat16),
    Case("4096 x 4096 x 50257", 4096, 4096, 50257, 1, torch.bfloat16),
    Case("8192 x 2048 x 131072", 8192, 2048, 131072, 1, torch.bfloat16),
    Case("8192 x 2048 x 131072, one rank of 8", 8192, 2048, 131072, 8, torch.bfloat16),
    Case("8192 x 4096 x 262144", 8192, 4096, 262144, 1, torch.bfloat16),
]
TENSOR_PARALLEL = of_bits("tensor_parallel")
WHOLE, HALF, NONE, DEFAULT = OURS
PEERS = (fused_epilogue(1), fused_epilogue(0), of_bits("batch"), TENSOR_PARALLEL, UNFUSED)
MILLISECONDS, FLOOR, ABOVE = "planned time", "floor", "above the floor"
EPILOGUES, WORST = "of it epilogues", "planned time, worst labels"
SUSTAINED, ENERGY, MEASURED = "time at 700 W", "energy", "measured / time at 700 W"
LOG_PROBS = "log-probabilities"
BESIDE, PEAK, LAUNCHES = "beside the products / (T V / R)", "peak / (T V / R)", "launches"


def plan(
    case: Case, head: Implementation, device: Device = DEVICES["H200"], worst_labels: bool = False
) -> tuple[Plan, int]:
    """Plan forward and backward of one rank of a head made of torch's operators and our kernels; return the plan and
    the peak of bytes beyond the inputs, with both gradients."""
    with (
        fake_world(1) if case.ranks == 1 else nullcontext(),
        planned(device, case.ranks, worst_labels) as (recorder, group),
    ):
        inputs = empty(case)
        upstream_T = torch.empty(case.tokens)
        build = head.build(case, group)
        with torch.autograd.set_multithreading_enabled(False), measure() as costs, recorder:
            loss = build(*inputs)
            recorder.phase = "backward"
            given = upstream_T if loss.dim() else upstream_T[0]
            torch.autograd.grad(loss, inputs[:2], given)  # `backward` would copy fake gradients into `.grad`
    return recorder.plan, costs.peak_bytes


def floor_seconds(case: Case, head: Implementation, device: Device) -> float:
    """Return the seconds of the products alone at the device's rate: 6 NVH if all exponentials are cached, up to 8."""
    products = 8 - 2 * kept_by_default(case) if head.products is None else head.products
    return products * case.nvh / device.flops


def folded(launches: Iterable[Launch]) -> Iterator[tuple[Launch, int]]:
    """Yield each kind of launch, in order of its first launch, as one launch with the bytes and times of all of them,
    and their number: launches repeat in the loop over chunks."""
    kinds: dict[tuple[str, str, str], list[Launch]] = defaultdict(list)
    for launch in launches:
        kinds[launch.phase, launch.name, launch.shapes].append(launch)
    for found in kinds.values():
        totals = {
            name: sum(getattr(launch, name) for launch in found)
            for name in ("read", "written", "flops", "waves", "seconds", "epilogue")
        }
        yield replace(found[0], **totals), len(found)


def rows(case: Case, head: Implementation, device: Device = DEVICES["H200"]) -> record.Rows:
    """Return the rows of a case and head, which are committed: totals, then rows for each kind of launch, in order."""
    found, peak = plan(case, head, device)
    impl, logits = f"{head.name}, {device.name}", case.tokens * case.columns
    floor = floor_seconds(case, head, device)
    made: record.Rows = [
        (impl, MILLISECONDS, "ms", [found.seconds * 1e3]),
        (impl, FLOOR, "ms", [floor * 1e3]),
        (impl, ABOVE, "%", [(found.seconds / floor - 1) * 100]),
        (impl, EPILOGUES, "ms", [sum(launch.epilogue for launch in found.launches) * 1e3]),
        (impl, WORST, "ms", [plan(case, head, device, worst_labels=True)[0].seconds * 1e3]),
        *_powered(impl, found, measured_rows(case, head.name, device)),
        (impl, BESIDE, "bytes", [found.elementwise_bytes / logits]),
        (impl, PEAK, "bytes", [peak / logits]),
        (impl, LAUNCHES, "1", [float(len(found.launches))]),
    ]
    for at, (launch, times) in enumerate(folded(found.launches), 1):
        shapes = launch.shapes.replace(",", " ")
        name = f"{at:02d} {launch.phase}: {launch.name} {shapes}" + (f" x{times}" if times > 1 else "")
        made.append((impl, name, "ms", [launch.seconds * 1e3]))
    return made


def _powered(impl: str, found: Plan, measured: Iterable[record.Row]) -> record.Rows:
    """Return the rows at the limit of an H200's power, and the measured times divided by those."""
    if found.device.name != "H200":
        return []
    milliseconds = found.sustained_seconds * 1e3
    return [
        (impl, SUSTAINED, "ms", [milliseconds]),
        (impl, ENERGY, "J", [found.joules]),
        *((impl, MEASURED, "1", [row.p50 / milliseconds]) for row in measured),
    ]


def reads(case: Case, device: Device = DEVICES["H200"]) -> dict[str, Plan]:
    """Plan the read-outs of `gpu_reads.py` on one rank, whose shard is taken for the whole vocabulary."""
    found = {}
    asks: dict[str, Any] = {name: asked for name, (asked, _) in gpu_reads.READS.items()}
    asks[LOG_PROBS] = asks[f"{LOG_PROBS}, fused epilogue"] = lambda y: [LogProbs(y)]
    for name, asked in asks.items():
        with planned(device, 1) as (recorder, _), torch.no_grad(), recorder:
            x_TD, w_VD, labels_T = empty(case)
            LmHead(w_VD, fused_epilogue="fused" in name).read(x_TD, *asked(labels_T))
        found[f"read: {name}"] = recorder.plan
    return found


def read_rows(case: Case, device: Device) -> record.Rows:
    """Return the total rows of the read-outs, whose passes have changed since they were measured."""
    made: record.Rows = []
    for name, found in reads(case, device).items():
        impl = f"{name}, {device.name}"
        made += [(impl, MILLISECONDS, "ms", [found.seconds * 1e3]), *_powered(impl, found, ())]
    return made


def text(case: Case, head: Implementation, device: Device = DEVICES["H200"]) -> str:
    """Return the launches of one case as text to read, and the times measured on that device, if there are any."""
    found, peak = plan(case, head, device)
    floor = floor_seconds(case, head, device)
    lines = [
        f"{case.name}, {head.name}, {device.name}",
        "     ms      GB read  written   TFLOP  waves  launch",
    ]
    for launch, times in folded(found.launches):
        count = f" x{times}" if times > 1 else ""
        lines.append(
            f"{launch.seconds * 1e3:8.3f} {launch.read / 1e9:10.3f} {launch.written / 1e9:8.3f} "
            f"{launch.flops / 1e12:7.2f} {launch.waves / times:6.2f}  {launch.phase} {launch.name}{count} "
            f"{launch.shapes}"
        )
    logits = case.tokens * case.columns
    lines.append(
        f"{found.seconds * 1e3:8.3f} in all, {(found.seconds / floor - 1) * 100:.1f} % above the floor of "
        f"{floor * 1e3:.3f}; {found.elementwise_bytes / logits:.2f} bytes a logit beside the products; peak "
        f"{peak / logits:.2f} bytes a logit; {len(found.launches)} launches"
    )
    lines += [f"measured on {row.device}: {row.p50:.3f} ms" for row in measured_rows(case, head.name, device)]
    return "\n".join(lines)


def summary(path: Path) -> str:
    """Return the totals of the rows in `path` as a Markdown table, that of docs/head.md."""
    metrics = (MILLISECONDS, EPILOGUES, WORST, FLOOR, ABOVE, BESIDE, PEAK, LAUNCHES)
    heads = "T x D x V|ours by `cache`, or another|ms|of it epilogues|with worst labels|floor|above, %"
    heads += "|bytes a logit beside products|peak bytes a logit|launches"
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in record.read(path):
        if row.impl.startswith("read: "):
            continue
        head = row.impl.rsplit(", ", 1)[0].removeprefix("ours, ").removeprefix("cache ")
        found.setdefault((row.case, head), {})[row.metric] = row.p50
    lines = [
        [*names, *(f"{totals[metric]:.2f}" for metric in metrics[:-1]), f"{totals[LAUNCHES]:.0f}"]
        for names, totals in found.items()
    ]
    return record.markdown(heads.split("|"), lines)


def heads(case: Case) -> list[Implementation]:
    """Return our head at each cache, also by default and for a mean loss if the default is not 1, and for A and B the
    peers."""
    if case == EIGHT_LEAVES:
        return [TENSOR_PARALLEL]
    found = [WHOLE, HALF, NONE] if case in (A, B) else [WHOLE]
    if kept_by_default(case) < 1:
        found += [DEFAULT, MEAN]
    return [*found, *PEERS] if case in (A, B) else found


def main(out: Path | None, device: Device) -> None:
    """Print the launches of every case, and write their rows (to benchmarks/results/plan.csv for the H200)."""
    out = out or (record.RESULTS / "plan.csv" if device.name == "H200" else None)
    origin = replace(record.Origin.here("cpu"), device=f"planned for {device.name}", commit="", date="")
    for case in (*CASES, EIGHT_LEAVES):
        for head in heads(case):
            print(text(case, head, device) + "\n", flush=True)
            if out is not None:
                record.write(out, [origin.row(case.name, *row) for row in rows(case, head, device)], by=record.ONE_HEAD)
        if case in (A, B) and out is not None:
            record.write(out, [origin.row(case.name, *row) for row in read_rows(case, device)], by=record.ONE_HEAD)


def measured_rows(case: Case, name: str, device: Device) -> list[record.Row]:
    """Return the times measured on that device, from files named for it; none for a rank with one of many leaves."""
    if name == TENSOR_PARALLEL.name and case.ranks > 1:
        return []
    sizes = case.tokens, case.width, case.columns
    measured = [one.name for one in GPU_CASES if (one.tokens, one.width, one.columns) == sizes]
    return [
        row
        for path in sorted(record.RESULTS.glob(f"*{device.name.lower()}*.csv"))
        for row in record.read(path)
        if row.impl == name and row.metric == "time" and row.case in measured
    ]

"""Results as rows, one for each number, in one CSV for each kind of machine."""

import csv
import hashlib
import os
import platform
import re
import shutil
import statistics
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from datetime import date
from importlib import metadata
from operator import attrgetter
from pathlib import Path

import torch

RESULTS = Path(__file__).parent / "results"
Rows = list[tuple[str, str, str, list[float]]]  # implementation, metric, unit, values
Found = tuple[str, Rows, list[str]]  # a case, its rows, and remarks on it
ONE_HEAD = ("case", "impl")  # the columns that are equal in all rows of one head
MEASURED = ("megatron_ext/**/*.py", "benchmarks/*.py")  # the code that is measured


@dataclass(frozen=True)
class Row:
    case: str
    impl: str
    metric: str
    unit: str
    p50: float
    p20: float
    p80: float
    n: int
    device: str
    versions: str
    commit: str
    date: str


COLUMNS = [field.name for field in fields(Row)]


@dataclass(frozen=True)
class Origin:
    """Facts that all rows of a run share."""

    device: str
    versions: str
    commit: str
    date: str

    @classmethod
    def here(cls, device: str) -> "Origin":
        versions = " ".join(f"{name} {_version(name)}" for name in ("torch", "megatron-core", "triton"))
        return cls(_device(device), versions, code(*MEASURED), date.today().isoformat())

    def row(self, case: str, impl: str, metric: str, unit: str, values: Sequence[float]) -> Row:
        p20, p50, p80 = percentiles(values)
        return Row(case, impl, metric, unit, p50, p20, p80, len(values), **asdict(self))


def percentiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the 20th, 50th and 80th percentile, interpolated between the values."""
    if len(values) == 1:
        return (values[0],) * 3
    fifths = statistics.quantiles(values, n=5, method="inclusive")
    return fifths[0], statistics.median(values), fifths[3]


def read(path: Path) -> list[Row]:
    with path.open(newline="") as file:
        found = csv.DictReader(file)
        if found.fieldnames != COLUMNS:
            raise ValueError(f"{path} has the columns {found.fieldnames}: they must be {COLUMNS}; remove the file")
        return [
            Row(**row | {name: float(row[name]) for name in ("p50", "p20", "p80")} | {"n": int(row["n"])})
            for row in found
        ]


def write(path: Path, rows: Iterable[Row], by: Sequence[str] = ("case",)) -> None:
    """Write `rows` to `path`, in the place of rows there that have the same values in the columns `by`."""
    rows, key = list(rows), attrgetter(*by)
    measured = {key(row) for row in rows}
    kept = [row for row in read(path) if key(row) not in measured] if path.exists() else []
    _store(path, kept + rows)


def drop(path: Path, unwanted: Callable[[Row], bool]) -> None:
    """Remove the unwanted rows from `path`."""
    _store(path, [row for row in read(path) if not unwanted(row)])


def file_name(device: str) -> str:
    """Return the name of a device's file of results, without its ending."""
    return re.sub(r"\W+", "-", device.lower())


def _store(path: Path, rows: list[Row]) -> None:
    """Write all rows, or none: a program that is killed meanwhile leaves the file as it was."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".new")
    with beside.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in rows:
            writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in astuple(row))
    beside.replace(path)


def table(rows: Iterable[Row]) -> str:
    """Return the medians as text: a block for each case, a line for each implementation, a column for each metric."""
    blocks: dict[str, dict[str, dict[str, Row]]] = {}
    for row in rows:
        blocks.setdefault(row.case, {}).setdefault(row.impl, {})[row.metric] = row
    lines = []
    for case, impls in blocks.items():
        metrics = list(dict.fromkeys(metric for found in impls.values() for metric in found))
        units = {metric: row.unit for found in impls.values() for metric, row in found.items()}
        heads = [metric if units[metric] in ("", "1") else f"{metric}, {units[metric]}" for metric in metrics]
        cells = [[case, *heads]]
        for impl, found in impls.items():
            cells.append([impl, *(f"{found[m].p50:.4g}" if m in found else "" for m in metrics)])
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        aligned = ["  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) for line in cells]
        lines += [aligned[0].rstrip(), "─" * len(aligned[0]), *(line.rstrip() for line in aligned[1:]), ""]
    return "\n".join(lines)


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" if line else "|" + "---|" * len(head) for line in (head, (), *lines))


def by_device(rows: Iterable[Row], metric: str) -> str:
    """Return the medians of one metric in Markdown: a table for each case, a line for each head, a column a device."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        if row.metric == metric:
            found.setdefault(row.case, {}).setdefault(row.impl, {})[row.device] = row.p50
    lines = []
    for case, impls in found.items():
        devices = sorted({device for medians in impls.values() for device in medians})
        cells = [[f"{of[device]:.4g}" if device in of else "" for device in devices] for of in impls.values()]
        body = [[impl, *row] for impl, row in zip(impls, cells, strict=True)]
        lines += [f"{case}: {metric}", "", markdown(["head", *devices], body), ""]
    return "\n".join(lines)


def _version(package: str) -> str:
    if package == "torch":
        return torch.__version__
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "absent"


def _device(kind: str) -> str:
    if kind == "cuda":
        return torch.cuda.get_device_name()
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def code(*patterns: str) -> str:
    """Return an identifier of the code: the last commit that changed files of these patterns, with a + if tracked files
    differ from that commit.

    Without git it is a digest of the files. Results that are committed later do not change the identifier.
    """
    root = Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", root, *arguments, "--", *patterns]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    commit = git("log", "-1", "--format=%h") if shutil.which("git") else ""
    if commit:
        return commit + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    digest = hashlib.sha1()
    for path in sorted(path for pattern in patterns for path in root.glob(pattern) if path.is_file()):
        digest.update(path.relative_to(root).as_posix().encode() + path.read_bytes())
    return f"files {digest.hexdigest()[:8]}"

"""The README's first screen: its table is measured, and it is short."""

import csv
import os
import re
from pathlib import Path

import pytest

from tests.pages import blocks, section
from tests.programs import alone

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXT = README.partition("<!-- first screen -->")[2].partition("<!-- end of the first screen -->")[0]
ROWS = {
    "Megatron-Core 0.16.1, a loss per token": "megatron unfused",
    "Liger-Kernel 0.8.5 (Triton kernels), one mean loss": "liger",
    "megatron_ext, a loss per token": "ours, default",
    "megatron_ext, a loss per token, `cache=0`": "ours, cache 0",
}


def test_table_has_the_measured_rows():
    with (ROOT / "benchmarks" / "results" / "nvidia-h200.csv").open() as file:
        measured = {
            (row["impl"], row["metric"]): float(row["p50"]) for row in csv.DictReader(file) if row["case"] == "A"
        }
    for name, head in ROWS.items():
        time, peak = measured[head, "time"], measured[head, "peak of the allocator"]
        assert f"| {name} | {time:.1f} | {peak:.0f} |\n" in TEXT


def test_first_screen_is_a_screen():
    lines = [line for line in TEXT.splitlines() if line.strip()]
    assert len(lines) <= 25


def test_changelog_is_a_screen_until_the_first_release():
    assert len((ROOT / "docs" / "changelog.md").read_text().splitlines()) <= 40


# Rows of the demo's table whose numbers are the same in each run; the times are of one run.
SAME = ("head step in bf16, peak", "head step in fp32, peak", "collectives")


@pytest.mark.slow
def test_table_of_the_demo_is_what_it_prints(tmp_path):
    command = ("examples/demo.py", "--device", "cpu", "--train-iters", "2", "--out", str(tmp_path))
    done = alone(*command, env=os.environ | {"PYTHONPATH": str(ROOT)})
    shown = [block for _, block in blocks(section(ROOT / "README.md", "Try it")) if "final loss" in block]
    assert len(shown) == 1
    printed = {line[:35].strip(): line for line in done.stdout.splitlines()}
    for row in shown[0].splitlines():
        name = row[:35].strip()
        assert name in printed
        if name.startswith(SAME):  # a part of the memory depends on the processor's products
            numbers, now = ([float(x) for x in re.findall(r"\d+\.?\d*", line[35:])] for line in (row, printed[name]))
            assert numbers == pytest.approx(now, rel=0.05)

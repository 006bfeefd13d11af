"""The README's first screen: its table is measured, and it is short."""

import csv
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
TEXT = README.partition("<!-- first screen -->")[2].partition("<!-- end of the first screen -->")[0]
ROWS = {
    "Megatron-Core 0.16.1": "megatron unfused",
    "Liger-Kernel 0.8.5, Triton": "liger",
    "megatron_ext": "ours, default",
    "megatron_ext, `cache=0`": "ours, cache 0",
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
    assert len(lines) <= 32
